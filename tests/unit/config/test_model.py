"""What ``ModelConfig.from_folder`` reads from the spellings of several transformers versions."""

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.model import ModelConfig, MoeConfig, RopeConfig
from dovetail.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 16}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}


def read(folder: Path, raw: dict[str, Any], generation: Any = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def moe_of(folder: Path, **fields: Any) -> MoeConfig:
    moe = read(folder, QWEN3_MOE | fields).moe
    assert moe is not None
    return moe


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=100,
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=96,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=None,
        max_position_embeddings=2048,
        dtype="float32",
        eos_token_ids=(2,),
        bos_token_id=1,
        moe=None,
    )


def test_families_differ_in_their_defaults(tmp_path: Path) -> None:
    bare = {name: LLAMA[name] for name in LLAMA if name != "architectures"}
    qwen3 = read(
        tmp_path,
        bare
        | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "num_attention_heads": 64},
    )
    assert (qwen3.num_kv_heads, qwen3.head_dim, qwen3.qk_norm) == (32, 128, True)
    assert (qwen3.eos_token_ids, qwen3.bos_token_id) == ((), None)
    assert qwen3.max_position_embeddings == 32768
    moe = read(tmp_path, bare | {"architectures": ["Qwen3MoeForCausalLM"]})
    assert (moe.num_kv_heads, moe.head_dim) == (4, 16)
    assert moe.moe == MoeConfig(
        num_experts=128,
        num_experts_per_tok=8,
        intermediate_size=768,
        norm_topk_prob=False,
        layer_ids=(0, 1, 2, 3),
    )


def test_mistral_and_qwen2_differ_in_biases_and_defaults(tmp_path: Path) -> None:
    bare = {name: LLAMA[name] for name in LLAMA if name != "architectures"}
    bare |= {"attention_bias": True, "mlp_bias": True}  # what these families do not know
    mistral = read(
        tmp_path, bare | {"architectures": ["MistralForCausalLM"], "num_attention_heads": 8}
    )
    assert (mistral.qkv_bias, mistral.o_bias, mistral.mlp_bias) == (False, False, False)
    assert (mistral.num_kv_heads, mistral.head_dim, mistral.sliding_window) == (8, 8, 4096)
    assert (mistral.bos_token_id, mistral.eos_token_ids) == (1, (2,))
    assert mistral.max_position_embeddings == 131072
    qwen2 = read(
        tmp_path, bare | {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 32}
    )
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    assert (qwen2.num_kv_heads, qwen2.head_dim, qwen2.sliding_window) == (32, 2, None)
    assert (qwen2.bos_token_id, qwen2.eos_token_ids, qwen2.qk_norm) == (None, (), False)
    assert qwen2.max_position_embeddings == 32768


SLIDES = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("raw", "window"),
    [
        (MISTRAL, 4096),
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL | {"sliding_window": 8}, 8),
        (QWEN2 | {"sliding_window": 8}, None),
        (QWEN2 | SLIDES, None),  # the first 28 layers do not slide
        (QWEN2 | SLIDES | {"max_window_layers": 4}, None),
        (QWEN2 | SLIDES | {"max_window_layers": 3}, 8),
        (QWEN2 | SLIDES | {"max_window_layers": 0, "sliding_window": None}, None),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        (QWEN2 | SLIDES | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, 8),
        (QWEN2 | SLIDES | {"layer_types": ["full_attention"] * 4, "max_window_layers": 0}, None),
        (QWEN3 | SLIDES | {"max_window_layers": 3}, 8),
        (QWEN3_MOE | SLIDES, 8),
        (LLAMA | {"sliding_window": 8}, None),
    ],
)
def test_window_of_the_layers_that_slide(
    raw: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    assert read(tmp_path, raw).sliding_window == window


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "^layer_types: has sliding_attention, but use_"),
        ({"layer_types": ["linear_attention"]}, "^layer_types: linear_attention is not supported"),
        (SLIDES | {"max_window_layers": "3"}, "^max_window_layers: must be a number of layers"),
        (SLIDES | {"sliding_window": 0}, "^sliding_window: must be a positive integer"),
    ],
)
def test_what_is_refused_of_windows(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, QWEN2 | fields)


