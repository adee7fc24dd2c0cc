"""What a measured number depends on: the machine, its rates, the versions, the commit.

Owns these facts as a benchmark line states them. The rates are measured when they are asked for,
with the threads that the calling thread has.
"""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dovetail

COPY_ELEMENTS = 2**24
GEMM_SIZE = 768
REPEATS = 5


def machine_facts() -> dict[str, Any]:
    """Return ``device``, ``rates``, ``versions`` and ``commit``."""
    return {
        "device": cpu_name(),
        "rates": measured_rates(),
        "versions": {
            "dovetail": dovetail.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "commit": commit(Path(dovetail.__file__)),
    }


def cpu_name() -> str:
    """Return the processor's name and the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def measured_rates() -> dict[str, float]:
    """Return what this machine reaches in float32: a copy (read and written) and a product."""
    source, target = torch.ones(COPY_ELEMENTS), torch.empty(COPY_ELEMENTS)
    square = torch.ones(GEMM_SIZE, GEMM_SIZE)
    copy_s = least_seconds(lambda: target.copy_(source))
    gemm_s = least_seconds(lambda: square @ square)
    return {
        "num_threads": torch.get_num_threads(),
        "copy_GB_per_s": round(2 * source.element_size() * COPY_ELEMENTS / copy_s / 1e9, 2),
        "gemm_GFLOP_per_s": round(2 * GEMM_SIZE**3 / gemm_s / 1e9, 1),
    }


def least_seconds(work: Callable[[], object], *, repeats: int = REPEATS) -> float:
    """Return the least time of some repeats: what disturbs a run only ever adds to it."""
    return min(seconds_of(work) for _ in range(repeats))


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def commit(file: Path) -> str | None:
    """Return the commit of the repository that ``file`` belongs to, None if it is in none."""
    try:
        for words in (
            ["ls-files", "--error-unmatch", file.name],
            ["describe", "--always", "--dirty"],
        ):
            done = subprocess.run(
                ["git", *words], cwd=file.parent, capture_output=True, text=True, check=True
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
