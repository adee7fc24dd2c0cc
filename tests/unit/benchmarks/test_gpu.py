"""The works of a GPU and their floors, against the table that they are compared with."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import benchmarks.gpu as gpu_module
from benchmarks.common import write_newest
from benchmarks.gpu import NUM_SEEN, SHAPES, Figure, Works, distinct_experts
from dovetail.config.model import ModelConfig
from dovetail.wire.request import SamplingParams

FLOORS = {
    "0.6b": {"a": [7.7], "b": [0.29, 0.51, 1.21, 2.26], "c": [0.113]},
    "30b-a3b": {"a": [22.0], "b": [1.43, 12.7, 15.0, 15.8], "c": [0.59], "d": [22.0]},
}
"""Worked out by somebody else, for a device copy of 4.26 TB/s and 790 TFLOP/s."""


def figures_of(shape: str, works: str) -> list[Figure]:
    config = SimpleNamespace(model=ModelConfig.from_folder(SHAPES / shape), capture=())
    engine = SimpleNamespace(config=config)
    return list(Works(engine, repeats=5, runs=2, batches=(1, 32, 128, 256)).figures(works))


@pytest.mark.parametrize("shape", FLOORS)
def test_floors_are_those_of_the_table(shape: str) -> None:
    for work, floors in FLOORS[shape].items():
        found = [figure.floor for figure in figures_of(shape, work)]
        assert found == pytest.approx(floors, rel=0.02)


def test_works_come_in_the_order_asked_for_and_say_how_long_they_take() -> None:
    figures = figures_of("30b-a3b", "cba")
    assert [figure.work for figure in figures] == ["c", *"bbbb", "a"]
    # On one H200, 5 repeats of (16 + 272) steps of 20.6 ms, and two runs of 30 s.
    assert figures[4].estimate_s == pytest.approx(5 * 288 * 0.0206, rel=0.2)
    assert figures[5].estimate_s == pytest.approx(60, rel=0.2)


def test_a_figures_older_line_makes_room_for_its_newest(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for value, work, batch in ((1, "a", 1), (2, "b", 1), (3, "a", 2), (4, "a", 1)):
        write_newest(path, {"work": work, "batch": batch, "value": value}, of=("work", "batch"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["value"] for line in lines] == [2, 3, 4]


def test_distinct_experts_are_counted_by_step_and_layer() -> None:
    """Two rows, all of whose last steps are looked at: the same experts, or others."""
    same = np.zeros((12, 3, 2), dtype=np.uint8)
    same[..., 1] = 1
    other = same.copy()
    other[-1] += 2  # in the last step each layer has two more
    outs = [SimpleNamespace(routes=SimpleNamespace(ids=ids)) for ids in (same, other)]
    asked = []

    def generate(prompts: list, sampling: SamplingParams, *, capture: tuple) -> list:
        asked.append((len(prompts), sampling.max_new_tokens, capture))
        return outs

    engine = SimpleNamespace(generate=generate)
    assert distinct_experts(engine, [[1], [2]]) == (2 * (NUM_SEEN - 1) + 4) / NUM_SEEN
    assert asked == [(2, NUM_SEEN + 1, ("experts",))]  # the last token has no row


def test_of_some_runs_the_last_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
    monkeypatch.setattr(gpu_module, "seconds", lambda *args: next(times))
    config = SimpleNamespace(model=ModelConfig.from_folder(SHAPES / "0.6b"), capture=())
    works = Works(SimpleNamespace(config=config), repeats=5, runs=3, batches=())
    for figure, runs in zip(works.figures("ac"), ([3.0, 1.0, 2.0], [5.0, 4.0, 6.0]), strict=True):
        value, more = figure.measure()
        assert (value, more["runs"]) == (runs[-1], runs)
