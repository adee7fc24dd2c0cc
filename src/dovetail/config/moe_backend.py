"""Who computes the experts of a model: what may be asked for, and what is taken by default.

Owns the limits of the two ways and the default of each kind of device. Must not touch a device.
"""

from types import MappingProxyType

from dovetail.config.gpu import Gpu
from dovetail.config.model import ModelConfig
from dovetail.config.pool import BYTES_PER_ELEMENT
from dovetail.config.schema import DeviceName, DTypeName, EngineOptions, MoeBackend
from dovetail.errors import ConfigError

DEFAULT_MOE_BACKEND: MappingProxyType[DeviceName, MoeBackend] = MappingProxyType(
    {"cpu": "torch", "cuda": "triton"}
)
ROW_BYTES = 16
"""On a GPU torch's grouped product takes rows of a multiple of this."""

_DEFAULT_REASONS = {
    "cpu": "default on a CPU, where no other runs",
    "cuda": "default on a GPU: runs on each, in graphs and in every dtype",
}


def decide_moe_backend(
    options: EngineOptions,
    *,
    device: DeviceName,
    dtype: DTypeName,
    model: ModelConfig,
    gpu: Gpu | None,
) -> tuple[MoeBackend, str]:
    """Return who computes the experts, and why; the device and what it runs in are decided.

    Raises:
        ConfigError: what was asked for does not run this model on this device.
    """
    choice = options.moe_backend
    if choice == "auto":
        reason = _DEFAULT_REASONS[device] if model.moe is not None else "the model has no experts"
        return DEFAULT_MOE_BACKEND[device], reason
    if device == "cpu" and choice == "triton":
        raise ConfigError(
            "moe_backend", "is 'triton', which needs an NVIDIA GPU; on the CPU give torch"
        )
    if model.moe is None:
        return choice, "given, but the model has no experts"
    if device == "cuda" and choice == "torch":
        _check_torch(graphs=options.graphs, dtype=dtype, model=model, gpu=gpu)
    return choice, "given"


def _check_torch(*, graphs: bool, dtype: DTypeName, model: ModelConfig, gpu: Gpu | None) -> None:
    assert model.moe is not None
    sizes = (model.hidden_size, model.moe.intermediate_size)
    if any(size * BYTES_PER_ELEMENT[dtype] % ROW_BYTES for size in sizes):
        raise ConfigError(
            "moe_backend",
            f"cannot be 'torch': on a GPU its grouped product takes rows of a multiple of "
            f"{ROW_BYTES} bytes, and this model has experts of {sizes[0]} to {sizes[1]} numbers in "
            f"{dtype}; give triton",
        )
    if not graphs:
        return
    waits = "its grouped product then waits for the GPU, which no graph can hold"
    if dtype != "bfloat16":
        raise ConfigError(
            "moe_backend",
            f"cannot be 'torch' with graphs in {dtype}: {waits}; give --no-graphs, --dtype "
            "bfloat16 or triton",
        )
    if gpu is not None and not gpu.has_grouped_mm:
        raise ConfigError(
            "moe_backend",
            f"cannot be 'torch' with graphs on the {gpu.name}: {waits}; give --no-graphs or triton",
        )
