"""Numbers of tests become benchmark lines where a file is named, and are printed in any case."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.figures import Figure, keep, pytest_terminal_summary


def test_a_number_is_a_benchmark_line(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    for value in (1.5, 2.5):
        keep(file, "-m", "cuda", "x.py", "--figures", str(file), line={"work": "w", "value": value})
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["value"], second["value"]) == (1.5, 2.5)
    assert first["command"] == "python -m pytest -m cuda x.py --figures FILE"
    assert {"device", "rates", "versions", "commit"} <= first.keys()


def test_without_a_file_it_is_printed(
    figure: Figure, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    figure("w", 3, "u", batch=2)
    said = json.loads(capsys.readouterr().out)
    assert said == {"work": "w", "value": 3, "unit": "u", "floor": None, "batch": 2}


@pytest.mark.parametrize(
    ("has_file", "part"), [(True, {}), (False, {}), (True, {"workerinput": {}})]
)
def test_how_a_run_ended_is_a_line_too(
    has_file: bool, part: dict[str, object], tmp_path: Path
) -> None:
    """One for all workers of pytest-xdist, each of which ends, too."""
    file = tmp_path / "f.jsonl"
    config: Any = SimpleNamespace(
        getoption=lambda name: file if has_file else None,
        invocation_params=SimpleNamespace(args=("tests", "--ignore", "x", "--figures", str(file))),
        **part,
    )
    reporter: Any = SimpleNamespace(stats={"passed": [1, 2, 3], "failed": [4], "": [5]})
    pytest_terminal_summary(reporter, config)
    is_kept = has_file and not part
    assert file.exists() == is_kept
    if is_kept:
        line = json.loads(file.read_text())
        assert (line["work"], line["value"]) == ("tests", 3)
        assert line["ends"] == {"passed": 3, "failed": 1, "error": 0, "skipped": 0}
        assert line["command"] == "python -m pytest tests --ignore x --figures FILE"
