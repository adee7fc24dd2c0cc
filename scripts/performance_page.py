"""The text of docs/performance.md: ``performance.md`` beside this file, with figures filled in.

Figures of tables and lists are looked up in benchmarks/results; what is said of them stands in the
text, and belongs to those that were there when it was written. ``{{shape work rows}}`` stands for a
figure's cells in a table.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TEMPLATE = ROOT / "benchmarks" / "results", ROOT / "scripts" / "performance.md"
_PLACE = re.compile(r"\{\{(.+?)\}\}")

Line = dict[str, Any]


def performance_page() -> str:
    """Return the text of docs/performance.md."""
    return filled(
        TEMPLATE.read_text(encoding="utf-8"),
        works=_lines("gpu"),
        steps=_lines("gpu_steps"),
        capture=_lines("gpu_capture"),
    )


def filled(text: str, *, works: list[Line], steps: list[Line], capture: list[Line]) -> str:
    """Return the text with its figures.

    Raises:
        ValueError: a figure has no row, or a place no meaning.
    """
    figures = {f"{line['shape']} {line['work']} {line['batch']}": line for line in works}
    places = [place for place in _PLACE.findall(text) if len(place.split()) == 3]
    if homeless := sorted(figures.keys() - {*places}):
        raise ValueError(f"scripts/performance.md has no row for {', '.join(homeless)}")
    parts = {"steps": _listed(_steps(steps)), "capture": _listed(map(_cost, capture))}
    parts |= {"steps at": _commits(steps)}
    for shape in {place.split()[0] for place in places}:
        measured = [figures[place] for place in places if place in figures]
        parts[f"summary {shape}"] = _summary([one for one in measured if one["shape"] == shape])
    for place in places:
        parts[place] = _cells(place, figures.get(place))
    if strange := {*_PLACE.findall(text)} - parts.keys():
        raise ValueError(f"nothing is known of {', '.join(sorted(strange))}")
    return _PLACE.sub(lambda match: parts[match[1]], text)


def _cells(place: str, line: Line | None) -> str:
    _, work, rows = place.split()
    name = f"b, {rows} row{'s'[: rows != '1']}" if work == "b" else work
    if line is None:
        return f"{name} | not measured | | | | "
    value, peer, floor = line["value"], line["best_peer"], line["floor"]
    cells = [name, f"{_figure(value)} {line['unit']}"]
    cells += ["", ""] if peer is None else [_figure(peer), f"{value / peer:.2f}"]
    cells += [_figure(floor), f"{value / floor:.2f}"]
    return " | ".join(cells)


def _summary(lines: list[Line]) -> str:
    if not lines:
        return "Nothing of this shape is measured."
    slower = [line for line in lines if line["best_peer"] and line["value"] > line["best_peer"]]
    names = [f"b at {line['batch']}" if line["work"] == "b" else line["work"] for line in slower]
    text = f"Slower than the best other: {', '.join(names) if names else 'none'}. "
    distinct = [line for line in lines if "distinct_experts" in line]
    if distinct:
        of = {one["batch"]: one["distinct_experts"] for one in distinct}  # d has those of a
        counts = ", ".join(f"{of[rows]:.1f} at {rows}" for rows in sorted(of))
        text += f"Experts of a layer that so many rows choose, on average: {counts}. "
    copies = [line["rates"]["copy_GB_per_s"] / 1000 for line in lines]
    products = [line["rates"]["gemm_TFLOP_per_s"] for line in lines]
    return text + (
        f"The machine's own rates in these runs: copies {_span(copies)} TB/s, "
        f"{_share(copies, 4.26)} of the floor's; products {_span(products)} TFLOP/s, "
        f"{_share(products, 790)}. {_commits(lines)}."
    )


def _commits(lines: list[Line]) -> str:
    return f"Measured at {', '.join(dict.fromkeys(line['commit'] for line in lines))}"


def _share(values: list[float], reference: float) -> str:
    low, high = (f"{100 * value / reference:.0f}" for value in (min(values), max(values)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def _steps(lines: list[Line]) -> list[str]:
    """Return what was counted, once if all runs agree, and the times of all runs, in order.

    Raises:
        ValueError: the runs are of different things.
    """
    if len({(line["batch"], *line["capture"]) for line in lines}) > 1:
        raise ValueError("runs of gpu_steps.jsonl differ in rows or capture")
    counts = [_counted(line) for line in lines if line["unit"] == "copies"]
    times: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines:
        if line["unit"] != "copies":
            for what, us in _times(line).items():
                times[f"{what}, us, `{line['shape']}`"].append(f"{us:.0f} ({line['commit']})")
    return [*dict.fromkeys(counts), *(f"{of}: {', '.join(them)}" for of, them in times.items())]


def _times(line: Line) -> dict[str, float]:
    """Return microseconds; of the host's, those of the parts that wait for nothing, too."""
    what, us = line["work"].removeprefix("step: "), line["value"]
    if what != "host time":
        return {what: us}
    return {
        "plan and commit": line["us"]["plan"] + line["us"]["commit"],
        "all that the host does but wait": us,
    }


def _counted(line: Line) -> str:
    counts = Counter(line["a_step"])  # what was not seen is not named
    return (
        f"{line['work'].removeprefix('copies a step: ')}: {counts['HtoD']:g} copies to the device, "
        f"{counts['DtoH']:g} back, {counts['allocations']:g} allocations, "
        f"{counts['graph launches']:g} graph and {counts['kernel launches']:g} kernels launched, "
        f"{counts['waits']:g} waits"
    )


def _cost(line: Line) -> str:
    what, value = f"{line['work']} ({line['shape']}", line["value"]
    if "interval" not in line:
        size = f", {line['bytes']:,} bytes" if "bytes" in line else ""
        middle = f", {line['median']:g} in the middle" if "median" in line else ""
        graph = f", {line['graph_us']:g} in a graph" if "graph_us" in line else ""
        return f"{what}{size}, {line['commit']}): {value:g} {line['unit']} at best{middle}{graph}"
    low, high = (f"{100 * end:.2f}" for end in line["interval"])
    return (
        f"{what}, {line['batch']} requests, {line['commit']}): {100 * value:.2f} % of the rate "
        f"without, 95 % interval {low} to {high}, {len(line['seconds'])} pairs"
    )


def _lines(name: str) -> list[Line]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def _listed(items: Iterable[str]) -> str:
    return "\n".join(f"* {item}" for item in items)


def _figure(value: float) -> str:
    return f"{value:.3f}" if value < 1.5 else f"{value:.2f}"


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
