"""Engines to give new weights to, what they are asked, and whether two answers are one.

Owns no weights: old ones are ``qwen3_moe_folder``, new ones ``tests/engine/conftest.py`` makes.
"""

from pathlib import Path

import numpy as np

from dovetail import Engine
from dovetail.wire.request import SamplingParams

GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
PROMPTS = [[(7 * i + j) % 250 + 3 for j in range(length)] for i, length in enumerate((5, 40, 17))]


def open_engine(folder: Path, **options: object) -> Engine:
    defaults = {"dtype": "float32", "page_size": 4, "context_len": 128, "max_running": 8}
    return Engine(folder, **defaults | options)


def ask(engine: Engine, **params: object) -> list:
    sampling = SamplingParams(
        **{"max_new_tokens": 12, "sampling_seed": 5, "ignore_eos": True} | params
    )
    return engine.generate(PROMPTS, sampling)


def same(got: list, want: list) -> bool:
    """The same tokens; who shares a batch with whom may move a logprob's last bits."""
    return [g.token_ids for g in got] == [w.token_ids for w in want] and all(
        np.allclose(g.logprobs, w.logprobs, atol=1e-4, rtol=0)
        for g, w in zip(got, want, strict=True)
    )
