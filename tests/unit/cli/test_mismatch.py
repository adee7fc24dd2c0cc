"""``dovetail mismatch`` prints what was measured, draws it, and explains what it cannot read."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.cli import main
from dovetail.cli.mismatch import MEASURES, ROUTES, binned
from dovetail.replay.comparison import Comparison
from dovetail.replay.mismatch import ratio_interval

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def comparison() -> Comparison:
    rng = np.random.default_rng(0)
    rollout = [np.log(rng.uniform(0.05, 0.9, 12)) for _ in range(8)]
    noise = [rng.normal(0, 0.4, 12) for _ in range(8)]
    return Comparison.of_arrays(
        rollout,
        {
            "live": [a + b for a, b in zip(rollout, noise, strict=True)],
            "replayed": [a + b / 4 for a, b in zip(rollout, noise, strict=True)],
        },
        starts=[4] * 8,
        overlaps=[rng.integers(0, 3, (15, 2)) for _ in range(8)],
        layer_ids=(0, 1),
        num_experts_per_tok=2,
        title="step 7",
    )


@pytest.fixture
def file(comparison: Comparison, tmp_path: Path) -> Path:
    comparison.save(tmp_path / "step-7")
    return tmp_path / "step-7"


def test_the_report_has_each_measure_of_each_arm(
    file: Path, comparison: Comparison, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["mismatch", str(file)]) == 0
    said = capsys.readouterr().out
    assert "step 7: 96 tokens of 8 sequences" in said
    for arm in ("live", "replayed"):
        found = comparison.measure(arm)
        low, high = found.intervals["k3"]
        assert f"{found.k3:.4g} [{low:.2g},{high:.2g}]" in said
        assert f"{found.tail[1.5]:.4g} [" in said
    assert "replayed / live" in said
    assert f"{comparison.routes()['router_diff']:.4g}" in said


def test_at_80_columns_names_and_numbers_are_whole(
    file: Path, comparison: Comparison, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["mismatch", str(file)]) == 0
    said = capsys.readouterr().out
    assert "\u2026" not in said and max(map(len, said.splitlines())) <= 80
    numbers = said.split()
    for arm in ("live", "replayed"):
        found = comparison.measure(arm)
        assert {*MEASURES, *ROUTES, f"{found.k3:.4g}", f"{found.max_abs:.4g}"} <= set(numbers)
    for meaning in (*MEASURES.values(), *ROUTES.values()):
        assert all(word in numbers for word in meaning.split())


def test_json_has_the_same_numbers(file: Path, comparison: Comparison, capsys: Capture) -> None:
    assert main(["mismatch", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    live, replayed = (comparison.measure(arm) for arm in ("live", "replayed"))
    assert said["arms"]["live"]["k3"] == live.k3
    assert said["arms"]["replayed"]["tail"]["1.1"] == replayed.tail[1.1]
    assert said["arms"]["live"]["intervals"]["k3"] == list(live.intervals["k3"])
    ratio, interval = ratio_interval("k3", replayed, live)
    assert said["ratios"]["k3"] == {"value": ratio, "interval": list(interval)}
    assert said["routes"] == comparison.routes()


def test_a_ratio_of_what_hardly_occurs_has_no_interval(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    live, replayed = [[-1.0], [-2.0]], [[-1.0], [-1.0]]
    arms = {"live": live, "replayed": replayed}
    title = "[bold]step[/bold] 7"
    Comparison.of_arrays(replayed, arms, starts=[1, 1], title=title).save(tmp_path / "a")
    assert main(["mismatch", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "0 (no interval)" in said and title in said
    assert "prob_corr" in said and "undefined" in said and "nan" not in said


def test_json_of_one_constant_arm_has_nulls_and_no_ratio(tmp_path: Path, capsys: Capture) -> None:
    rows = [[-1.0, -1.0], [-1.0, -1.0]]
    Comparison.of_arrays(rows, {"live": rows}, starts=[1, 1]).save(tmp_path / "a")
    assert main(["mismatch", str(tmp_path / "a"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said["arms"]["live"]["prob_corr"] is None
    assert (said["ratios"], said["routes"]) == ({}, {})
    assert main(["mismatch", str(tmp_path / "a")]) == 0


@pytest.mark.parametrize("words", [[], ["--sequence", "3"]])
def test_the_figure_is_a_png(file: Path, tmp_path: Path, words: list[str]) -> None:
    picture = tmp_path / "a.png"
    assert main(["mismatch", str(file), "--plot", str(picture), *words]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sequence", "3"], "--sequence: is drawn in the figure alone; give --plot"),
        (["--plot", "a.png", "--sequence", "8"], "--sequence: is 8; the file has 8 sequences"),
        (["--plot", "no-such-folder/a.png"], "no-such-folder/a.png cannot be written"),
        (["--plot", "a.txt"], "a.txt cannot be written"),
    ],
)
def test_a_figure_that_cannot_be_drawn_is_explained(
    file: Path, tmp_path: Path, words: list[str], message: str, capsys: Capture, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["mismatch", str(file), *words]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_the_error_says_how_to_get_it(
    file: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["mismatch", str(file), "--plot", str(tmp_path / "a.png")]) == 2
    assert "pip install matplotlib pillow" in capsys.readouterr().err
    assert main(["mismatch", str(file)]) == 0


def test_a_file_that_is_none_is_explained(tmp_path: Path, capsys: Capture) -> None:
    assert main(["mismatch", str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "other").write_text("{}")
    assert main(["mismatch", str(tmp_path / "other")]) == 2
    assert "Comparison.save of dovetail.replay.comparison writes one" in capsys.readouterr().err
    (tmp_path / "number").write_text("1")
    assert main(["mismatch", str(tmp_path / "number")]) == 2
    said = capsys.readouterr().err
    assert "this is no comparison; Comparison.save" in said and "object" not in said


def test_many_columns_are_averaged_and_gaps_left_out() -> None:
    share = np.array([[0.0, 1.0, np.nan, 0.5, 1.0, 1.0]])
    np.testing.assert_allclose(binned(share, 3), [[0.5, 0.5, 1.0]])
    assert binned(share, 6) is share
