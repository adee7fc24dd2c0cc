"""``dovetail doctor``: can the engine run here, and if not, what to do.

Owns the questions. Each answer is ok, missing or problem, and whatever is not ok comes with a fix.
Only what keeps the engine from running decides the exit code.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

import dovetail
from dovetail.cli.options import PLOT_INSTALL
from dovetail.config.gpu import Gpu, has_nvidia_driver
from dovetail.config.hub import HUB_INSTALL
from dovetail.config.moe_backend import DEFAULT_MOE_BACKEND
from dovetail.config.schema import DeviceName, MoeBackend
from dovetail.core.engine import Engine
from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.gpu import find_gpu
from dovetail.exec.memory import TaggedMemory
from dovetail.kernels.choices import kernel_choices, optional_backends
from dovetail.wire.request import SamplingParams

GOLDEN_PROMPT = "ROMEO\n"
GOLDEN_TOKEN_IDS = (43, 555, 263, 281, 1290, 201)  # no second choice is near
REQUIRED = (
    "numpy", "msgspec", "safetensors", "tokenizers", "jinja2", "rich", "threadpoolctl",
    "starlette", "uvicorn",
    "httptools", "prometheus_client",
)  # fmt: skip
OPTIONAL = {
    "huggingface_hub": ("models by their name on the Hugging Face hub", HUB_INSTALL),
    "matplotlib": ("the figure of dovetail mismatch", PLOT_INSTALL),
    "pillow": ("the picture of dovetail trace", PLOT_INSTALL),
    "transformers": ("the oracle of the tests", "pip install transformers"),
}

Verdict = Literal["ok", "missing", "problem"]
_COLOURS = {"ok": "green", "missing": "yellow", "problem": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One answer.

    Attributes:
        what: the question.
        verdict: ok; missing (the engine runs without it); problem.
        detail: what was found.
        fix: what to do, if it is not ok.
        blocks: the engine cannot run until this is fixed.
    """

    what: str
    verdict: Verdict
    detail: str
    fix: str = ""
    blocks: bool = False


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    findings = list(examine())
    can_run = not any(finding.blocks for finding in findings)
    if args.json:
        print(json.dumps({"can_run": can_run, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        _print(findings, can_run=can_run)
    return 0 if can_run else 1


def examine() -> Iterator[Finding]:
    """Yield the findings, what is quick first."""
    yield _python()
    yield _torch()
    yield _packages()
    yield _cpu()
    yield _openmp(torch.get_num_threads(), os.environ.get("OMP_WAIT_POLICY"))
    yield _gpu(
        is_there=has_nvidia_driver() or torch.cuda.is_available(),
        answers=torch.cuda.is_available(),
        has_triton=_version("triton") is not None,
    )
    gpu = find_gpu()
    yield _kernels(gpu)
    yield from _optional_backends(gpu)
    device = None if gpu is None else CudaDevice()
    yield _pinned_memory(device)
    yield _mapped_memory(None if device is None else device.memory)
    if device is not None:
        device.close()
    for name in OPTIONAL:
        yield _optional(name)
    yield _embedded_model("embedded model", partial(_golden_run, "cpu"))
    if gpu is not None and gpu.problem is None:
        yield _embedded_model("embedded model on the GPU", partial(_golden_run, "cuda"))


def _python() -> Finding:
    detail = f"{platform.python_version()} ({platform.python_implementation()})"
    return Finding(what="python", verdict="ok", detail=f"{detail}; dovetail {dovetail.__version__}")


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding(what="torch", verdict="ok", detail=f"{torch.__version__}, {build}")


def _packages() -> Finding:
    found = ", ".join(f"{name} {_version(name)}" for name in REQUIRED)
    return Finding(what="packages", verdict="ok", detail=found)


def _cpu() -> Finding:
    detail = (
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}; "
        f"{num_usable_cores()} of {os.cpu_count()} cores may be used"
    )
    return Finding(what="cpu", verdict="ok", detail=detail)


def num_usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _openmp(num_threads: int, wait_policy: str | None) -> Finding:
    what = "OpenMP"
    detail = f"threads an operation: {num_threads}, OMP_WAIT_POLICY: {wait_policy or 'not set'}"
    if num_threads > num_usable_cores():
        fix = f"set OMP_NUM_THREADS to at most {num_usable_cores()}, or give --num-threads"
        return Finding(
            what=what, verdict="problem", detail=detail + "; that is more than cores", fix=fix
        )
    if num_threads > 1 and (wait_policy or "").upper() != "PASSIVE":
        return Finding(
            what=what,
            verdict="missing",
            detail=detail + "; waiting threads spin, which is slow where cores are shared",
            fix="export OMP_WAIT_POLICY=PASSIVE, unless the cores are this engine's alone",
        )
    return Finding(what=what, verdict="ok", detail=detail)


def _gpu(*, is_there: bool, answers: bool, has_triton: bool) -> Finding:
    if not is_there:
        return Finding(what="gpu", verdict="ok", detail="no NVIDIA GPU; none is needed")
    if not answers:
        return Finding(
            what="gpu",
            verdict="missing",
            detail="an NVIDIA GPU is there, but PyTorch does not see it",
            fix="install a CUDA build of PyTorch, and look at what nvidia-smi says",
        )
    name = torch.cuda.get_device_name()
    if not has_triton:
        return Finding(
            what="gpu",
            verdict="missing",
            detail=f"{name} answers, but its kernels need the package triton",
            fix="pip install triton; a CUDA build of PyTorch brings it",
        )
    return Finding(
        what="gpu", verdict="ok", detail=f"{name}; taken if it runs the model (--device auto)"
    )


def _kernels(gpu: Gpu | None) -> Finding:
    choices = [
        f"{choice.operations}: {choice.backend}" for choice in kernel_choices(*_defaults(gpu))
    ]
    detail = "; ".join(choices) + " (config explain says why)"
    return Finding(what="kernels", verdict="ok", detail=detail)


def _optional_backends(gpu: Gpu | None) -> Iterator[Finding]:
    """Yield what is to be said of each; none is missing, as the engine has its own of all."""
    for backend in optional_backends(*_defaults(gpu)):
        is_installed = "installed" if backend.is_installed else "not installed"
        is_chosen = "chosen" if backend.is_chosen else "not chosen"
        detail = f"{is_installed}, {is_chosen} for {backend.operations}: {backend.reason}"
        yield Finding(what=backend.name, verdict="ok", detail=detail)


def _defaults(gpu: Gpu | None) -> tuple[DeviceName, MoeBackend]:
    """Return the device that an engine takes by itself, and who computes experts there."""
    device: DeviceName = "cpu" if gpu is None or gpu.problem else "cuda"
    return device, DEFAULT_MOE_BACKEND[device]


def _mapped_memory(memory: TaggedMemory | None) -> Finding:
    """Whether a GPU's memory can go and come back at the same addresses."""
    what = "mapped memory"
    if memory is None:
        return Finding(what=what, verdict="ok", detail="not needed: the device is the host")
    if memory.can_unmap:
        return Finding(what=what, verdict="ok", detail="weights and KV can be given back in place")
    return Finding(
        what=what,
        verdict="missing",
        detail=f"cannot be had: {memory.reason}; weights and KV cannot be given back",
        fix="pip install cuda-bindings",
    )


def _pinned_memory(device: CudaDevice | None) -> Finding:
    """Whether copies between host and GPU can go beside everything else."""
    what = "pinned memory"
    if device is None:
        return Finding(what=what, verdict="ok", detail="not needed: the device is the host")
    device.host_block(4096)
    if device.num_unpinned:
        return Finding(
            what=what,
            verdict="missing",
            detail="cannot be had; copies then wait, and Python with them",
            fix="raise the limit of locked memory (ulimit -l)",
        )
    return Finding(what=what, verdict="ok", detail="can be had")


def _optional(name: str) -> Finding:
    purpose, fix = OPTIONAL[name]
    found = _version(name)
    if found is None:
        return Finding(what=name, verdict="missing", detail=f"is for {purpose}", fix=fix)
    return Finding(what=name, verdict="ok", detail=f"{found}; for {purpose}")


def _embedded_model(what: str, run: Callable[[], tuple[int, ...]]) -> Finding:
    started = time.perf_counter()
    try:
        token_ids = run()
    except Exception as error:  # whatever it is, it is what was asked for
        return Finding(
            what=what,
            verdict="problem",
            detail=f"does not run: {error or type(error).__name__}",
            fix="install dovetail again; if it stays, report this line and the lines above",
            blocks=True,
        )
    if token_ids != GOLDEN_TOKEN_IDS:
        return Finding(
            what=what,
            verdict="problem",
            detail=f"generates {list(token_ids)}, not {list(GOLDEN_TOKEN_IDS)}",
            fix="try another torch build; if it stays, report this line and the lines above",
            blocks=True,
        )
    seconds = time.perf_counter() - started
    return Finding(
        what=what,
        verdict="ok",
        detail=f"loads and generates the {len(token_ids)} expected tokens, in {seconds:.2f} s",
    )


def _golden_run(device: str) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_new_tokens=len(GOLDEN_TOKEN_IDS))
    with Engine(device=device, dtype="float32", kv_memory="64MiB") as engine:
        [generation] = engine.generate(GOLDEN_PROMPT, params)
    return generation.token_ids


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _print(findings: list[Finding], *, can_run: bool) -> None:
    console = Console(highlight=False)
    table = Table("", "what", "found", "to do", box=None)
    for finding in findings:
        verdict = f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(verdict, finding.what, finding.detail, finding.fix)
    console.print(table)
    console.print(f"\nThe engine {'can' if can_run else 'cannot'} run here.")