def test_null_counts_as_absent(tmp_path: Path) -> None:
    raw = LLAMA | {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None}
    assert read(tmp_path, raw) == read(tmp_path, LLAMA)
    assert read(tmp_path, QWEN3 | {"num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_number_of_experts_has_three_spellings(name: str, tmp_path: Path) -> None:
    raw = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {name: 6}
    moe = read(tmp_path, raw).moe
    assert moe is not None and moe.num_experts == 6


@pytest.mark.parametrize(
    ("fields", "layer_ids"),
    [
        ({}, (0, 1, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"mlp_only_layers": [0, 3]}, (1, 2)),
        ({"mlp_only_layers": [3], "decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": None}, (0, 1, 2, 3)),
    ],
)
def test_layers_with_experts(
    fields: dict[str, Any], layer_ids: tuple[int, ...], tmp_path: Path
) -> None:
    assert moe_of(tmp_path, **fields).layer_ids == layer_ids


def test_a_moe_without_sparse_layers_has_none(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3_MOE | {"mlp_only_layers": [0, 1, 2, 3]}).moe is None


LLAMA3_FIELDS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = RopeConfig(theta=5e5, type="llama3", **LLAMA3_FIELDS)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 500000}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 1.0},
            RopeConfig(theta=5e5),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(theta=5e5, type="linear", factor=2.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            RopeConfig(theta=5e5, type="linear", factor=2.0),
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_FIELDS}}, LLAMA3),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_FIELDS}},
            LLAMA3,
        ),
        (
            {
                "rope_theta": 5e5,
                "max_position_embeddings": 64,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            },
            LLAMA3,
        ),
    ],
)
def test_rope_has_an_old_and_a_new_spelling(
    fields: dict[str, Any], rope: RopeConfig, tmp_path: Path
) -> None:
    assert read(tmp_path, LLAMA | fields).rope == rope


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
    ],
)
def test_dtype_has_two_spellings(fields: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA | fields).dtype == dtype


@pytest.mark.parametrize(
    ("eos", "generation", "ids"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (None, None, ()),
        (7, {"eos_token_id": [9, 7]}, (7, 9)),
        ([7, 8], {"eos_token_id": 8}, (7, 8)),
        (None, {"eos_token_id": 0}, (0,)),
        (7, {"eos_token_id": None}, (7,)),
        (7, {}, (7,)),
    ],
)
def test_eos_is_the_union_of_both_files(
    eos: Any, generation: Any, ids: tuple[int, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, LLAMA | {"eos_token_id": eos}, generation).eos_token_ids == ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, r"^model: .* is GptOssForCausalLM; supported"),
        ({"architectures": None}, "^model: .* names no architectures; supported are Llama"),
        ({"use_sliding_window": True}, "^use_sliding_window: "),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "^layer_types: "),
        ({"hidden_act": "gelu"}, "^hidden_act: is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "^quantization_config: "),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "^rope_scaling.rope_type: is 'yarn'"),
        ({"rope_parameters": {"rope_type": "x"}}, "^rope_parameters.rope_type: is 'x'"),
        ({"rope_scaling": {"type": "linear"}}, "^rope_scaling.factor: is missing"),
        ({"rope_scaling": "linear"}, "^rope_scaling: must be an object"),
        (
            {"rope_scaling": {"type": "llama3"} | LLAMA3_FIELDS | {"high_freq_factor": 1.0}},
            "^rope_scaling.high_freq_factor: ",
        ),
        ({"partial_rotary_factor": 0.5}, "^partial_rotary_factor: "),
        ({"dtype": "float8_e4m3fn"}, "^dtype: is 'float8_e4m3fn'; supported are float32"),
        ({"torch_dtype": 16}, "^torch_dtype: is 16"),
        ({"hidden_size": None}, "^hidden_size: is missing"),
        ({"vocab_size": "100"}, "^vocab_size: must be a positive integer, not '100'"),
        ({"num_hidden_layers": 0}, "^num_hidden_layers: must be a positive integer, not 0"),
        ({"num_attention_heads": 0}, "^num_attention_heads: "),
        ({"num_attention_heads": True}, "^num_attention_heads: "),
        ({"num_attention_heads": 4.0}, "^num_attention_heads: "),
        ({"num_key_value_heads": 0}, "^num_key_value_heads: "),
        ({"num_key_value_heads": 3}, "^num_key_value_heads: 4 attention heads cannot share 3"),
        ({"num_attention_heads": 5}, "^hidden_size: 64 is no multiple"),
        ({"head_dim": 15}, "^head_dim: is 15"),
        ({"rms_norm_eps": "1e-6"}, "^rms_norm_eps: must be a positive number"),
        ({"rms_norm_eps": -1.0}, "^rms_norm_eps: "),
        ({"tie_word_embeddings": 1}, "^tie_word_embeddings: must be true or false"),
        ({"eos_token_id": [1, "2"]}, "^eos_token_id: must be a token id or a list"),
        ({"eos_token_id": -1}, "^eos_token_id: "),
        ({"bos_token_id": 1.5}, "^bos_token_id: "),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, LLAMA | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts_per_tok": 9}, "^num_experts_per_tok: 9 is more than the 8 experts"),
        ({"num_experts": 0}, "^num_experts: "),
        ({"mlp_only_layers": ["1"]}, "^mlp_only_layers: "),
        ({"mlp_only_layers": 1}, "^mlp_only_layers: must be a list"),
        ({"decoder_sparse_step": 0}, "^decoder_sparse_step: "),
        ({"norm_topk_prob": "yes"}, "^norm_topk_prob: "),
    ],
)
def test_what_is_refused_of_experts(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, QWEN3_MOE | fields)


def test_a_missing_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist; give a folder"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_file_is_named(name: str, text: bytes, tmp_path: Path) -> None:
    read(tmp_path, LLAMA)
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigError, match=rf"^model: .*{name} "):
        ModelConfig.from_folder(tmp_path)
