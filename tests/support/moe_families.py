"""Tiny random models of the mixture-of-experts families of transformers, to replay in."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.mistral4.configuration_mistral4 import Mistral4Config
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

NUM_EXPERTS, K, VOCAB = 16, 4, 96

# What a config does not have under one of its names is left out.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,  # so that what an expert does shows
} | dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), NUM_EXPERTS
) | dict.fromkeys(
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), K
)  # fmt: skip
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_INDEXER: dict[str, Any] = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
_GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
_DENSE_FIRST: dict[str, Any] = {"first_k_dense_replace": 1}


@dataclass(frozen=True)
class Family:
    """A family, and what makes its config tiny beside what all have.

    Attributes:
        hides_experts: its experts do not take ids and weights, so they cannot be watched.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    hides_experts: bool = False


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2_moe"),
        Family("qwen3_moe"),
        Family("qwen3_next"),
        Family("qwen3_5_moe_text"),
        Family("mixtral"),
        Family("olmoe"),
        Family("flex_olmo"),
        Family(
            "deepseek_v2",
            _MLA | _GROUPS | _DENSE_FIRST | {"topk_method": "group_limited_greedy"},
        ),
        Family("deepseek_v3", _MLA | _GROUPS | _DENSE_FIRST),
        Family("mistral4", _MLA | _GROUPS),
        Family("glm4_moe", _GROUPS | _DENSE_FIRST),
        Family("glm4_moe_lite", _MLA | _GROUPS),
        Family("gpt_oss"),
        Family("granitemoe"),
        Family("minimax"),
        Family("minimax_m2"),
        Family("dots1", _GROUPS | _DENSE_FIRST | {"n_shared_experts": 1, "sliding_window": 8}),
        Family("ernie4_5_moe"),
        Family("hunyuan_v1_moe"),
        Family("jamba"),
        Family("jetmoe", hides_experts=True),
        Family("afmoe"),
        Family(
            "lfm2_moe",
            {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1},
        ),
        Family("cohere2_moe"),
        Family("nemotron_h", _GROUPS),
        Family(
            "longcat_flash",
            _MLA
            | {
                "num_layers": 2,
                "ffn_hidden_size": 48,
                "expert_ffn_hidden_size": 16,
                "zero_expert_num": 2,
            },
        ),
        Family("solar_open", _GROUPS),
        Family("deepseek_v4", {"mlp_layer_types": ["hash_moe", "moe", "moe"], "q_lora_rank": 16}),
        Family(
            "gemma4_text",
            {
                "enable_moe_block": True,
                "global_head_dim": 8,
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 8,
            },
        ),
        Family("llama4_text", hides_experts=True),
        Family("mimo_v2_flash", _GROUPS),
        Family("exaone_moe", _GROUPS),
        Family("hy_v3"),
        Family("laguna"),
        # Not in the inventory that the others are from
        Family("aria_text"),
        Family("axk1", _MLA | _GROUPS),
        Family("deepseek_v32", _MLA | _GROUPS | _DENSE_FIRST | _INDEXER),
        Family("dbrx", {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64}),
        Family("flint"),
        Family(
            "granitemoehybrid",
            {
                "mamba_n_heads": 8,
                "mamba_d_head": 8,
                "layer_types": ["attention", "mamba", "attention"],
            },
        ),
        Family("granitemoeshared"),
        Family("hy_v4", _GROUPS),
        Family("kimi_linear", _GROUPS),
        Family("kolibri1"),
        Family("lara_mini"),
        Family("mellum"),
    )
}


def tiny_model(name: str, **options: Any) -> PreTrainedModel:
    """Return a random model of a family, in training mode without router noise."""
    family = FAMILIES.get(name, Family(name))
    config_class = Mistral4Config if name == "mistral4" else CONFIG_MAPPING[name]
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map}
    fields = {key: value for key, value in _COMMON.items() if key in known}
    config = config_class(**fields | family.options | options)
    if name == "dbrx":
        _shrink_dbrx(config)
    torch.manual_seed(0)
    if name == "mistral4":  # has no entry among the causal models
        model = Mistral4ForCausalLM(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    _randomise(model)
    for module in model.modules():
        for key in [key for key in vars(module) if "jitter" in key]:
            setattr(module, key, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def _shrink_dbrx(config: Any) -> None:
    attention = config.attn_config
    attention.kv_n_heads, attention.rope_theta, attention.clip_qkv = 2, 10000.0, 8.0
    ffn = config.ffn_config
    ffn.ffn_hidden_size, ffn.moe_num_experts, ffn.moe_top_k, ffn.hidden_size = 16, 16, 4, 32


def _randomise(model: nn.Module) -> None:
    """Draw what some families leave at zero, empty, or too small to be seen."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("correction_bias", "expert_bias")):
            tensor.data.copy_(0.1 * noise)
        elif isinstance(tensor, nn.Parameter) and tensor.ndim > 1:
            tensor.data.copy_(noise * tensor.shape[-1] ** -0.5)


@contextmanager
def watched_experts(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield a list that fills with what each module called ``experts`` gets: ids and weights."""
    seen: list[tuple[Tensor, Tensor]] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
        [ids] = [part for part in given if part.dtype == torch.int64]
        [weights] = [part for part in given if part is not given[0] and part.is_floating_point()]
        seen.append((ids.clone(), weights.detach().clone()))

    hooks = [
        module.register_forward_pre_hook(look, with_kwargs=True)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] == "experts"
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
