"""An engine in a process of its own: the same answers, and nobody is left waiting or behind.

Starting one takes seconds, so tests share one where they do not harm it.
"""

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

import dovetail
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineOptions
from dovetail.core import process
from dovetail.core.child import _heartbeat
from dovetail.core.client import EngineClient
from dovetail.core.generation import Generation, collect
from dovetail.core.link import Link
from dovetail.core.local import LocalEngine
from dovetail.core.mailbox import News
from dovetail.core.port import EnginePort
from dovetail.core.process import RemoteEngine
from dovetail.errors import CapacityError, ConfigError, EngineClosed, EngineError
from dovetail.exec.pending import PendingStep
from dovetail.sched.plan import StepPlan
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import LogprobParams, Request, SamplingParams
from dovetail.wire.result import TokenEvent
from dovetail.wire.status import Health
from tests.support.processes import is_running
from tests.support.waiting import WAIT_SECONDS, until

T = TypeVar("T")

OPTIONS = {"page_size": 4, "max_running": 16, "num_pages": 2048}
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, sampling_seed=1)
ENDLESS = SamplingParams(temperature=0, max_new_tokens=1500, ignore_eos=True)
QUESTIONS: list[dict[str, object]] = [
    {"prompt": "KING HENRY\n", "sampling_params": GREEDY, "capture": ("tokens",)},
    {"prompt": [5, 6, 7] * 9, "sampling_params": SamplingParams(max_new_tokens=0, sampling_seed=2)},
    {
        "prompt": "To be, or not to be",
        "sampling_params": SamplingParams(max_new_tokens=9, n=3, sampling_seed=2**64 - 1),
        "logprobs": LogprobParams(top_logprobs_num=3, token_ids_logprob=(5, 6)),
        "capture": ("tokens",),
    },
    {
        "prompt": [5, 6, 7, 8, 9],
        "sampling_params": SamplingParams(
            max_new_tokens=20, sampling_seed=3, top_k=5, logit_bias={11: 2.5}, stop=("e", "\n")
        ),
        "logprobs": LogprobParams(kind="raw", logprob_start_len=0, top_logprobs_num=2),
    },
    {
        "prompt": "KING HENRY\n",  # now from the prefix cache
        "sampling_params": SamplingParams(
            temperature=0.5, max_new_tokens=12, top_p=0.5, sampling_seed=3
        ),
        "logprobs": LogprobParams(kind="truncated", top_logprobs_num=2),
    },
]


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes that a test starts; in the end each must be gone."""
    found: list[subprocess.Popen[bytes]] = []

    launch = process._launch

    def recorded(options: EngineOptions) -> tuple[subprocess.Popen[bytes], Link]:
        child, link = launch(options)
        found.append(child)
        return child, link

    monkeypatch.setattr(process, "_launch", recorded)
    yield found
    for child in found:
        assert child.poll() is not None, "a process was left behind"


@pytest.fixture(scope="module")
def remote() -> Iterator[RemoteEngine]:
    engine = RemoteEngine(**OPTIONS)
    yield engine
    engine.close()
    assert not is_running(engine.process_id)


@pytest.fixture(scope="module")
def client(remote: RemoteEngine) -> EngineClient:
    return EngineClient(remote)


@pytest.fixture(scope="module")
def local() -> Iterator[EngineClient]:
    config = resolve(options_from(OPTIONS))
    tokenizer = Tokenizer.from_folder(Path(config.model_folder))
    engine = LocalEngine(config, tokenizer)
    yield EngineClient(engine, tokenizer)
    engine.close()


def run(job: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; a hang is a failure."""
    return asyncio.run(asyncio.wait_for(job, WAIT_SECONDS))


async def ask(client: EngineClient, request: Request) -> list[Generation]:
    """All that one request gets."""
    return collect(request, [event async for event in client.events(request)])


class Listeners:
    """Clients that note all they are told, one a request."""

    def __init__(self, engine: EnginePort, client: EngineClient) -> None:
        self._engine, self._requests = engine, client.requests
        self.news: dict[int, list[TokenEvent | EngineError]] = {}

    def start(self, sampling: SamplingParams = ENDLESS) -> None:
        request = self._requests.make([7 + len(self.news)], sampling)
        heard: list[TokenEvent | EngineError] = []

        def deliver(news: News) -> None:
            heard.extend([news] if isinstance(news, EngineError) else news)

        self._engine.start(request, deliver)
        self.news[request.request_id] = heard

    @property
    def has_news(self) -> bool:
        return any(self.news.values())

    def ends(self) -> list[str]:
        """How each request ended; it did so once, and nothing came after.

        They are told one after another, so who waited for one has not waited for all.
        """

        def has_ended(heard: list[TokenEvent | EngineError]) -> bool:
            return bool(heard) and (isinstance(heard[-1], EngineError) or bool(heard[-1].finish))

        until(lambda: all(map(has_ended, self.news.values())))
        ends: list[str] = []
        for heard in self.news.values():
            *before, last = heard
            assert all(isinstance(one, TokenEvent) and one.finish is None for one in before)
            if isinstance(last, TokenEvent):
                assert last.finish is not None
                ends.append(last.finish.type)
            else:
                ends.append(str(last))
        return ends


