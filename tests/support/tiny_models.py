"""Random tiny models of transformers, the reference for ours, and how to compare the two."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dovetail.config.model import ModelConfig
from dovetail.dist.comm import Comm, LocalComm
from dovetail.models.decoder import DecoderLM
from dovetail.models.registry import build_model
from dovetail.weights.load import load_weights
from tests.support.dense_attention import DenseAttention, step

PROMPT = [(7 * i * i + 3 * i + 1) % 160 for i in range(20)]

_SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def random_llama(**options: Any) -> LlamaForCausalLM:
    """Return a Llama with random parameters."""
    return _randomise(LlamaForCausalLM(LlamaConfig(**_SHAPE | options)))


def random_mistral(**options: Any) -> MistralForCausalLM:
    """Return a Mistral with random parameters."""
    return _randomise(MistralForCausalLM(MistralConfig(**_SHAPE | options)))


def random_qwen2(**options: Any) -> Qwen2ForCausalLM:
    """Return a Qwen2 with random parameters."""
    return _randomise(Qwen2ForCausalLM(Qwen2Config(**_SHAPE | options)))


def random_qwen3(**options: Any) -> Qwen3ForCausalLM:
    """Return a Qwen3 with random parameters."""
    return _randomise(Qwen3ForCausalLM(Qwen3Config(**_SHAPE | options)))


def random_qwen3_moe(**options: Any) -> Qwen3MoeForCausalLM:
    """Return a Qwen3-MoE with random parameters."""
    return _randomise(Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SHAPE | _EXPERTS | options)))


def _randomise(model: Any) -> Any:
    """Draw every parameter, so that a norm or a bias that is left out shows."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.data = 1 + 0.3 * noise
        else:
            parameter.data = noise * parameter.shape[-1] ** -0.5
    return model.eval()


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert the parameters alone: ``model.to`` rounds the rotary frequencies as well."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Return the logits of all tokens by transformers, float32 [T, V]."""
    return model(torch.tensor([token_ids])).logits[0].float()


def load(folder: Path, dtype: torch.dtype = torch.float32, comm: Comm | None = None) -> DecoderLM:
    """Build our model for a folder and load its weights."""
    comm = comm or LocalComm()
    model = build_model(ModelConfig.from_folder(folder), dtype=dtype, device="cpu", comm=comm)
    for parameter in model.parameters():
        parameter.fill_(torch.nan)  # what loading leaves out must show
    load_weights(model, folder, comm=comm)
    return model


@torch.inference_mode()
def our_logits(model: DecoderLM, token_ids: list[int]) -> Tensor:
    """Return the logits of all tokens by our model, float32 [T, V]."""
    return model.logits(model.hidden(step(DenseAttention(model), token_ids)))


def max_diff(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference; nan if there is one."""
    return (ours - theirs).abs().max().item()
