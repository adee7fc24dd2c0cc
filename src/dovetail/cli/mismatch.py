"""``dovetail mismatch``: how far a trainer and a rollout are apart, from a file of their logprobs.

Owns the presentation; the file and the measures are those of ``replay.comparison``. The figure
needs matplotlib, an optional package that is loaded when ``--plot`` asks for it.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dovetail.cli.options import PLOT_INSTALL
from dovetail.errors import ConfigError
from dovetail.replay.comparison import Comparison
from dovetail.replay.mismatch import Interval, Mismatch, ratio_interval

MAX_COLUMNS = 400
"""Positions of the heat map that are drawn apart; more are averaged."""

# Measure -> what it says, in the order of the table
MEASURES = {
    "k3": "KL(rollout, trainer), estimated without bias",
    "k1": "the same, may be negative: mean of log p_rollout - log p_train",
    "k2": "half the mean square of the difference",
    "mean_abs": "mean |difference| of logprobs",
    "max_abs": "largest |difference|",
    "bit_mismatch": "share of tokens whose float32 logprobs differ in any bit",
    "chi2": "variance of the importance weights of tokens",
    "ess": "effective sample size of those weights, of all tokens",
    "sequence_ess": "the same of whole sequences",
    "prob_corr": "correlation of the two probabilities",
    "sequence_log_ratio": "mean over sequences of the summed difference",
    "geometric_log_ratio": "mean over sequences of the mean difference",
}
ROUTES = {
    "router_diff": "share of (token, layer) with other experts",
    "slot_overlap": "share of expert slots in common",
    "token_any_diff": "share of tokens with other experts in some layer",
    "layers_per_token": "layers with other experts, of a token on average",
}


def run(args: argparse.Namespace) -> int:
    """Print the report of ``args.file``, and draw it where ``args.plot`` says."""
    comparison = _load(args.file)
    _check_sequence(args, len(comparison.sequences))
    found = {
        arm: comparison.measure(arm, num_resamples=args.resamples) for arm in comparison.arm_names
    }
    if args.json:
        print(json.dumps(_as_json(comparison, found), indent=2))
    else:
        _print(comparison, found)
    if args.plot is not None:
        draw(comparison, args.plot, sequence=args.sequence)
    return 0


def _load(path: Path) -> Comparison:
    try:
        return Comparison.load(path)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(str(path), str(error)) from None


def _check_sequence(args: argparse.Namespace, count: int) -> None:
    if args.sequence is None:
        return
    if args.plot is None:
        raise ConfigError("--sequence", "is drawn in the figure alone; give --plot FILE.png, too")
    if not 0 <= args.sequence < count:
        raise ConfigError(
            "--sequence", f"is {args.sequence}; the file has {count} sequences, from 0"
        )


# -- the report ----------------------------------------------------------------------------------


def ratios(found: dict[str, Mismatch]) -> dict[str, tuple[float, Interval]]:
    """Return the ratio of the second arm to the first, of measures that are sizes."""
    if len(found) != 2:
        return {}
    first, second = found.values()
    names = ["k3", "k2", "mean_abs", "max_abs", *(f"F({tau:g})" for tau in first.tail)]
    return {name: ratio_interval(name, second, first) for name in names if first.value(name) > 0}


def _as_json(comparison: Comparison, found: dict[str, Mismatch]) -> dict[str, Any]:
    arms: dict[str, Any] = {}
    for arm, mismatch in found.items():
        fields = {name: getattr(mismatch, name) for name in ("num_tokens", *MEASURES)}
        fields["tail"] = {f"{tau:g}": share for tau, share in mismatch.tail.items()}
        fields["intervals"] = mismatch.intervals
        arms[arm] = fields
    first = next(iter(found.values()))
    return _finite(
        {
            "title": comparison.title,
            "num_sequences": first.num_sequences,
            "arms": arms,
            "ratios": {
                name: {"value": value, "interval": interval}
                for name, (value, interval) in ratios(found).items()
            },
            "routes": comparison.routes(),
        }
    )


def _finite(value: Any) -> Any:
    """Replace what JSON cannot say by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(comparison: Comparison, found: dict[str, Mismatch]) -> None:
    console = Console(highlight=False)
    first = next(iter(found.values()))
    title = escape(comparison.title or "trainer against rollout")
    console.print(f"{title}: {first.num_tokens:,} tokens of {first.num_sequences:,} sequences")
    both = ratios(found)
    meanings = MEASURES | {
        f"F({tau:g})": f"share of tokens off by more than {tau:g}x" for tau in first.tail
    }
    table = _table("mismatch")
    table.add_column("measure", no_wrap=True)
    for arm in found:
        table.add_column(escape(arm), justify="right", overflow="fold")
    if both:
        table.add_column(
            escape(" / ".join(reversed(list(found)))), justify="right", overflow="fold"
        )
    for name in meanings:
        cells = [
            _cell(_value(mismatch, name), mismatch.intervals.get(name))
            for mismatch in found.values()
        ]
        if both:
            cells.append(_cell(*both[name]) if name in both else "")
        table.add_row(name, *cells)
    console.print(table)
    routes = comparison.routes()
    if routes:
        console.print()
        table = _table("routes")
        table.add_column("routers", no_wrap=True)
        table.add_column("live", justify="right", overflow="fold")
        for name in ROUTES:
            table.add_row(name, f"{routes[name]:.4g}")
        console.print(table)
        meanings |= ROUTES
    console.print()
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for name, meaning in meanings.items():
        table.add_row(name, meaning)
    console.print(table)