# -- the same answers -----------------------------------------------------------------------


def values(generation: Generation) -> dict[str, object]:
    """A generation as values that can be compared."""
    fields = {name: getattr(generation, name) for name in Generation.__slots__}
    arrays = generation.captured.items()
    fields["captured"] = {name: (array.dtype.name, array.tolist()) for name, array in arrays}
    return fields


def test_the_answers_are_those_of_an_engine_in_this_process(client, local):
    """One at a time, so that both forward the same batches and every bit agrees."""
    for question in QUESTIONS:
        here, there = (run(ask(one, one.requests.make(**question))) for one in (local, client))
        assert [values(generation) for generation in there] == [values(g) for g in here]


def test_many_at_once_are_answered_like_one_by_one(client, local):
    async def all_of(one: EngineClient) -> list[list[Generation]]:
        params = SamplingParams(max_new_tokens=5, sampling_seed=4)
        requests = [one.requests.make([i, i + 1, i + 2], params) for i in range(40)]
        return await asyncio.gather(*(ask(one, request) for request in requests))

    there, here = run(all_of(client)), run(all_of(local))
    assert [[g.token_ids for g in answer] for answer in there] == [
        [g.token_ids for g in answer] for answer in here
    ]


def test_the_configuration_is_the_decided_one(remote, local):
    assert remote.config == local.config


def test_a_slow_reader_gets_all_it_missed_as_one_event(client):
    async def read() -> list[int]:
        params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
        slow, quick = (client.requests.make([3 + i], params) for i in range(2))
        events = client.events(slow)
        sizes = [len((await anext(events)).token_ids)]
        await ask(client, quick)  # began later, so the slow one has ended before it
        return sizes + [len(event.token_ids) async for event in events]

    sizes = run(read())
    assert len(sizes) == 2 and sum(sizes) == 60


def test_who_leaves_is_aborted(client, remote):
    """Else its tokens, as many as were asked for, would all be in the cache."""
    until(lambda: is_idle(remote))
    num_cached = remote.stats().num_cached_pages

    async def leave() -> None:
        events = client.events(client.requests.make([77], ENDLESS))
        await anext(events)
        until(lambda: remote.stats().num_running == 1)
        await events.aclose()

    run(leave())
    until(lambda: is_idle(remote))
    num_whole = (ENDLESS.max_new_tokens or 0) // OPTIONS["page_size"]
    assert remote.stats().num_cached_pages - num_cached < num_whole


def test_abort_by_id_and_by_group(client, remote):
    async def read() -> list[str]:
        requests = [client.requests.make([5 + i], ENDLESS, group="mine") for i in range(3)]
        readers = [asyncio.ensure_future(ask(client, request)) for request in requests]
        await anext(client.events(client.requests.make([9], GREEDY)))  # they have begun
        client.abort(requests[0].request_id)
        client.abort_group("mine")
        client.abort(10**9)
        answers = await asyncio.gather(*readers)
        return [answer[0].finish_reason.type for answer in answers]

    assert run(read()) == ["abort"] * 3
    until(lambda: is_idle(remote))


def is_idle(engine: RemoteEngine) -> bool:
    """Nothing runs, waits or holds a page, half a second ago or less."""
    stats = engine.stats()
    held = stats.num_pages - stats.num_free_pages - stats.num_cached_pages
    return stats.num_running == stats.num_waiting == held == 0


def test_an_interrupt_of_the_process_is_not_its_business(client, remote):
    os.kill(remote.process_id, signal.SIGINT)
    (generation,) = run(ask(client, client.requests.make([5], GREEDY)))
    assert len(generation.token_ids) == 12
    assert remote.health().state == "alive"


# -- starting -------------------------------------------------------------------------------


