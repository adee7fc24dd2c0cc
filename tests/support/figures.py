"""Numbers that tests come by: printed, and kept as benchmark lines if a file is named.

    pytest -m cuda tests/device/test_cuda_traffic.py --figures FILE.jsonl

A plugin, for its option.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.common import describe_run
from benchmarks.gpu_rates import gpu_facts

Figure = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--figures", type=Path, metavar="FILE", help="append the numbers that tests come by"
    )


def keep(file: Path, *args: str, line: dict[str, object]) -> None:
    """Append a number with what is to be said of its run, of which pytest had these arguments."""
    command = ["-m", "pytest", *(arg.replace(str(file), "FILE") for arg in args)]
    about = describe_run(command, "triton", "transformers", gpu=facts_of_the_gpu())
    with file.open("a") as lines:
        lines.write(json.dumps(line | about) + "\n")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Keep how many tests passed and failed, if numbers are kept; all workers together."""
    file: Path | None = config.getoption("--figures")
    if file is None or hasattr(config, "workerinput"):
        return
    ends = {
        end: len(terminalreporter.stats.get(end, ()))
        for end in ("passed", "failed", "error", "skipped")
    }
    line = {"work": "tests", "value": ends["passed"], "unit": "tests passed", "floor": None}
    line |= {"shape": None, "batch": None, "ends": ends}
    keep(file, *config.invocation_params.args, line=line)


@cache
def facts_of_the_gpu() -> dict[str, object] | None:
    """Measured once: its rates do not change from test to test."""
    return gpu_facts() if torch.cuda.is_available() else None


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Return what takes a number: ``figure(work, value, unit, shape=..., batch=..., more=...)``."""
    file: Path | None = request.config.getoption("--figures")
    where = request.node.path.relative_to(request.config.rootpath)

    def note(work: str, value: float, unit: str, **more: object) -> None:
        line = {"work": work, "value": value, "unit": unit, "floor": None} | more
        print(json.dumps(line))
        if file is not None:
            keep(file, "-m", "cuda", str(where), "--figures", str(file), line=line)

    return note
