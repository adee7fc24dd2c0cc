"""Which builder makes which architecture."""

import torch

from dovetail.config.model import ModelConfig
from dovetail.dist.comm import Comm
from dovetail.errors import ConfigError
from dovetail.layers.shard import Placement
from dovetail.models.decoder import DecoderLM
from dovetail.models.dense import build_dense
from dovetail.models.moe import build_moe

_BUILDERS = {
    "LlamaForCausalLM": build_dense,
    "MistralForCausalLM": build_dense,
    "Qwen2ForCausalLM": build_dense,
    "Qwen3ForCausalLM": build_dense,
    "Qwen3MoeForCausalLM": build_moe,
}


def build_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, comm: Comm
) -> DecoderLM:
    """Build a model whose parameters are allocated and uninitialised.

    Raises:
        ConfigError: the architecture is unknown, or cannot be divided over the ranks of ``comm``.
    """
    build = _BUILDERS.get(config.architecture)
    if build is None:
        raise ConfigError(
            "model",
            f"the architecture is {config.architecture}; supported are {', '.join(_BUILDERS)}",
        )
    return build(config, Placement(dtype=dtype, device=torch.device(device), comm=comm)).eval()
