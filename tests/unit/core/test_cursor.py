"""A reader gets all its news, once and in order, however slowly it reads."""

import asyncio
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.cursor import Newsstand, joined
from dovetail.errors import EngineClosed
from dovetail.wire.capture import CapturedRows
from dovetail.wire.result import FinishReason, Scores, TokenEvent, Usage
from dovetail.wire.tensor import TensorEnvelope

PROMPT_SCORES = Scores(logprobs=(-0.5, -0.25))


class CountingLoop:
    """Stands for an event loop that is busy elsewhere: it notes who wants to wake it."""

    def __init__(self, *, is_closed: bool = False) -> None:
        self.calls: list[Callable[[], None]] = []
        self._is_closed = is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        if self._is_closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append(call)


def newsstand(loop: CountingLoop, deserted: list[int]) -> Newsstand:
    return Newsstand(loop, deserted.extend)  # type: ignore[arg-type]


def an_event(
    request_id: int,
    first: int,
    num_tokens: int,
    *,
    sample_index: int = 0,
    is_first: bool = False,
    is_last: bool = False,
) -> TokenEvent:
    """An event whose every value follows from the number of its first token."""
    tokens = range(first, first + num_tokens)
    rows = TensorEnvelope.pack(np.arange(first + num_tokens, dtype=np.int32))
    captured = {"tokens": CapturedRows(start=0, rows=rows)}
    return TokenEvent(
        request_id=request_id,
        sample_index=sample_index,
        token_ids=tuple(tokens),
        logprobs=tuple(-float(token) for token in tokens),
        epochs=tuple(token // 3 for token in tokens),
        scores=Scores(
            top_ids=tuple((token, token + 1) for token in tokens),
            top_logprobs=tuple((-0.5, -float(token)) for token in tokens),
            id_logprobs=tuple((float("-inf"), -float(token)) for token in tokens),
        )
        if num_tokens
        else None,
        prompt_scores=PROMPT_SCORES if is_first else None,
        finish=FinishReason(type="length") if is_last else None,
        usage=Usage(prompt_tokens=3, completion_tokens=first + num_tokens) if is_last else None,
        captured=captured if is_last else None,
    )


def stream_of(request_id: int, sample_index: int, sizes: Sequence[int]) -> list[TokenEvent]:
    """One generation's events, of so many tokens each."""
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    begins = next((index for index, size in enumerate(sizes) if size), len(sizes) - 1)
    return [
        an_event(
            request_id,
            first,
            size,
            sample_index=sample_index,
            is_first=index == begins,  # rows may come before the first token
            is_last=index == len(sizes) - 1,
        )
        for index, (first, size) in enumerate(zip(firsts, sizes, strict=True))
    ]


@st.composite
def schedules(draw: st.DrawFn) -> list[TokenEvent | int]:
    """Events of several requests with several generations, and where a request is read."""
    streams = [
        stream_of(request_id, sample_index, draw(st.lists(st.integers(0, 3), min_size=1)))
        for request_id in range(draw(st.integers(1, 3)))
        for sample_index in range(draw(st.integers(1, 3)))
    ]
    todo = [index for index, stream in enumerate(streams) for _ in stream]
    steps: list[TokenEvent | int] = []
    for index in draw(st.permutations(todo)):
        steps.append(streams[index].pop(0))
        if draw(st.booleans()):
            steps.append(draw(st.integers(0, 2)))
    return steps


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_what_is_joined_is_what_came(schedule):
    """Read at any pace, each generation's columns are those of its events, in order."""
    asyncio.run(check_joined(schedule))


async def check_joined(schedule: list[TokenEvent | int]) -> None:
    stand = Newsstand(asyncio.get_running_loop(), lambda ids: None)
    events = [step for step in schedule if isinstance(step, TokenEvent)]
    cursors = {event.request_id: stand.open(event.request_id) for event in events}
    unread: dict[int, int] = dict.fromkeys(cursors, 0)
    got: list[TokenEvent] = []
    for step in schedule:
        if isinstance(step, TokenEvent):
            stand.deliver([step])
            unread[step.request_id] += 1
        elif unread.get(step):
            got += await cursors[step].take()
            unread[step] = 0
    for request_id, cursor in cursors.items():
        if unread[request_id]:
            got += await cursor.take()
    for who in {(event.request_id, event.sample_index) for event in events}:
        parts = [e for e in events if (e.request_id, e.sample_index) == who]
        taken = [e for e in got if (e.request_id, e.sample_index) == who]
        assert [columns(e) for e in summed(parts)] == [columns(e) for e in summed(taken)]
        [scored] = [e for e in taken if e.prompt_scores is not None]
        assert scored.prompt_scores == PROMPT_SCORES
        assert scored is next((e for e in taken if e.token_ids), taken[-1])
        for name in ("finish", "usage", "captured"):
            values = [getattr(e, name) for e in taken]
            assert values == [None] * (len(taken) - 1) + [getattr(parts[-1], name)]


def summed(events: list[TokenEvent]) -> list[TokenEvent]:
    """The events with a token each; an event without tokens is none."""
    return [
        TokenEvent(
            request_id=event.request_id,
            sample_index=event.sample_index,
            token_ids=(event.token_ids[i],),
            logprobs=(event.logprobs[i],),
            epochs=(event.epochs[i],),
            scores=Scores(
                top_ids=(event.scores.top_ids[i],),
                top_logprobs=(event.scores.top_logprobs[i],),
                id_logprobs=(event.scores.id_logprobs[i],),
            ),
        )
        for event in events
        for i in range(len(event.token_ids))
    ]


def columns(event: TokenEvent) -> tuple[object, ...]:
    return event.token_ids, event.logprobs, event.epochs, event.scores


def test_a_reader_that_stalls_costs_its_tokens_once():
    """Of ten thousand events two are kept a generation, the first and the last."""
    stand = newsstand(CountingLoop(), [])
    stand.open(7)
    streams = [stream_of(7, sample_index, [1] * 10_000) for sample_index in range(2)]
    alone = sys.getrefcount(an_event(7, 0, 1))
    for pair in zip(*streams, strict=True):
        stand.deliver(pair)
    del pair
    kept = [sum(sys.getrefcount(event) > alone + 2 for event in stream) for stream in streams]
    assert kept == [2, 2]


def test_an_event_loop_is_woken_once_for_all_news_that_it_has_not_seen():
    loop = CountingLoop()
    stand = newsstand(loop, [])
    for request_id in range(300):
        stand.open(request_id)
    for first in range(3):
        stand.deliver([an_event(request_id, first, 1) for request_id in range(300)])
    assert len(loop.calls) == 1
    loop.calls.pop()()
    stand.deliver([an_event(request_id, 3, 1) for request_id in range(300)])
    assert len(loop.calls) == 1


def test_news_of_a_request_that_nobody_reads_wakes_nobody():
    loop = CountingLoop()
    stand = newsstand(loop, [])
    stand.open(1)
    stand.drop(1)
    stand.deliver([an_event(1, 0, 1)])
    assert loop.calls == [] and stand.is_empty


def test_a_failure_comes_after_the_news():
    async def read() -> None:
        stand = Newsstand(asyncio.get_running_loop(), lambda ids: None)
        cursor = stand.open(1)
        stand.deliver([an_event(1, 0, 1)])
        stand.deliver(EngineClosed("it is over"))
        (event,) = await cursor.take()
        assert event.token_ids == (0,)
        for _ in range(2):
            with pytest.raises(EngineClosed, match="it is over"):
                await cursor.take()

    asyncio.run(read())


def test_a_reader_that_waits_is_woken_from_another_thread():
    async def read() -> list[TokenEvent]:
        loop = asyncio.get_running_loop()
        stand = Newsstand(loop, lambda ids: None)
        cursor = stand.open(1)
        waiting = asyncio.ensure_future(cursor.take())
        await asyncio.sleep(0)  # the reader waits now
        await loop.run_in_executor(None, stand.deliver, [an_event(1, 0, 2)])
        return await asyncio.wait_for(waiting, timeout=60)

    assert [event.token_ids for event in asyncio.run(read())] == [(0, 1)]


def test_the_requests_of_a_closed_event_loop_are_deserted_once():
    deserted: list[int] = []
    stand = newsstand(CountingLoop(is_closed=True), deserted)
    for request_id in (1, 2):
        stand.open(request_id)
    stand.deliver([an_event(1, 0, 1)])
    stand.deliver([an_event(2, 0, 1)])
    assert deserted == [1, 2]
    stand.drop(1)  # a reader that ends late


def test_an_event_loop_that_is_closed_before_it_wakes_has_deserted():
    deserted: list[int] = []
    loop = asyncio.new_event_loop()
    stand = Newsstand(loop, deserted.extend)
    stand.open(1)
    stand.deliver([an_event(1, 0, 1)])
    assert deserted == []  # it has been called, and never runs again
    loop.close()
    stand.deliver([an_event(1, 1, 1)])
    assert deserted == [1]


def test_events_that_waited_become_one_a_generation() -> None:
    first, second = stream_of(1, 0, [2, 0, 3]), stream_of(1, 1, [1, 4])
    other = stream_of(2, 0, [5])
    mixed = [first[0], other[0], first[1], second[0], second[1], first[2]]
    whole = joined(mixed)
    assert [(event.request_id, event.sample_index) for event in whole] == [(1, 0), (2, 0), (1, 1)]
    for event, parts in zip(whole, (first, other, second), strict=True):
        assert event.token_ids == tuple(t for part in parts for t in part.token_ids)
        assert event.logprobs == tuple(x for part in parts for x in part.logprobs)
        assert event.prompt_scores == PROMPT_SCORES and event.finish == parts[-1].finish
        assert event.scores is not None and len(event.scores.top_ids) == len(event.token_ids)
    assert joined([other[0]]) == other and joined([]) == []
