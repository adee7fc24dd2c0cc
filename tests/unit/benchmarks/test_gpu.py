"""The works of a GPU and their floors, against the table that they are compared with."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.common import write_newest
from benchmarks.gpu import SHAPES, Figure, Works
from dovetail.config.model import ModelConfig

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
