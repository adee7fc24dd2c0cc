"""The asyncio client over a port that a test plays by hand."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from dovetail.config.resolve import options_from, resolve
from dovetail.core.client import EngineClient
from dovetail.core.generation import StreamEvent
from dovetail.core.mailbox import Deliver
from dovetail.core.port import Home
from dovetail.errors import EngineClosed, RequestError
from dovetail.wire.control import Abort, AbortGroup
from dovetail.wire.request import Request, SamplingParams
from dovetail.wire.result import FinishReason, TokenEvent, Usage
from dovetail.wire.status import EngineStats, Health

GREEDY = SamplingParams(temperature=0, max_new_tokens=4)


class PlayedPort:
    """An ``EnginePort`` that notes what it is asked and answers when the test says so."""

    def __init__(self) -> None:
        self.config = resolve(options_from({}))
        self.home = Home()
        self.started: dict[int, Deliver] = {}
        self.sent: list[Abort | AbortGroup] = []
        self.is_closed = False

    def start(self, request: Request, deliver: Deliver) -> None:
        if self.is_closed:
            raise EngineClosed("closed by the test")
        self.started[request.request_id] = deliver

    def send(self, message: Abort | AbortGroup) -> None:
        self.sent.append(message)

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def health(self) -> Health:
        return Health(state="alive")

    def close(self) -> None:
        self.is_closed = True

    def answer(self, request_id: int, *token_ids: int, is_last: bool = False) -> None:
        event = TokenEvent(
            request_id=request_id,
            token_ids=token_ids,
            logprobs=(-1.0,) * len(token_ids),
            epochs=(0,) * len(token_ids),
            finish=FinishReason(type="length") if is_last else None,
            usage=Usage(prompt_tokens=1, completion_tokens=0) if is_last else None,
        )
        self.started[request_id]([event])


@pytest.fixture
def port() -> PlayedPort:
    return PlayedPort()


@pytest.fixture
def client(port: PlayedPort) -> EngineClient:
    return EngineClient(port)


async def started(client: EngineClient) -> tuple[Request, asyncio.Task[StreamEvent]]:
    """A request whose reader waits for the first event."""
    request = client.requests.make([1], GREEDY)
    events = client.events(request)
    task = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    return request, task


def no_reader_is_left(client: EngineClient) -> bool:
    return not client._newsstands


def test_a_request_that_ends_is_not_aborted(client, port):
    async def read() -> list[tuple[int, ...]]:
        request = client.requests.make([1], GREEDY)
        tokens = []
        events = client.events(request)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        port.answer(request.request_id, 5)
        tokens.append((await first).token_ids)
        port.answer(request.request_id, 6)
        port.answer(request.request_id, 7, is_last=True)
        return tokens + [event.token_ids async for event in events]

    assert asyncio.run(read()) == [(5,), (6, 7)]
    assert port.sent == [] and no_reader_is_left(client)


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_who_leaves_aborts(client, port, how):
    async def leave() -> int:
        request = client.requests.make([1], GREEDY)
        events: AsyncIterator[StreamEvent] = client.events(request)
        task = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            port.answer(request.request_id, 5)
            await task
            await events.aclose()
        port.answer(request.request_id, 6, is_last=True)  # it crossed the abort on its way
        return request.request_id

    request_id = asyncio.run(leave())
    assert port.sent == [Abort(request_id)] and no_reader_is_left(client)


def test_a_request_that_does_not_start_leaves_nothing(client, port):
    async def ask() -> None:
        with pytest.raises(EngineClosed, match="closed by the test"):
            await anext(client.events(client.requests.make([1], GREEDY)))

    client.close()
    asyncio.run(ask())
    assert port.sent == [] and no_reader_is_left(client)


def test_a_failure_is_raised_to_every_reader(client, port):
    async def fail() -> list[object]:
        readers = [await started(client) for _ in range(3)]
        (deliver,) = set(port.started.values())  # one for all: so a step wakes the loop once
        deliver(EngineClosed("it is over"))
        return await asyncio.gather(*(task for _, task in readers), return_exceptions=True)

    assert [str(error) for error in asyncio.run(fail())] == ["it is over"] * 3
    assert no_reader_is_left(client)


def test_requests_of_an_event_loop_that_is_gone_are_aborted(client, port):
    loop = asyncio.new_event_loop()
    request, task = loop.run_until_complete(started(client))
    task._log_destroy_pending = False  # the test means it: the loop dies with its reader waiting
    loop.close()
    port.answer(request.request_id, 5)
    assert port.sent == [Abort(request.request_id)] and no_reader_is_left(client)


def test_what_is_no_id_and_no_label_is_refused_here(client, port):
    with pytest.raises(TypeError):
        client.abort("7")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="group"):
        client.abort_group(7)  # type: ignore[arg-type]
    assert port.sent == []
