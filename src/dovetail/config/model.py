"""The shape of a model, read from its Hugging Face folder.

Owns the meaning of ``config.json`` and ``generation_config.json``: the spellings of several
transformers versions, the defaults transformers has, and which models are refused. What comes
out is complete and checked; nothing later reads those files or guesses a default.

Must not know: torch, or how a layer computes.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from dovetail.config.fields import Fields, read_json
from dovetail.errors import ConfigError

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")

# What transformers assumes where config.json is silent. ``None`` means "derived" (kv heads from
# heads, head_dim from hidden size) or "has none" (token ids).
_DEFAULTS: Mapping[str, Mapping[str, int | None]] = {
    "LlamaForCausalLM": {
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "head_dim": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "MistralForCausalLM": {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": None,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "Qwen3MoeForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "head_dim": None,
        "bos_token_id": None,
        "eos_token_id": None,
    },
}

# Assumed where config.json is silent: tokens that a sliding window holds, and how many of the
# first layers of a Qwen2 or Qwen3 do not slide.
_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding.

    Attributes:
        theta: the base wavelength.
        type: "default", "linear" (every frequency divided by ``factor``) or "llama3" (long
            wavelengths divided by ``factor``, with a smooth passage to the short ones).
        factor: context extension; 1 for "default".
        low_freq_factor: "llama3": above ``original_max_position_embeddings / low_freq_factor`` a
            wavelength is long.
        high_freq_factor: "llama3": below ``original_max_position_embeddings / high_freq_factor`` a
            wavelength is short.
        original_max_position_embeddings: "llama3": context length before extension.
    """

    theta: float
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


class MoeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture-of-experts layers.

    Attributes:
        intermediate_size: inner width of one expert.
        norm_topk_prob: whether the weights of the chosen experts are rescaled to sum to 1.
        layer_ids: indices of the decoder layers that have experts, ascending; the rest are dense.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    layer_ids: tuple[int, ...]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that fixes a model's shape and arithmetic.

    Attributes:
        architecture: class name in transformers, e.g. "Qwen3MoeForCausalLM".
        intermediate_size: inner width of a dense MLP.
        qkv_bias: whether the q, k and v projections have biases.
        o_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the dense MLP's projections have biases.
        qk_norm: whether q and k are RMS-normalised per head before the rotation.
        sliding_window: some layer attends to the last so many tokens only, itself included; None:
            every layer attends to all.
        dtype: what the weights were saved as: "float32", "bfloat16" or "float16".
        eos_token_ids: every id that ends a text, from both files, without repeats.
        moe: None if every layer is dense.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    max_position_embeddings: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    moe: MoeConfig | None

    @staticmethod
    def from_folder(path: str | Path) -> "ModelConfig":
        """Read and check the configuration of a Hugging Face model folder.

        Raises:
            ConfigError: a file is missing or no JSON, a value makes no sense, or the model needs
                something that is not supported.
        """
        folder = Path(path)
        config_file = folder / "config.json"
        if not config_file.is_file():
            raise ConfigError(
                "model",
                f"{config_file} does not exist; give a folder with a Hugging Face model "
                "(config.json, tokenizer.json, *.safetensors)",
            )
        fields = Fields(read_json(config_file))
        architecture = _architecture(fields, config_file)
        _refuse_unsupported(fields)
        defaults = _DEFAULTS[architecture]

        hidden_size = fields.integer("hidden_size")
        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        max_positions = fields.integer(
            "max_position_embeddings", default=defaults["max_position_embeddings"]
        )
        is_qwen3 = architecture.startswith("Qwen3")
        is_moe = architecture == "Qwen3MoeForCausalLM"
        qkv_bias, o_bias = _attention_biases(fields, architecture)
        return ModelConfig(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(fields, num_heads, defaults["num_key_value_heads"]),
            head_dim=_head_dim(fields, hidden_size, num_heads, defaults["head_dim"]),
            intermediate_size=fields.integer("intermediate_size"),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            rope=_rope(fields, max_positions),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            # The others have no such option: transformers ignores the field there.
            mlp_bias=fields.flag("mlp_bias", default=False) and architecture == "LlamaForCausalLM",
            qk_norm=is_qwen3,
            sliding_window=_sliding_window(fields, architecture, num_layers),
            max_position_embeddings=max_positions,
            dtype=_dtype(fields),
            eos_token_ids=_eos_token_ids(fields, folder, defaults["eos_token_id"]),
            bos_token_id=_first(fields.token_ids("bos_token_id", defaults["bos_token_id"])),
            moe=_moe(fields, num_layers) if is_moe else None,
        )


def _architecture(fields: Fields, config_file: Path) -> str:
    names = fields.items("architectures")
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if not names:
        raise ConfigError(
            "model", f"{config_file} names no architectures; supported are {supported}"
        )
    if names[0] not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            "model", f"the architecture in {config_file} is {names[0]}; supported are {supported}"
        )
    return names[0]


def _refuse_unsupported(fields: Fields) -> None:
    """Refuse what would change the arithmetic without changing a shape."""
    raw = fields.raw
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError("hidden_act", f"is {activation!r}; only 'silu' is supported")
    if raw.get("quantization_config") is not None:
        raise ConfigError(
            "quantization_config", "quantised weights are not supported; use an unquantised model"
        )


