"""Qwen3-MoE (arXiv 2505.09388): a Qwen3 decoder with experts in place of some or all MLPs."""

from torch import nn

from dovetail.config.model import ModelConfig
from dovetail.layers.basic import Mlp
from dovetail.layers.moe import SparseMoe
from dovetail.layers.shard import Placement
from dovetail.models.decoder import DecoderLM


def build_moe(config: ModelConfig, at: Placement) -> DecoderLM:
    """Build the model with uninitialised parameters."""

    def build_mlp(layer_idx: int) -> nn.Module:
        if config.moe is not None and layer_idx in config.moe.layer_ids:
            moe_layer = config.moe.layer_ids.index(layer_idx)
            return SparseMoe(config.moe, config.hidden_size, moe_layer=moe_layer, at=at)
        return Mlp(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, at=at)

    return DecoderLM(config, build_mlp, at=at)
