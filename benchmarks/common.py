"""What every benchmark line says about the run: machine, rates, versions, commit, command."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import dovetail


def describe_run(
    argv: Sequence[str], *packages: str, gpu: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return the fields that describe this run.

    Args:
        argv: that of the process, or what stands behind ``python``. The path of a module that was
            run says where somebody keeps the code, so its name takes the place.
        packages: peers whose versions are named, too.
        gpu: ``gpu_rates.gpu_facts()`` of what ran on one; its rates are then the line's, and the
            CPU is that of the ``host``.
    """
    if argv[0].endswith(".py"):
        argv = ["-m", f"benchmarks.{Path(argv[0]).stem}", *argv[1:]]
    machine = {"device": cpu_name(), "rates": rates()} if gpu is None else gpu
    return {
        "best_peer": None,
        **machine,
        "versions": {"dovetail": dovetail.__version__}
        | {name: _version(name) for name in ("torch", "numpy", *packages)}
        | {"python": platform.python_version(), "cuda": torch.version.cuda},
        "commit": commit(),
        "command": "python " + " ".join(argv),
    }


def add_line(path: Path | None, line: dict[str, object]) -> None:
    """Add a line to a file of them, if there is one."""
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def write_newest(path: Path, line: dict[str, object], *, of: Sequence[str]) -> None:
    """Add a line to a file of them, in the place of those that are alike in the fields ``of``."""
    lines = path.read_text().splitlines() if path.exists() else []
    older = [json.loads(old) for old in lines]
    kept = [old for old in older if any(old.get(name) != line[name] for name in of)]
    whole = path.with_name(f"{path.name}.new")
    whole.write_text("".join(json.dumps(each) + "\n" for each in [*kept, line]))
    whole.replace(path)


def cpu_name() -> str:
    """Return the CPU's name and core count."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def rates() -> dict[str, float]:
    """Return this machine's copy and matrix-product rates, one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source, target = torch.ones(2**24), torch.empty(2**24)
    square = torch.ones(768, 768)
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(5))
    product = min(_seconds(lambda: square @ square) for _ in range(5))
    torch.set_num_threads(threads)
    return {
        "copy_GB_per_s": round(2 * 4 * 2**24 / copy / 1e9, 2),
        "gemm_GFLOP_per_s": round(2 * 768**3 / product / 1e9, 1),
    }


def commit() -> str | None:
    """Return the commit this was measured at; None where git or its folder is missing.

    A copy without history is told by whoever made it, in the variable DOVETAIL_COMMIT.
    """
    if told := os.environ.get("DOVETAIL_COMMIT"):
        return told
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
