"""Our models compute what transformers computes, from the files that transformers writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.dense_attention import DenseAttention, step
from tests.support.tiny_models import (
    PROMPT,
    cast_parameters,
    load,
    max_diff,
    our_logits,
    random_llama,
    random_mistral,
    random_qwen2,
    random_qwen3,
    random_qwen3_moe,
    reference_logits,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (random_llama, {}),
    "llama-tied": (random_llama, {"tie_word_embeddings": True}),
    "llama-biases": (random_llama, {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": (random_llama, {"num_key_value_heads": 6}),
    "llama-mqa": (random_llama, {"num_key_value_heads": 1}),
    "llama-eps": (random_llama, {"rms_norm_eps": 0.1}),
    "llama3-rope": (random_llama, {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (random_llama, {"rope_parameters": LINEAR_ROPE}),
    "mistral": (random_mistral, {"sliding_window": None}),
    "mistral-tied-no-head-dim": (
        random_mistral,
        {"sliding_window": None, "head_dim": None, "tie_word_embeddings": True},
    ),
    "mistral-within-its-window": (random_mistral, {"sliding_window": len(PROMPT)}),
    "qwen2": (random_qwen2, {}),
    "qwen2-tied-mha": (random_qwen2, {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen2-within-its-window": (
        random_qwen2,
        {"use_sliding_window": True, "sliding_window": len(PROMPT), "max_window_layers": 1},
    ),
    "qwen3": (random_qwen3, {}),
    "qwen3-tied-biases": (random_qwen3, {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-moe": (random_qwen3_moe, {"norm_topk_prob": True}),
    "qwen3-moe-plain-probs": (random_qwen3_moe, {"norm_topk_prob": False}),
    "qwen3-moe-tied": (random_qwen3_moe, {"tie_word_embeddings": True}),
    "qwen3-moe-only": (random_qwen3_moe, {"mlp_only_layers": [0, 2]}),
    "qwen3-moe-step": (random_qwen3_moe, {"decoder_sparse_step": 2}),
    "qwen3-moe-no-moe": (random_qwen3_moe, {"mlp_only_layers": [0, 1, 2]}),
    "qwen3-moe-top1": (random_qwen3_moe, {"num_experts_per_tok": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    theirs = make(**options)
    theirs.save_pretrained(tmp_path)
    diff = max_diff(our_logits(load(tmp_path), PROMPT), reference_logits(theirs, PROMPT))
    assert diff < 1e-5


@pytest.mark.parametrize("make", [random_llama, random_qwen3_moe])
def test_logits_are_equal_from_shards(make: Any, tmp_path: Path) -> None:
    theirs = make()
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    diff = max_diff(our_logits(load(tmp_path), PROMPT), reference_logits(theirs, PROMPT))
    assert diff < 1e-5


def test_logits_are_equal_from_experts_stored_together(tmp_path: Path) -> None:
    theirs = random_qwen3_moe()
    theirs.save_pretrained(tmp_path, save_original_format=False)
    diff = max_diff(our_logits(load(tmp_path), PROMPT), reference_logits(theirs, PROMPT))
    assert diff < 1e-5


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (random_mistral, {"sliding_window": len(PROMPT) - 1}),
        (
            random_qwen2,
            {"use_sliding_window": True, "sliding_window": len(PROMPT) - 1, "max_window_layers": 2},
        ),
    ],
)
def test_beyond_the_window_full_attention_is_another_model(
    make: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """Why ``config.resolve`` refuses such a context: one token more than the window differs."""
    theirs = make(**options)
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.config.sliding_window == len(PROMPT) - 1
    ours, expected = our_logits(model, PROMPT), reference_logits(theirs, PROMPT)
    assert max_diff(ours[:-1], expected[:-1]) < 1e-5
    assert max_diff(ours[-1:], expected[-1:]) > 1e-3


@pytest.mark.parametrize(
    "make", [random_llama, random_mistral, random_qwen2, random_qwen3, random_qwen3_moe]
)
def test_token_by_token_is_the_same_as_at_once(make: Any, tmp_path: Path) -> None:
    theirs = make()
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path)
    attention = DenseAttention(model)
    with torch.inference_mode():
        hidden = [model.hidden(step(attention, [t], i)) for i, t in enumerate(PROMPT)]
        logits = model.logits(torch.cat(hidden))
    assert max_diff(logits, reference_logits(theirs, PROMPT)) < 1e-5


@pytest.mark.parametrize("make", [random_llama, random_qwen2, random_qwen3, random_qwen3_moe])
def test_bfloat16_is_as_near_the_truth_as_transformers(make: Any, tmp_path: Path) -> None:
    """Both round at many places, so they are compared with float32 and not with each other.

    The median counts: where a router's choice is a near tie, single tokens may be far off.
    """
    theirs = cast_parameters(make(), torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ours = our_logits(load(tmp_path, torch.bfloat16), PROMPT)
    rounded = reference_logits(theirs, PROMPT)
    truth = reference_logits(cast_parameters(theirs, torch.float32), PROMPT)
    assert max_diff(our_logits(load(tmp_path), PROMPT), truth) < 1e-5
    our_noise = (ours - truth).abs().median().item()
    their_noise = (rounded - truth).abs().median().item()
    assert 0 < our_noise < 1.25 * their_noise
    assert their_noise < 0.02


def test_the_embedded_model(tiny_moe_folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(tiny_moe_folder, dtype=torch.float32).eval()
    expected = reference_logits(theirs, PROMPT)
    ours = our_logits(load(tiny_moe_folder), PROMPT)
    assert max_diff(ours, expected) < 2e-6 * expected.abs().max().item()


def test_logits_are_float32_and_follow_the_rows_asked_for(tmp_path: Path) -> None:
    random_llama().save_pretrained(tmp_path)
    model = load(tmp_path, torch.bfloat16)
    with torch.inference_mode():
        hidden = model.hidden(step(DenseAttention(model), PROMPT))
        some = model.logits(hidden[[19, 3]])
    assert hidden.dtype == torch.bfloat16 and hidden.shape == (20, 48)
    assert some.dtype == torch.float32 and some.shape == (2, 160)
    # Which kernel multiplies depends on the number of rows: equal but for one rounding.
    torch.testing.assert_close(some, our_logits(model, PROMPT)[[19, 3]], rtol=2**-7, atol=1e-2)
