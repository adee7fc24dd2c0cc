"""Many clients at once, rude clients, slow clients, and an engine that dies among them.

After each: every request was answered once, all pages are back, and a fixed request is answered as
ever ([POOL], [LIVE]).
"""

import asyncio
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.server import Server, read_events, right, start_server, strict_json
from tests.support.waiting import until

NUM_PAGES = 2048
GOLDEN = {"text": "ROMEO\n", "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
GOLDEN_IDS = [43, 555, 263, 281, 1290, 201]
LONG = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
END_S = 5
HEARTBEAT_S = 0.5  # counts of the engine are as old as that
UNLIMITED = httpx.Limits(max_connections=None)
PATHS = ("/generate", "/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def crowded() -> Iterator[Server]:
    with start_server(
        "--num-pages", str(NUM_PAGES), "--max-running", "64", "--chunk-size", "64"
    ) as made:
        yield made
        assert made.log.read_text() == ""


def is_whole(server: Server) -> bool:
    """Nothing runs or waits, and each page is free or cached."""
    names = ("running_sequences", "waiting_sequences", "kv_free_pages", "kv_cached_pages")
    running, waiting, free, cached = (server.metric(f"dovetail_{name}") for name in names)
    return (running, waiting, free + cached) == (0, 0, NUM_PAGES)


def check_unharmed(server: Server, seconds: float) -> None:
    until(lambda: is_whole(server), seconds=seconds)
    assert server.generate(**GOLDEN)["output_ids"] == GOLDEN_IDS
    assert server.http.get("/health").status_code == 200


def question(index: int, **sampling: Any) -> tuple[str, dict[str, Any]]:
    """A path and a body; the three dialects take turns."""
    path = PATHS[index % 3]
    words = f"{index} KING HENRY\n"
    if path == "/generate":
        return path, {"text": words, "sampling_params": sampling}
    names = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
    body = {names.get(name, name): value for name, value in sampling.items()}
    if path == "/v1/completions":
        return path, body | {"prompt": words}
    return path, body | {"messages": [{"role": "user", "content": words}]}


def answer(path: str, events: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The text of a stream, or of a whole answer as its only event, and its finish reasons."""
    if path == "/generate":
        reasons = [event["meta_info"]["finish_reason"] for event in events]
        return events[-1]["text"], [reason["type"] for reason in reasons if reason is not None]
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    text = "".join(part.get("content") or part.get("text") or "" for part in parts)
    return text, [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


# -- many at once ------------------------------------------------------------------------------


async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    async with http.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        lines = [line async for line in reply.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1
    return [strict_json(line.removeprefix("data: ")) for line in lines[:-1]]


def test_300_streams_at_once(crowded: Server) -> None:
    params = {"max_new_tokens": 48, "ignore_eos": True, "temperature": 0.9}
    questions = [question(index, **params, sampling_seed=index) for index in range(300)]
    seen: list[float] = []

    async def watch() -> None:
        async with httpx.AsyncClient(base_url=crowded.url, timeout=60) as http:
            while True:
                page = (await http.get("/metrics")).text
                counts = dict(line.rsplit(" ", 1) for line in page.splitlines() if line[0] != "#")
                names = ("dovetail_running_sequences", "dovetail_waiting_sequences")
                seen.append(sum(float(counts[name]) for name in names))
                await asyncio.sleep(HEARTBEAT_S / 2)

    async def ask_all() -> list[list[Any]]:
        async with httpx.AsyncClient(base_url=crowded.url, timeout=120, limits=UNLIMITED) as http:
            watcher = asyncio.create_task(watch())
            try:
                return await asyncio.gather(*(streamed(http, *one) for one in questions))
            finally:
                watcher.cancel()

    answers = [
        answer(path, events)
        for (path, _), events in zip(questions, asyncio.run(ask_all()), strict=True)
    ]
    assert max(seen) > 200, "they were not there at once"
    assert [reasons for _, reasons in answers] == [["length"]] * 300
    for index in range(0, 300, 29):  # of each dialect
        path, body = questions[index]
        whole = right(crowded.post(path, body))
        assert answer(path, [whole])[0] == answers[index][0]
    check_unharmed(crowded, seconds=5)


# -- clients that leave ------------------------------------------------------------------------


def connect(server: Server, *, receive_bytes: int | None = None) -> socket.socket:
    url = httpx.URL(server.url)
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(60)
    sock.connect((url.host, url.port))
    return sock


def as_http(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def leave(sock: socket.socket, *, rudely: bool) -> None:
    """Close with a FIN, or with a RST."""
    if rudely:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_200_clients_that_leave(crowded: Server) -> None:
    """In the head, in the body, in a prompt of many chunks, in the queue, in a stream.

    Each way with FIN and with RST, while more are there than can run.
    """
    started = crowded.metric("dovetail_prompt_tokens_total")
    left: list[float] = []

    def come_and_go(index: int) -> None:
        path, body = question(index, **LONG | {"max_new_tokens": 1000})
        if path == "/generate":
            body["text"] = f"{index} KING HENRY\n" * 80
        is_stream = index % 4 == 3
        data = as_http(path, body | {"stream": is_stream})
        sock = connect(crowded)
        match index % 4:
            case 0:
                sock.sendall(data[:30])
            case 1:
                sock.sendall(data[:-10])
            case 2:
                sock.sendall(data)
            case _:
                sock.sendall(data)
                assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        if not is_stream:
            time.sleep(random.Random(index).random())
        leave(sock, rudely=index % 2 == 0)
        left.append(time.monotonic())

    with ThreadPoolExecutor(100) as pool:
        list(pool.map(come_and_go, range(200)))
    check_unharmed(crowded, seconds=max(left) + 1 + HEARTBEAT_S - time.monotonic())
    assert crowded.metric("dovetail_prompt_tokens_total") > started


# -- clients that do not read ------------------------------------------------------------------


def test_30_slow_readers_cost_little_and_hurt_nobody(crowded: Server) -> None:
    """Each event has all there is so far: 200 of them are 60 MB, of which most is never made.

    What a slow reader finds when it reads at last is what fitted into the kernel's buffers and the
    server's, and then the end.
    """
    body = {
        "text": "KING HENRY\n",
        "sampling_params": LONG | {"max_new_tokens": 200},
        "return_logprob": True,
        "top_logprobs_num": 100,
        "stream": True,
    }
    before = crowded.metric("dovetail_generated_tokens_total")
    socks = [connect(crowded, receive_bytes=4096) for _ in range(30)]
    try:
        for sock in socks:
            sock.sendall(as_http("/generate", body))
        until(lambda: crowded.metric("dovetail_running_sequences") == 30, seconds=20)
        for _ in range(10):  # beside them
            assert crowded.generate(**GOLDEN)["output_ids"] == GOLDEN_IDS
        until(lambda: is_whole(crowded), seconds=60)
        replies = [read_all(sock) for sock in socks]
    finally:
        for sock in socks:
            sock.close()
    for reply in replies:
        *events, last = reply.split(b"data: ")[1:-1]
        assert reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert len(events) < 100 and len(reply) < 12e6
        assert b'"finish_reason":{"type":"length","length":200}' in last
    check_unharmed(crowded, seconds=5)
    generated = crowded.metric("dovetail_generated_tokens_total") - before
    assert generated == 30 * 200 + 11 * len(GOLDEN_IDS), "the engine did not wait for them"


def read_all(sock: socket.socket) -> bytes:
    """Read a chunked reply to its end."""
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        part = sock.recv(1 << 20)
        assert part, "the stream broke off"
        data += part
    return bytes(data)


# -- the end -----------------------------------------------------------------------------------


def test_50_streams_of_an_engine_that_is_killed() -> None:
    """Who finds it full is told when to come again. When it dies, each stream gets an error event.

    And its [DONE]; those who wait get a 503; all within 2 s. B131.
    """
    flags = ("--num-pages", str(NUM_PAGES), "--max-running", "40", "--max-queued", "10")
    begun, refused = threading.Semaphore(0), threading.Semaphore(0)

    def ask(index: int) -> tuple[int, Any, float]:
        path, body = question(index, **LONG | {"max_new_tokens": 1200})
        with http.stream("POST", path, json=body | {"stream": True}) as reply:
            if reply.status_code != 200:
                if reply.status_code == 429:
                    assert int(reply.headers["retry-after"]) >= 1
                    refused.release()
                return reply.status_code, json.loads(reply.read()), time.monotonic()
            last: Any = None
            for number, event in enumerate(read_events(reply)):
                last = event
                if number == 0:
                    begun.release()
            return 200, last, time.monotonic()

    with (
        start_server(*flags) as server,
        httpx.Client(base_url=server.url, timeout=60, limits=UNLIMITED) as http,
        ThreadPoolExecutor(70) as pool,
    ):
        [engine_id] = server.children()
        futures = [pool.submit(ask, index) for index in range(70)]
        try:
            for semaphore, num in ((refused, 20), (begun, 40)):
                for _ in range(num):
                    assert semaphore.acquire(timeout=20)
            until(lambda: server.metric("dovetail_waiting_sequences") == 10, seconds=10)
        finally:
            killed = time.monotonic()
            os.kill(engine_id, signal.SIGKILL)
        answers = [future.result(20) for future in futures]
        assert max(at for _, _, at in answers) - killed < 2
        assert sorted(status for status, _, _ in answers) == [200] * 40 + [429] * 20 + [503] * 10
        for status, last, _ in answers:
            code = "server_full" if status == 429 else "engine_closed"
            assert last["error"]["code"] == code
            assert status == 429 or "SIGKILL" in last["error"]["message"]


def test_bodies_that_arrive_while_it_ends() -> None:
    """A short one is told that it came too late; millions of ids are checked on a thread, which
    nothing can stop, and the end does not wait for it."""
    with (
        start_server("--num-pages", "512") as server,
        connect(server) as long,
        connect(server) as other,
    ):
        data = as_http("/generate", GOLDEN)
        with connect(server) as sock:
            sock.sendall(data[:-10])
            for each in (long, other):
                each.sendall(as_http("/generate", {"input_ids": [[1] * 2040] * 4000}))
            started = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not is_listening(server), seconds=5)
            sock.sendall(data[-10:])
            reply = bytearray()
            while part := sock.recv(1 << 16):
                reply += part
        assert reply.startswith(b"HTTP/1.1 503") and b'"code":"engine_closed"' in reply
        assert server.process.wait(20) == 0
        assert time.monotonic() - started < END_S


def is_listening(server: Server) -> bool:
    url = httpx.URL(server.url)
    with socket.socket() as sock:
        return sock.connect_ex((url.host, url.port)) == 0
