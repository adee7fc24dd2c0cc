"""A stepped engine on the GPU: ``Harness`` with the executor that ``device: cuda`` gives."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import msgspec
import torch
from pytest import MonkeyPatch

from dovetail.config.schema import EngineConfig
from dovetail.dist.comm import LocalComm
from dovetail.exec.device import Device
from dovetail.exec.executor import Executor
from dovetail.exec.pending import PendingStep
from dovetail.exec.registry import load_backend
from dovetail.kernels.registry import load_kernels
from dovetail.models.decoder import DecoderLM
from dovetail.models.registry import build_model
from dovetail.sched.plan import StepPlan
from dovetail.weights.load import load_weights
from tests.support.harness import Harness, make_config


@lru_cache(maxsize=4)
def load_on_gpu(folder: Path, dtype: str, moe_backend: str = "triton") -> DecoderLM:
    """Load a model once for all tests; nobody writes its weights."""
    where = torch.device("cuda")
    model = build_model(
        make_config(folder, dtype=dtype).model,
        dtype=getattr(torch, dtype),
        device=where,
        comm=LocalComm(),
        kernels=load_kernels("triton", where, moe_backend=moe_backend),
    )
    load_weights(model, folder, comm=LocalComm(), on_progress=None)
    return model


def gpu_executor(
    folder: Path, device: Device | None = None, *, moe_backend: str = "triton"
) -> Callable[[EngineConfig], Executor]:
    """Return what ``Harness`` takes as ``make_executor``; a device that is not given is made."""

    def make(config: EngineConfig) -> Executor:
        changed = {"device": "cuda", "memory_fraction": None, "moe_backend": moe_backend}
        config = msgspec.structs.replace(config, **changed)
        backend = load_backend(config, device)
        model = load_on_gpu(folder, config.dtype, moe_backend)
        runner = backend.make_runner(config, model, lambda what, num_done, num_total: None)
        return Executor(config, runner, backend.device)

    return make


def let_pytorch_watch(
    patch: MonkeyPatch, *, when: Callable[[Executor], bool] = lambda executor: True
) -> list[int]:
    """From now on PyTorch raises if a call of its own would wait while a step is submitted.

    Returns:
        The number of rows of each step that was watched; it grows.
    """
    original, num_rows = Executor.submit, list[int]()

    def submit(self: Executor, plan: StepPlan) -> PendingStep:
        if not when(self):
            return original(self, plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            num_rows.append(len(plan.rows))
            return original(self, plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    patch.setattr(Executor, "submit", submit)
    return num_rows


def gpu_harness(
    folder: Path,
    *,
    device: Device | None = None,
    moe_backend: str = "triton",
    **options: object,
) -> Harness:
    """Return a stepped engine whose plans run on the GPU."""
    options = {"dtype": "float32"} | options
    make = gpu_executor(folder, device, moe_backend=moe_backend)
    return Harness(folder, make_executor=make, **options)
