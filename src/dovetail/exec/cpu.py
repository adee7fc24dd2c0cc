"""The CPU as a backend of the executor."""

from contextlib import nullcontext
from functools import partial

from dovetail.config.schema import EngineConfig
from dovetail.exec.backend import Backend
from dovetail.exec.device import CpuDevice, Device, ThreadedCpuDevice
from dovetail.exec.runner import StepRunner
from dovetail.kernels.cpu import layers
from dovetail.weights.mapping import copy_at_once


def backend(config: EngineConfig, device: Device | None) -> Backend:
    """Return the backend; a device is given by tests."""
    if device is None:
        device = ThreadedCpuDevice() if config.lanes == "threaded" else CpuDevice()
    return Backend(
        device,
        layers,
        weight_copies=partial(nullcontext, copy_at_once),
        size_pool=lambda model, on_progress: config,  # the host's pool has a size that is given
        make_runner=lambda config, model, on_progress: StepRunner(config, model, device),
    )