def _table(title: str) -> Table:
    """Return a table without frames: numbers of two arms and their ratio have to fit 80 columns."""
    return Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )


def _value(mismatch: Mismatch, name: str) -> float:
    return getattr(mismatch, name) if name in MEASURES else mismatch.value(name)


def _cell(value: float, interval: Interval | None) -> str:
    if math.isnan(value):
        return "undefined"
    shown = f"{value:.4g}"
    if interval is None:
        return shown
    low, high = interval
    if math.isnan(low) or math.isnan(high):  # some resamples have none of it
        return f"{shown} (no interval)"
    return escape(f"{shown} [{low:.2g},{high:.2g}]")  # without spaces it is not divided


# -- the figure ----------------------------------------------------------------------------------


def draw(comparison: Comparison, path: Path, *, sequence: int | None = None) -> None:
    """Write the figure.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot", f"needs matplotlib, which is missing: {PLOT_INSTALL}") from None
    has_routes = bool(comparison.layer_ids)
    figure = Figure(figsize=(8, 8 if has_routes else 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2 if has_routes else 1, 1, squeeze=False)[:, 0]
    _draw_survival(panels[0], comparison)
    if has_routes:
        _draw_routes(figure, panels[1], comparison, sequence)
    figure.suptitle(comparison.title)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # a folder that is missing; a suffix that is no format
        raise ConfigError("--plot", f"{path} cannot be written: {error}") from None


def _draw_survival(panel: Any, comparison: Comparison) -> None:
    for arm in comparison.arm_names:
        size, share = comparison.survival(arm)
        keep = size > 0  # equal logprobs have no place on a logarithmic axis
        panel.step(size[keep], share[keep], where="post", label=arm)
    panel.set(
        xscale="log", yscale="log",
        xlabel="|log p_train - log p_rollout|", ylabel="share of tokens at or above",
    )  # fmt: skip
    panel.axvline(math.log(2), color="grey", linewidth=0.8, linestyle=":")
    panel.annotate("2x", (math.log(2), 1), color="grey", ha="left", va="top")
    panel.grid(visible=True, alpha=0.3)
    panel.legend()


def _draw_routes(figure: Any, panel: Any, comparison: Comparison, sequence: int | None) -> None:
    share = comparison.route_map(sequence)
    positions = share.shape[1]
    image = panel.imshow(
        binned(share, MAX_COLUMNS), aspect="auto", interpolation="nearest", origin="lower", vmin=0,
        extent=(0, positions, -0.5, len(comparison.layer_ids) - 0.5), cmap="magma",
    )  # fmt: skip
    step = max(1, len(comparison.layer_ids) // 12)
    places = range(0, len(comparison.layer_ids), step)
    panel.set_yticks(list(places), [str(comparison.layer_ids[place]) for place in places])
    of = "all sequences" if sequence is None else f"sequence {sequence}"
    panel.set(xlabel=f"position in {of}", ylabel="layer")
    figure.colorbar(image, ax=panel, label="share with other experts")


def binned(share: np.ndarray, max_columns: int) -> np.ndarray:
    """Return [rows, at most max_columns], neighbouring columns averaged; nan is left out."""
    columns = share.shape[1]
    if columns <= max_columns:
        return share
    parts = np.array_split(np.arange(columns), max_columns)
    is_known = ~np.isnan(share)
    known = np.where(is_known, share, 0.0)
    out = [known[:, part].sum(1) / np.maximum(is_known[:, part].sum(1), 1) for part in parts]
    return np.stack(out, axis=1)
