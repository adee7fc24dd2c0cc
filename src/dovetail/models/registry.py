"""Which builder makes which architecture."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.config.model import ModelConfig
from dovetail.dist.comm import Comm
from dovetail.errors import ConfigError
from dovetail.kernels import api
from dovetail.kernels.backend import LayerKernels
from dovetail.layers.shard import Allocate, Placement
from dovetail.models.decoder import DecoderLM
from dovetail.models.dense import build_dense
from dovetail.models.moe import build_moe


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture is built, and which optional columns its layers write for capture."""

    build: Callable[[ModelConfig, Placement], DecoderLM]
    columns: frozenset[str] = frozenset()


_FAMILIES = {
    "LlamaForCausalLM": Family(build_dense),
    "MistralForCausalLM": Family(build_dense),
    "Qwen2ForCausalLM": Family(build_dense),
    "Qwen3ForCausalLM": Family(build_dense),
    "Qwen3MoeForCausalLM": Family(build_moe, frozenset({"experts", "expert_weights"})),
}


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    comm: Comm,
    kernels: LayerKernels = api,
    allocate: Allocate | None = None,
) -> DecoderLM:
    """Build a model whose parameters are allocated and uninitialised; see ``Placement``.

    ``allocate`` None takes their memory from torch.

    Raises:
        ConfigError: the architecture is unknown, or cannot be divided over the ranks of ``comm``.
    """
    family, where = _family(config), torch.device(device)

    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=where)

    at = Placement(
        dtype=dtype, device=where, allocate=allocate or empty, comm=comm, kernels=kernels
    )
    return family.build(config, at).eval()


def check_capture(config: ModelConfig, capture: Iterable[str]) -> None:
    """Raise ConfigError, naming the flag, if the model's layers do not write these columns."""
    missing = sorted(set(capture) - _family(config).columns)
    if missing:
        raise ConfigError(
            "capture",
            f"the layers of {config.architecture} do not record {' and '.join(missing)} yet; leave "
            "out --capture (--enable-return-routed-experts)",
        )


def _family(config: ModelConfig) -> Family:
    family = _FAMILIES.get(config.architecture)
    if family is None:
        raise ConfigError(
            "model",
            f"the architecture is {config.architecture}; supported are {', '.join(_FAMILIES)}",
        )
    return family
