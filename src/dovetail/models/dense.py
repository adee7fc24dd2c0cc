"""Llama (arXiv 2302.13971) and Qwen3 (arXiv 2505.09388): a decoder with dense MLPs.

They differ only in what ``ModelConfig`` says: Qwen3 normalises q and k, Llama may have MLP biases.
"""

from torch import nn

from dovetail.config.model import ModelConfig
from dovetail.layers.basic import Mlp
from dovetail.layers.shard import Placement
from dovetail.models.decoder import DecoderLM


def build_dense(config: ModelConfig, at: Placement) -> DecoderLM:
    """Build the model with uninitialised parameters."""

    def build_mlp(_layer_idx: int) -> nn.Module:
        return Mlp(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, at=at)

    return DecoderLM(config, build_mlp, at=at)