def error_of(make: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make()
    return caught.value


def test_a_wrong_option_is_refused_without_a_process(launched):
    here = error_of(lambda: dovetail.Engine(max_runing=3))
    there = error_of(lambda: RemoteEngine(max_runing=3))
    assert (there.field, str(there)) == (here.field, str(here)) and launched == []


def test_what_the_process_finds_wrong_is_the_same_error(fx_count_folder, tmp_path, launched):
    """Weights that end early: found late, while they load."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in fx_count_folder.iterdir():
        data = file.read_bytes()
        (folder / file.name).write_bytes(data[:-64] if file.suffix == ".safetensors" else data)
    here = error_of(lambda: dovetail.Engine(folder))
    there = error_of(lambda: RemoteEngine(folder))
    assert (there.field, str(there)) == (here.field, str(here))
    assert launched[0].poll() is not None


def test_an_interrupt_while_it_loads_ends_the_process_too(launched):
    seen: list[tuple[int, int]] = []

    def interrupt(what: str, done: int, total: int) -> None:
        seen.append((done, total))
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        RemoteEngine(on_progress=interrupt)
    ((done, total),) = seen
    assert 0 <= done <= total
    assert launched[0].poll() == -signal.SIGKILL


def test_a_process_that_dies_before_it_serves_says_how(launched, monkeypatch):
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    with pytest.raises(EngineClosed, match="ended with exit code 1 before it could serve"):
        RemoteEngine()


# -- stalling, dying, closing ---------------------------------------------------------------


@pytest.fixture
def fragile() -> Iterator[RemoteEngine]:
    """An engine that a test may harm, with room for 20."""
    engine = RemoteEngine(max_running=2, max_queued=18, health_timeout_s=2.0)
    yield engine
    engine.close()


def test_a_stopped_process_is_stalled_and_a_killed_one_dead(fragile, caplog):
    """20 streams are open when it dies; each gets an error at once, and so does who comes late."""
    client = EngineClient(fragile)
    reader = ThreadPoolExecutor(1).submit(run, ask(client, client.requests.make([5], ENDLESS)))
    listeners = Listeners(fragile, client)
    until(lambda: fragile.stats().num_running == 1)
    for _ in range(19):
        listeners.start()
    until(lambda: listeners.has_news)
    with pytest.raises(CapacityError, match="20 generations run or wait") as full:
        listeners.start()
    assert full.value.retry_after_s > 0
    assert fragile.health().state == "alive"

    os.kill(fragile.process_id, signal.SIGSTOP)
    until(lambda: fragile.health().state == "stalled")
    assert "no turn of the loop" in fragile.health().reason
    os.kill(fragile.process_id, signal.SIGCONT)
    until(lambda: fragile.health().state == "alive")
    os.kill(fragile.process_id, signal.SIGSTOP)  # so that none ends in the meantime
    until(lambda: fragile.health().state == "stalled")

    os.kill(fragile.process_id, signal.SIGKILL)
    until(lambda: fragile.health().state == "dead")
    reason = "the engine's process was killed by SIGKILL"
    with pytest.raises(EngineClosed, match=reason):
        reader.result(WAIT_SECONDS)
    assert listeners.ends() == [reason] * 19
    assert fragile.health().reason == reason and reason in caplog.text
    with pytest.raises(EngineClosed, match=reason):
        listeners.start()
    client.abort(1)  # no news to a dead engine


def test_close_with_a_full_queue_ends_each_request_once(fragile):
    listeners = Listeners(fragile, EngineClient(fragile))
    for _ in range(20):
        listeners.start()
    until(lambda: listeners.has_news)
    began = time.monotonic()
    fragile.close()
    assert time.monotonic() - began < 5
    assert listeners.ends() == ["abort"] * 20
    assert not is_running(fragile.process_id)
    with pytest.raises(EngineClosed, match="has been closed"):
        listeners.start()
    fragile.close()


def test_close_of_a_process_that_does_not_answer_is_by_force(fragile, monkeypatch):
    monkeypatch.setattr(process, "CLOSE_SECONDS", 0.2)
    listeners = Listeners(fragile, EngineClient(fragile))
    listeners.start()
    os.kill(fragile.process_id, signal.SIGSTOP)
    os.waitid(os.P_PID, fragile.process_id, os.WSTOPPED)  # before that it may still answer
    fragile.close()
    assert not is_running(fragile.process_id)
    assert listeners.ends() == ["the engine has been closed"]
    assert fragile.health().state == "dead"


def test_a_process_that_is_told_to_end_ends_properly(launched, fragile, caplog):
    listeners = Listeners(fragile, EngineClient(fragile))
    for _ in range(3):
        listeners.start()
    until(lambda: listeners.has_news)
    os.kill(fragile.process_id, signal.SIGTERM)
    (child,) = launched
    assert child.wait(WAIT_SECONDS) == 0
    until(lambda: fragile.health().state == "dead")
    assert listeners.ends() == ["abort"] * 3
    assert "has been closed" in caplog.text


def test_a_loop_that_hangs_in_a_step_is_stalled_and_its_heartbeat_tells(monkeypatch):
    """The heartbeat is sent by another thread, but what it says is of the loop."""
    config = resolve(options_from({}))
    engine = LocalEngine(
        config, Tokenizer.from_folder(Path(config.model_folder)), health_timeout_s=0.5
    )
    release, submit = threading.Event(), engine.loop.executor.submit

    def hang(plan: StepPlan) -> PendingStep:
        release.wait(WAIT_SECONDS)
        return submit(plan)

    monkeypatch.setattr(engine.loop.executor, "submit", hang)
    client = EngineClient(engine)
    engine.start(client.requests.make([1], GREEDY), lambda news: None)
    until(lambda: engine.health().state == "stalled")
    assert _heartbeat(engine).turn_age_s > 0.5
    release.set()
    engine.close()
    assert engine.health() == Health(state="dead", reason="the engine has been closed")
