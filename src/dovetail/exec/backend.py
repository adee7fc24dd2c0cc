"""What an executor is built from, a kind of device each."""

from collections.abc import Callable
from dataclasses import dataclass

from dovetail.exec.device import Device
from dovetail.exec.executor import Runner
from dovetail.kernels.backend import LayerKernels
from dovetail.models.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and who works on it.

    Attributes:
        device: see ``exec.device``.
        kernels: the operations of the model's layers.
        make_runner: from a model on the device to the compute lane's part of its steps.
    """

    device: Device
    kernels: LayerKernels
    make_runner: Callable[[CausalLM], Runner]
