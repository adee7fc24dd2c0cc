"""The reply object: which lists there are, how they line up, and that it is strict JSON."""

import json
import math
from typing import Any

import numpy as np
import pytest

from dovetail.core.generation import Generation, prompt_columns
from dovetail.core.reply import generate_reply
from dovetail.wire.request import LogprobParams, Request, SamplingParams
from dovetail.wire.result import FinishReason, Scores, Usage


def generation(**fields: Any) -> Generation:
    values: dict[str, Any] = {
        "prompt_token_ids": (11, 12, 13),
        "sample_index": 0,
        "token_ids": (21, 22),
        "text": "ab",
        "finish_reason": FinishReason(type="length"),
        "logprobs": (-0.5, -1.5),
        "top_logprobs": (((21, -0.5), (5, -2.0)), ((22, -1.5), (6, -math.inf))),
        "id_logprobs": ((-3.0, -math.inf), (-4.0, math.nan)),
        "prompt_logprobs": (None, -7.0, -8.0),
        "prompt_top_logprobs": (((1, -0.1),), ((2, -0.2),)),
        "prompt_id_logprobs": ((-5.0, -6.0), (-5.5, -6.5)),
        "weight_versions": (3, 4),
        "seed": 9,
        "usage": Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
        "captured": dict[str, Any](tokens=np.zeros(4)),
    }
    return Generation(**(values | fields))


def lists_of(asked: LogprobParams | None, **fields: Any) -> dict[str, Any]:
    """The reply's lists of logprobs, once through strict JSON."""
    reply = generate_reply(generation(**fields), label="x", logprobs=asked)
    meta = json.loads(json.dumps(reply, allow_nan=False))["meta_info"]
    return {name: value for name, value in meta.items() if name.endswith("logprobs")}


def test_without_logprobs_there_are_none() -> None:
    assert lists_of(None) == {}
    reply = generate_reply(generation(), label="x", logprobs=None)
    assert reply["text"] == "ab" and reply["output_ids"] == [21, 22]
    assert reply["meta_info"] == {
        "id": "x",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "num_retractions": 0,
        "weight_version": "4",
        "sampling_seed": 9,
    }


def test_the_chosen_tokens_alone() -> None:
    assert lists_of(LogprobParams()) == {
        "output_token_logprobs": [[-0.5, 21, None], [-1.5, 22, None]]
    }


def test_all_lists_and_no_number_that_is_not_finite() -> None:
    asked = LogprobParams(logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(7, 8))
    assert lists_of(asked) == {
        "output_token_logprobs": [[-0.5, 21, None], [-1.5, 22, None]],
        "output_top_logprobs": [
            [[-0.5, 21, None], [-2.0, 5, None]],
            [[-1.5, 22, None], [None, 6, None]],
        ],
        "output_token_ids_logprobs": [
            [[-3.0, 7, None], [None, 8, None]],
            [[-4.0, 7, None], [None, 8, None]],
        ],
        "input_token_logprobs": [[None, 11, None], [-7.0, 12, None], [-8.0, 13, None]],
        "input_top_logprobs": [None, [[-0.1, 1, None]], [[-0.2, 2, None]]],
        "input_token_ids_logprobs": [
            None,
            [[-5.0, 7, None], [-6.0, 8, None]],
            [[-5.5, 7, None], [-6.5, 8, None]],
        ],
    }


def test_input_lists_begin_where_they_were_asked_to() -> None:
    asked = LogprobParams(logprob_start_len=2, top_logprobs_num=1)
    found = lists_of(asked, prompt_logprobs=(-8.0,), prompt_top_logprobs=(((2, -0.2),),))
    assert found["input_token_logprobs"] == [[-8.0, 13, None]]
    assert found["input_top_logprobs"] == [[[-0.2, 2, None]]]


def test_a_request_that_ended_before_its_prompt_was_scored() -> None:
    nothing: dict[str, Any] = dict.fromkeys(
        ("token_ids", "logprobs", "top_logprobs", "id_logprobs", "prompt_top_logprobs",
         "prompt_id_logprobs", "weight_versions"), ()
    )  # fmt: skip
    asked = LogprobParams(logprob_start_len=1, top_logprobs_num=1, token_ids_logprob=(7,))
    found = lists_of(asked, prompt_logprobs=(), finish_reason=FinishReason(type="abort"), **nothing)
    assert set(map(str, found.values())) == {"[]"} and len(found) == 6


@pytest.mark.parametrize("start", [0, 1, 2, 4])
@pytest.mark.parametrize("num_top", [0, 2])
def test_a_prompt_is_scored_whole_or_not_at_all(start: int, num_top: int) -> None:
    """Who is aborted on the way has scores of some of its chunks."""
    asked = LogprobParams(logprob_start_len=start, top_logprobs_num=num_top)
    request = Request(
        request_id=1, prompt_token_ids=(11, 12, 13, 14), sampling=SamplingParams(), seed=0,
        logprobs=asked,
    )  # fmt: skip
    num_all = 4 - max(start, 1)
    for num in range(num_all + 1):
        scores = Scores(
            logprobs=(-1.0,) * num, top_ids=((5, 6),) * num * (num_top > 0),
            top_logprobs=((-1.0, -2.0),) * num * (num_top > 0), id_logprobs=(),
        )  # fmt: skip
        logprobs, top, of_ids = prompt_columns(request, scores if num else None)
        if num == num_all:
            assert logprobs == (None,) * (start == 0) + scores.logprobs
            assert len(top) == (num if num_top else 0)
        else:
            assert (logprobs, top) == ((), ())
        assert of_ids == ()
