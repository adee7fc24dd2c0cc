"""What a start shows where there is no terminal: a line for what took long."""

from types import SimpleNamespace

import pytest

from dovetail.cli import progress
from dovetail.cli.progress import starting_bars


def test_what_takes_long_is_worth_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.5, 1.5, 9.0, 9.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with starting_bars() as on_progress:
        for what, num_total in (("loading weights", 3), ("recording graphs", 25)):
            for num_done in range(1, num_total + 1):
                on_progress(what, num_done, num_total)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "dovetail: recording graphs: 25 in 7.5 s\n"
