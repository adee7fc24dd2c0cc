"""Random weights from a ``config.json`` alone: tokens spread over the experts, in every layer."""

import json
from pathlib import Path

import numpy as np

from dovetail.core.engine import Engine
from dovetail.wire.request import SamplingParams

NUM_EXPERTS, TOP_K, NUM_LAYERS = 64, 4, 12
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
NUM_ROWS, PROMPT_LEN, NUM_TAKEN = 24, 96, 24


def distinct(rows_TLK: np.ndarray) -> np.ndarray:
    """How many experts some tokens chose, by layer."""
    return np.array([len(np.unique(rows_TLK[:, layer])) for layer in range(NUM_LAYERS)])


def test_tokens_of_a_sequence_and_rows_of_a_step_spread_over_the_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prompts = [[(7 * i + j) % 2000 for j in range(PROMPT_LEN)] for i in range(NUM_ROWS)]
    sampling = [
        SamplingParams(max_new_tokens=5, temperature=0.6, ignore_eos=True, sampling_seed=i)
        for i in range(NUM_ROWS)
    ]
    with Engine(
        tmp_path, device="cpu", load_format="dummy", dtype="float32", max_running=NUM_ROWS,
        prefix_cache=False, capture=("experts",),
    ) as engine:  # fmt: skip
        outs = engine.generate(prompts, sampling, capture=("experts",))
    rows = [out.routes.ids for out in outs if out.routes is not None]
    assert len(rows) == NUM_ROWS
    even = NUM_EXPERTS * (1 - (1 - TOP_K / NUM_EXPERTS) ** NUM_TAKEN)
    of_a_step = distinct(np.stack([ids[-1] for ids in rows]))
    of_sequences = np.mean([distinct(ids[PROMPT_LEN - NUM_TAKEN : PROMPT_LEN]) for ids in rows], 0)
    for found in (of_a_step, of_sequences):
        assert (found > 0.8 * even).all(), found
        assert found.mean() > 0.92 * even, found