def _attention_biases(fields: Fields, architecture: str) -> tuple[bool, bool]:
    """Return whether q, k and v, and whether o has a bias: fixed in some families."""
    if architecture == "Qwen2ForCausalLM":
        return True, False
    if architecture == "MistralForCausalLM":
        return False, False
    bias = fields.flag("attention_bias", default=False)
    return bias, bias


def _sliding_window(fields: Fields, architecture: str, num_layers: int) -> int | None:
    """Return the window that some layer attends within, or None if every layer attends to all."""
    kinds = [str(kind) for kind in fields.items("layer_types")]
    others = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if others:
        raise ConfigError(
            "layer_types",
            f"{', '.join(others)} is not supported; supported are full_attention and, as far as "
            "a context fits into the window, sliding_attention",
        )
    window = fields.optional_integer("sliding_window", default=_DEFAULT_WINDOW)
    if architecture == "MistralForCausalLM":
        return window
    is_on = fields.flag("use_sliding_window", default=False)
    if architecture == "LlamaForCausalLM":
        if is_on or "sliding_attention" in kinds:
            field = "use_sliding_window" if is_on else "layer_types"
            raise ConfigError(field, "asks for a sliding window, which this family does not have")
        return None
    if not is_on:
        if "sliding_attention" in kinds:
            raise ConfigError(
                "layer_types", "has sliding_attention, but use_sliding_window is not true"
            )
        return None
    if architecture == "Qwen3MoeForCausalLM":
        return window
    num_full = fields.raw.get("max_window_layers", _DEFAULT_FULL_LAYERS)
    if type(num_full) is not int or num_full < 0:
        raise ConfigError("max_window_layers", f"must be a number of layers, not {num_full!r}")
    slides = "sliding_attention" in kinds if kinds else num_layers > num_full
    return window if slides else None


def _num_kv_heads(fields: Fields, num_heads: int, default: int | None) -> int:
    num_kv_heads = fields.optional_integer("num_key_value_heads", default=default) or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            "num_key_value_heads",
            f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly",
        )
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int, default: int | None) -> int:
    head_dim = fields.optional_integer("head_dim", default=default)
    if head_dim is None:
        if hidden_size % num_heads:
            raise ConfigError(
                "hidden_size",
                f"{hidden_size} is no multiple of num_attention_heads {num_heads}, "
                "and there is no head_dim",
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError("head_dim", f"is {head_dim}; rotary embedding needs an even number")
    return head_dim


def _rope(fields: Fields, max_positions: int) -> RopeConfig:
    """Old spelling: ``rope_theta`` and ``rope_scaling``; new spelling: ``rope_parameters``."""
    name = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    rope = fields.section(name)
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    for place in (fields, rope):
        if place.number("partial_rotary_factor", default=1.0) != 1.0:
            raise ConfigError("partial_rotary_factor", "only 1.0 is supported")

    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=rope.number("factor"))
    if kind == "llama3":
        original = fields.optional_integer("original_max_position_embeddings", default=None)
        if original is None:
            original = rope.integer("original_max_position_embeddings", default=max_positions)
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not low < high:
            raise ConfigError(
                f"{name}.high_freq_factor", f"{high} must be above low_freq_factor {low}"
            )
        return RopeConfig(
            theta=theta,
            type="llama3",
            factor=rope.number("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
    raise ConfigError(
        f"{name}.rope_type", f"is {kind!r}; supported are 'default', 'linear' and 'llama3'"
    )


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    value = fields.raw.get(name)
    if value is None:
        return "float32"
    dtype = str(value).removeprefix("torch.")
    if dtype not in SUPPORTED_DTYPES:
        raise ConfigError(name, f"is {value!r}; supported are {', '.join(SUPPORTED_DTYPES)}")
    return dtype


def _eos_token_ids(fields: Fields, folder: Path, default: int | None) -> tuple[int, ...]:
    ids = fields.token_ids("eos_token_id", default)
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        ids += Fields(read_json(generation_file)).token_ids("eos_token_id", None)
    return tuple(dict.fromkeys(ids))


def _moe(fields: Fields, num_layers: int) -> MoeConfig | None:
    """Layer i has experts if ``(i + 1) % decoder_sparse_step == 0`` and it is not excepted."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.items("mlp_only_layers")
    if not all(type(i) is int for i in dense):
        raise ConfigError("mlp_only_layers", f"must be a list of layer indices, not {dense!r}")
    layer_ids = tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)
    if not layer_ids:
        return None
    num_experts = fields.integer(
        "num_experts", "num_local_experts", "n_routed_experts", default=128
    )
    top_k = fields.integer("num_experts_per_tok", default=8)
    if top_k > num_experts:
        raise ConfigError("num_experts_per_tok", f"{top_k} is more than the {num_experts} experts")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        intermediate_size=fields.integer("moe_intermediate_size", default=768),
        norm_topk_prob=fields.flag("norm_topk_prob", default=False),
        layer_ids=layer_ids,
    )


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
