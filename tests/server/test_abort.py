"""Aborts and clients that leave: one last answer each, nothing lost, nothing left running."""

import random
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.server import Server, read_events, right, start_server
from tests.support.waiting import until

LONG = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}  # many seconds
ABORTED = 'dovetail_generations_total{reason="abort"}'
ABANDONED = 'dovetail_generations_total{reason="abandoned"}'


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """Two run, the rest waits."""
    with start_server("--max-running", "2", "--num-pages", "512") as made:
        yield made


@pytest.fixture(autouse=True)
def all_gone(narrow: Server) -> Iterator[None]:
    """[POOL] and [LIVE] after each."""
    yield
    narrow.wait_until_idle()
    used = narrow.metric("dovetail_kv_free_pages") + narrow.metric("dovetail_kv_cached_pages")
    assert used == narrow.metric("dovetail_kv_pages") == 512
    assert narrow.generate(text="A", sampling_params={"max_new_tokens": 1})


def abort(server: Server, **body: Any) -> None:
    assert right(server.post("/abort_request", body)) == {}


def running(server: Server) -> int:
    return int(server.metric("dovetail_running_sequences"))


def well_formed_abort(reply: dict[str, Any]) -> int:
    """[LEN]; return how many tokens it has."""
    meta = reply["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    num = len(reply["output_ids"])
    assert num == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert [triple[1] for triple in meta["output_token_logprobs"]] == reply["output_ids"]
    assert meta["prompt_tokens"] >= 1 and meta["cached_tokens"] >= 0
    return num


def test_b85_running_and_waiting_requests_keep_what_they_have(narrow: Server) -> None:
    """Running ones all their tokens, waiting ones an empty list; streamed or not."""
    first: dict[str, Any] = {}
    begun = threading.Semaphore(0)

    def stream(rid: str) -> dict[str, Any]:
        body = {"text": "A", "sampling_params": LONG, "rid": rid, "return_logprob": True}
        last: dict[str, Any] = {}
        with (
            httpx.Client(base_url=narrow.url, timeout=60) as http,
            http.stream("POST", "/generate", json=body | {"stream": True}) as reply,
        ):
            for last in read_events(reply):
                if rid not in first:
                    first[rid] = last
                    begun.release()
        return last

    def whole(rid: str) -> dict[str, Any]:
        return narrow.generate(text="A", sampling_params=LONG, rid=rid, return_logprob=True)

    with ThreadPoolExecutor(4) as pool:
        streamed = pool.submit(stream, "run-stream")
        assert begun.acquire(timeout=20)
        plain = pool.submit(whole, "run")
        until(lambda: running(narrow) == 2, seconds=20)
        waiting = [pool.submit(stream, "wait-stream"), pool.submit(whole, "wait")]
        until(lambda: narrow.metric("dovetail_waiting_sequences") == 2, seconds=20)
        abort(narrow, rid="wait-stream")
        abort(narrow, rid="wait")
        for future in waiting:
            assert well_formed_abort(future.result(20)) == 0
        assert not streamed.done() and not plain.done()
        abort(narrow, rid="run-stream")
        assert well_formed_abort(streamed.result(20)) >= 1
        abort(narrow, rid="run")
        assert well_formed_abort(plain.result(20)) >= 1


def test_b81_one_label_twice(narrow: Server) -> None:
    """Both are served; an abort ends both; the label can be used again at once."""
    body = {"text": "A", "sampling_params": LONG, "rid": "twin", "return_logprob": True}
    with ThreadPoolExecutor(2) as pool:
        twins = [pool.submit(lambda: narrow.generate(**body)) for _ in range(2)]
        until(lambda: running(narrow) == 2, seconds=20)
        abort(narrow, rid="twi")  # no prefix
        time.sleep(0.1)
        assert not any(twin.done() for twin in twins)
        abort(narrow, rid="twin")
        short = {"max_new_tokens": 3, "ignore_eos": True}
        again = narrow.generate(text="A", sampling_params=short, rid="twin")
        assert again["meta_info"]["finish_reason"]["type"] == "length"
        for twin in twins:
            well_formed_abort(twin.result(20))


def test_aborts_of_nothing(narrow: Server) -> None:
    before = narrow.metric(ABORTED)
    abort(narrow, rid="never-was")
    abort(narrow, rid="never-was", prefix=True)
    abort(narrow, abort_all=True)
    assert narrow.metric(ABORTED) == before


@pytest.mark.parametrize("words", [{"abort_all": True}, {"rid": "group-", "prefix": True}])
def test_many_at_once(narrow: Server, words: dict[str, Any]) -> None:
    with ThreadPoolExecutor(6) as pool:
        futures = [
            pool.submit(narrow.generate, text="A", sampling_params=LONG | {"n": 1 + index % 2},
                        rid=f"group-{index}", return_logprob=True)
            for index in range(6)
        ]  # fmt: skip
        until(lambda: running(narrow) == 2, seconds=20)
        until(lambda: narrow.metric("dovetail_waiting_sequences") >= 5, seconds=20)
        before = narrow.metric(ABORTED)
        abort(narrow, **words)
        for future in futures:
            reply = future.result(20)
            for one in reply if isinstance(reply, list) else [reply]:
                well_formed_abort(one)
    assert narrow.metric(ABORTED) == before + 9, "one of each n"


def test_b75_aborts_that_cross_a_finish(narrow: Server) -> None:
    """Each request has one answer, whoever wins."""
    rng = random.Random(0)

    def ask(index: int) -> dict[str, Any]:
        params = {"max_new_tokens": 4, "ignore_eos": True}
        return narrow.generate(text="A", sampling_params=params, rid=f"r{index}")

    def ask_and_abort(delay: float) -> dict[str, Any]:
        index = rng.getrandbits(60)
        with ThreadPoolExecutor(1) as inner:
            answer: Future[dict[str, Any]] = inner.submit(ask, index)
            time.sleep(delay)
            abort(narrow, rid=f"r{index}")
            abort(narrow, rid=f"r{index}")
            return answer.result(30)

    def seconds(index: int) -> float:
        started = time.perf_counter()
        ask(index)
        return time.perf_counter() - started

    with ThreadPoolExecutor(8) as pool:
        usual = statistics.median(pool.map(seconds, range(16)))
        replies = list(pool.map(ask_and_abort, [2.5 * usual * rng.random() for _ in range(150)]))
    reasons = {reply["meta_info"]["finish_reason"]["type"] for reply in replies}
    assert reasons == {"abort", "length"}, "the delays meet no finish"


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_a_stream_whose_client_leaves_is_aborted(narrow: Server, path: str) -> None:
    body = {
        "/generate": {"text": ["A", "B"], "sampling_params": LONG},
        "/v1/completions": {"prompt": "A", "n": 2, "max_tokens": 2000, "ignore_eos": True},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "A"}],
            "n": 2,
            "max_tokens": 2000,
            "ignore_eos": True,
        },
    }[path]
    before = narrow.metric(ABANDONED)
    with (
        httpx.Client(base_url=narrow.url, timeout=60) as http,
        http.stream("POST", path, json=body | {"stream": True}) as reply,
    ):
        lines = reply.iter_lines()  # kept: if it is dropped, httpx closes the connection
        next(lines)
        until(lambda: running(narrow) == 2, seconds=20)
    until(lambda: narrow.metric(ABANDONED) == before + 2, seconds=3)
    narrow.wait_until_idle(seconds=3)
    assert narrow.metric(ABANDONED) == before + 2  # each once


@pytest.mark.parametrize("num", [1, 5])
def test_a_client_that_leaves_before_its_answer(narrow: Server, num: int) -> None:
    """Running and waiting ones are aborted."""
    before = narrow.metric(ABANDONED)
    url = httpx.URL(narrow.url)
    text = ["A"] * num
    body = httpx.Request("POST", url, json={"text": text, "sampling_params": LONG}).content
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=20) as sock:
        sock.sendall(head.encode() + body)
        until(lambda: running(narrow) == min(num, 2), seconds=20)
    until(lambda: narrow.metric(ABANDONED) == before + num, seconds=3)
    narrow.wait_until_idle(seconds=3)
    assert narrow.metric(ABANDONED) == before + num  # each once
