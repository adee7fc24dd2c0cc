"""Numbers of tests become benchmark lines where a file is named, and are printed in any case."""

import json
from pathlib import Path

import pytest

from tests.support.figures import Figure, keep


def test_a_number_is_a_benchmark_line(tmp_path: Path) -> None:
    for value in (1.5, 2.5):
        keep(tmp_path / "f.jsonl", "tests/x.py", {"work": "w", "value": value, "unit": "u"})
    first, second = map(json.loads, (tmp_path / "f.jsonl").read_text().splitlines())
    assert (first["value"], second["value"]) == (1.5, 2.5)
    assert first["command"] == "python -m pytest -m cuda tests/x.py --figures FILE"
    assert {"device", "rates", "versions", "commit"} <= first.keys()


def test_without_a_file_it_is_printed(
    figure: Figure, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    figure("w", 3, "u", batch=2)
    said = json.loads(capsys.readouterr().out)
    assert said == {"work": "w", "value": 3, "unit": "u", "floor": None, "batch": 2}
