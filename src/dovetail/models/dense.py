"""Llama (arXiv 2302.13971), Mistral (arXiv 2310.06825), Qwen2 (arXiv 2407.10671) and Qwen3 (arXiv
2505.09388): a decoder with dense MLPs.

They differ only in what ``ModelConfig`` says: Qwen3 normalises q and k, Qwen2 has biases there,
Llama may have biases everywhere. A sliding window does not show here: ``config.resolve`` keeps the
context within it.
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
