"""``dovetail bench``: the lines it prints, and the arithmetic of its numbers.

Times are replaced by counts of generated tokens, so nothing depends on how busy the machine is.
"""

import io
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli import bench, machine, main
from dovetail.cli.bench import SHORT_STEPS, step_seconds
from dovetail.cli.progress import progress_bar
from dovetail.core.generation import Generation
from dovetail.errors import RequestError

Capture = pytest.CaptureFixture[str]
KEYS = [
    "work", "shape", "batch", "value", "unit", "floor", "best_peer", "device", "rates", "versions",
    "commit", "command",
]  # fmt: skip


@pytest.fixture(autouse=True)
def tokens_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(work: Callable[[], list[Generation]]) -> float:
        return float(sum(len(generation.token_ids) for generation in work()))

    monkeypatch.setattr(bench, "seconds_of", count)
    monkeypatch.setattr(machine, "COPY_ELEMENTS", 2**10)
    monkeypatch.setattr(machine, "GEMM_SIZE", 16)


def run(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    assert main(["bench", *words]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        assert list(line) == KEYS
        assert line["floor"] is None and line["best_peer"] is None
        assert line["command"] == shlex.join(["dovetail", "bench", *words])
        assert line["rates"]["copy_GB_per_s"] > 0 and line["rates"]["gemm_GFLOP_per_s"] > 0
        assert set(line["versions"]) == {"dovetail", "python", "torch"}
    return lines


def numbers(lines: list[dict[str, Any]]) -> list[tuple[str, int, float, str]]:
    return [(line["work"], line["batch"], line["value"], line["unit"]) for line in lines]


def test_offline(capsys: Capture) -> None:
    lines = run(
        capsys, "offline", "--num-prompts", "3", "--input-len", "8", "--output-len", "4",
        "--max-running", "2",
    )  # fmt: skip
    assert numbers(lines) == [  # a "second" is a token
        ("offline", 2, 2.0, "input tokens/s"),
        ("offline", 2, 1.0, "output tokens/s"),
    ]
    assert lines[0]["shape"] == "tiny-moe float32, temperature 1, 3 prompts of 8 tokens, 4 out"


def test_lengths_are_drawn_evenly_and_by_seed(capsys: Capture) -> None:
    words = ["offline", "--num-prompts", "6", "--input-len", "2:30", "--output-len", "1:4"]
    first, again, other = (run(capsys, *words, "--seed", seed)[0] for seed in ("0", "0", "1"))
    assert first["value"] == again["value"] != other["value"]
    assert "6 prompts of 2 to 30 tokens, 1 to 4 out" in first["shape"]


def test_decode(capsys: Capture) -> None:
    lines = run(
        capsys, "decode", "--batches", "1,3", "--contexts", "10,20", "--steps", "2",
        "--repeats", "1",
    )  # fmt: skip
    assert numbers(lines) == [
        ("decode", batch, 1000.0 * batch, "ms/step") for batch in (1, 1, 3, 3)
    ]
    assert [line["shape"].partition("context ")[2] for line in lines] == [
        "10 to 12",
        "20 to 22",
    ] * 2


def test_prefill(capsys: Capture) -> None:
    lines = run(capsys, "prefill", "--input-lens", "5,40", "--repeats", "1", "--chunk-size", "16")
    assert numbers(lines) == [
        ("prefill", 1, 5.0, "input tokens/s"),
        ("prefill", 1, 40.0, "input tokens/s"),
    ]
    assert "prompt of 40 tokens, chunks of 16" in lines[1]["shape"]


def test_no_repeat_of_a_prefill_finds_its_prompt_computed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(work: Callable[[], list[Generation]]) -> float:
        [usage] = [generation.usage for generation in work()]
        return float(usage.prompt_tokens - usage.cached_tokens)

    monkeypatch.setattr(bench, "seconds_of", count)
    [line] = run(capsys, "prefill", "--input-lens", "64", "--repeats", "2")
    assert line["value"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "9", "--max-running", "8"], "--batches: 9 is above --max-running 8"),
        (["--contexts", "8"], "--contexts: 8 with 32 steps; legal are 9 to 2016"),
        (["--contexts", "2017"], "--contexts: 2017 with"),
        (
            ["--batches", "2", "--num-pages", "4", "--context-len", "64", "--contexts", "20"],
            "--batches: 2 sequences of 52 tokens need 8 pages, but the pool has 4",
        ),
    ],
)
def test_a_batch_that_would_not_run_as_one_is_refused(
    words: list[str], message: str, capsys: Capture
) -> None:
    assert main(["bench", "decode", "--steps", "32", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_step_is_the_difference_of_the_least_times() -> None:
    calls: list[int] = []
    disturbances = iter([9.0, 9.0, 0.5, 0.0, 0.0, 0.25])  # the first two runs do not count

    def run_for(num_tokens: int) -> float:
        calls.append(num_tokens)
        return 100.0 + 2.0 * num_tokens + next(disturbances)

    assert step_seconds(run_for, num_steps=4, repeats=range(2)) == 2.0
    assert calls == [SHORT_STEPS, SHORT_STEPS + 4] * 3


def test_a_difference_below_the_noise_is_no_number() -> None:
    with pytest.raises(RequestError, match="--steps: 4 steps are lost"):
        step_seconds(lambda _: 1.0, num_steps=4, repeats=range(1))


def test_a_bar_leaves_standard_output_alone(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar() as progress:
        progress.add_task("work", total=1)
        assert not progress.disable
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "work" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_file_outside_a_repository_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / "module.py").touch()
    assert machine.commit(tmp_path / "module.py") is None
