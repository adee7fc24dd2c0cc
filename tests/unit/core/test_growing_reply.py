"""A reply that grows is, in the end, the whole one; and each event costs only what is new in it."""

import gc
import itertools
import json
import sys
from collections.abc import Callable

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dovetail.core.generation import StreamEvent, collect
from dovetail.core.reply import GrowingReply, generate_reply
from dovetail.wire.request import LogprobParams, Request, SamplingParams
from dovetail.wire.result import FinishReason, Scores, Usage

PROMPT = (11, 12, 13)
numbers = st.floats(-50, 0) | st.just(float("-inf"))


def request_for(asked: LogprobParams | None) -> Request:
    return Request(
        request_id=1,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_new_tokens=50),
        seed=9,
        logprobs=asked or LogprobParams(),
    )


def event(
    texts: tuple[str, ...],
    values: tuple[float, ...],
    asked: LogprobParams | None,
    *,
    is_first: bool = False,
    is_last: bool = False,
) -> StreamEvent:
    num, num_top = len(values), asked.top_logprobs_num if asked else 0
    num_ids = len(asked.token_ids_logprob) if asked else 0
    scores = Scores(
        top_ids=(tuple(range(num_top)),) * num if num_top else (),
        top_logprobs=((-0.5,) * num_top,) * num if num_top else (),
        id_logprobs=(tuple(values[:1] * num_ids),) * num if num_ids else (),
    )
    start = max(asked.logprob_start_len, 1) if asked and asked.logprob_start_len >= 0 else 3
    rows = len(PROMPT) - start
    prompt = Scores(
        logprobs=(-1.0,) * rows,
        top_ids=(tuple(range(num_top)),) * rows if num_top else (),
        top_logprobs=((-0.25,) * num_top,) * rows if num_top else (),
        id_logprobs=((-0.125,) * num_ids,) * rows if num_ids else (),
    )
    return StreamEvent(
        request_id=1,
        sample_index=0,
        text="".join(texts),
        token_ids=tuple(range(100, 100 + num)),
        logprobs=values,
        weight_versions=(3,) * num,
        scores=scores if asked and (num_top or num_ids) else None,
        prompt_scores=prompt if is_first and rows else None,
        finish_reason=FinishReason(type="length") if is_last else None,
        usage=Usage(prompt_tokens=3, completion_tokens=0, cached_tokens=1) if is_last else None,
    )


def text_of(token_id: int) -> str:
    return f"<{token_id}>"


@given(
    parts=st.lists(
        st.tuples(st.lists(st.text(max_size=5), max_size=3).map(tuple),
                  st.lists(numbers, max_size=4).map(tuple)),
        min_size=1, max_size=6,
    ),
    asked=st.none() | st.builds(
        LogprobParams,
        logprob_start_len=st.integers(-1, 3),
        top_logprobs_num=st.integers(0, 2),
        token_ids_logprob=st.sampled_from([(), (7,), (7, 8)]),
    ),
    shows_text=st.booleans(),
)  # fmt: skip
def test_the_last_event_is_the_whole_reply(parts, asked, shows_text) -> None:
    request, show = request_for(asked), text_of if shows_text else None
    begins = next((i for i, (_, values) in enumerate(parts) if values), len(parts) - 1)
    events = [
        event(texts, values, asked, is_first=i == begins, is_last=i == len(parts) - 1)
        for i, (texts, values) in enumerate(parts)
    ]
    growing = GrowingReply(request, label="x", logprobs=asked, text_of=show)
    replies = [json.loads(msgspec.json.encode(growing.add(one))) for one in events]
    [generation] = collect(request, events)
    whole = generate_reply(generation, label="x", logprobs=asked, text_of=show)
    whole["meta_info"]["completion_tokens"] = len(generation.token_ids)
    assert replies[-1] == json.loads(msgspec.json.encode(whole))
    for before, after in itertools.pairwise(replies):
        assert before["meta_info"]["finish_reason"] is None
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]


def num_calls(work: Callable[[], object]) -> int:
    """Count the calls, of Python and of C, that ``work`` makes."""
    calls = 0

    def note(frame: object, kind: str, argument: object) -> None:
        nonlocal calls
        calls += kind in ("call", "c_call")

    gc.disable()  # a collection in between would call what others have left behind
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_b125_an_event_late_in_a_long_stream_costs_what_an_early_one_does() -> None:
    asked = LogprobParams(top_logprobs_num=5)
    growing = GrowingReply(request_for(asked), label="x", logprobs=asked)
    news = event(("ab",), (-0.5,), asked)
    growing.add(news)
    early = num_calls(lambda: growing.add(news))
    for _ in range(4000):
        growing.add(news)
    assert num_calls(lambda: growing.add(news)) == early > 5
