"""Curves of the examples, as SVG. The only module that needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl  # pyright: ignore[reportMissingImports]
import numpy as np
from matplotlib import pyplot as plt  # pyright: ignore[reportMissingImports]
from numpy.typing import NDArray

from r3.summary import Run

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]

COLOURS = {"on": "C0", "off": "C3", "on+tis": "C2", "off+tis": "C1", "frozen": "C7"}
SMOOTHING = 10  # steps that are averaged


def draw_mismatch(curves: Mapping[str, tuple[Curve, Curve]], path: Path) -> None:
    """Draw, for each arm, the share of tokens whose |D| is at least so large: live and replayed."""
    figure, axes = plt.subplots(
        1, len(curves), figsize=(3.2 * len(curves), 3.2), sharex=True, sharey=True, squeeze=False
    )
    for place, (name, (off, on)) in zip(axes[0], curves.items(), strict=True):
        for label, colour, (size, share) in (("off", "C3", off), ("on", "C0", on)):
            kept = _thinned(len(size))
            place.loglog(np.maximum(size[kept], 1e-7), share[kept], colour, label=f"replay {label}")
        place.axvline(np.log(2), color="0.7", linewidth=0.8)
        place.set_title(name, fontsize=9)
        place.set_xlabel("|log p trainer - log p rollout|", fontsize=8)
    axes[0, 0].set_ylabel("share of tokens at or above", fontsize=8)
    axes[0, 0].legend(fontsize=8)
    _save(figure, path)


def draw_training(runs: Sequence[Run], path: Path) -> None:
    """Draw what changes over the steps: each arm's mean over its seeds, and their range."""
    panels: dict[str, tuple[str, bool]] = {
        "k3": ("k3 of trainer and rollout", True),
        "max_abs": ("largest |D| of a step", True),
        "grad_norm": ("gradient norm", True),
        "reward": ("reward", False),
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.2))
    for place, (name, (title, is_log)) in zip(axes, panels.items(), strict=True):
        for arm, colour in COLOURS.items():
            lines = [_smoothed(one["series"][name]) for one in runs if one["arm"] == arm]
            if lines:
                steps = np.arange(len(lines[0]))
                place.plot(steps, np.mean(lines, axis=0), colour, label=arm, linewidth=1.2)
                place.fill_between(
                    steps, np.min(lines, axis=0), np.max(lines, axis=0), color=colour, alpha=0.12
                )
        place.set_yscale("log" if is_log else "linear")
        place.set_title(title, fontsize=9)
        place.set_xlabel(f"step; means of {SMOOTHING}", fontsize=8)
    axes[0].legend(fontsize=8)
    _save(figure, path)


def _smoothed(series: Sequence[float]) -> NDArray[np.float64]:
    window = np.ones(min(SMOOTHING, len(series)))
    return np.convolve(series, window / len(window), mode="valid")


def _thinned(count: int, most: int = 200) -> NDArray[np.int64]:
    """Return places that are dense at the end, where the tail is."""
    from_end = np.unique(np.geomspace(1, count, min(count, most)).astype(np.int64))
    return (count - from_end)[::-1]


def _save(figure: Any, path: Path) -> None:
    mpl.rcParams["svg.hashsalt"] = "dovetail"  # the same picture is the same file
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
