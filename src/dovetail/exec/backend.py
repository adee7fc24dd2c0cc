"""What an executor is built from, a kind of device each."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from dovetail.config.schema import EngineConfig
from dovetail.exec.device import Device
from dovetail.exec.executor import Runner
from dovetail.kernels.backend import LayerKernels
from dovetail.models.causal_lm import CausalLM
from dovetail.weights.mapping import Copy

OnProgress = Callable[[str, int, int], None]
"""Told (what is done, how much of it is done, how much there is) while an engine starts."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A device and who works on it.

    Attributes:
        device: see ``exec.device``.
        kernels: the operations of the model's layers.
        weight_copies: gives a context with what copies weights to the device; all have arrived when
            it ends.
        size_pool: from a model on the device to the configuration with the pool that it leaves room
            for; raises ConfigError if that is too little.
        make_runner: from the configuration and a model to the compute lane's part of its steps.
    """

    device: Device
    kernels: LayerKernels
    weight_copies: Callable[[], AbstractContextManager[Copy]]
    size_pool: Callable[[CausalLM, OnProgress], EngineConfig]
    make_runner: Callable[[EngineConfig, CausalLM, OnProgress], Runner]
