"""B131: an engine that dies or hangs is noticed, and nobody waits for it in silence.

A server does not outlive its engine: its exit code tells whoever watches it to start another.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.support.server import Server, read_events, start_server

LONG = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}


def health(server: Server) -> tuple[int, str | None]:
    reply = server.http.get("/health")
    body = reply.json()
    return reply.status_code, body["error"]["code"] if "error" in body else None


def wait_for_health(server: Server, want: tuple[int, str | None], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while health(server) != want:
        assert time.monotonic() < deadline, health(server)
        time.sleep(0.05)


def ask(server: Server, index: int) -> tuple[int, dict[str, Any]]:
    """Ask for a long answer; return the status and what came last."""
    body = {"text": "A", "sampling_params": LONG}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        if index % 2:
            reply = http.post("/generate", json=body)
            return reply.status_code, reply.json()
        with http.stream("POST", "/generate", json=body | {"stream": True}) as reply:
            if reply.status_code != 200:
                return reply.status_code, dict(reply.json() if reply.read() else {})
            *_, last = read_events(reply)
            return 200, last


def test_a_killed_engine() -> None:
    with start_server("--num-pages", "512", "--max-running", "4") as server:
        [engine_id] = server.children()
        with ThreadPoolExecutor(12) as pool:
            futures = [pool.submit(ask, server, index) for index in range(12)]
            while server.metric("dovetail_waiting_sequences") < 8:
                time.sleep(0.05)
            os.kill(engine_id, signal.SIGKILL)
            answers = [future.result(10) for future in futures]
        assert {status for status, _ in answers} == {200, 503}, "begun streams, and the rest"
        for _, last in answers:
            assert last["error"]["code"] == "engine_closed"
            assert "SIGKILL" in last["error"]["message"]
        assert server.process.wait(10) == 1
        log = server.log.read_text()
        assert "the engine has died, and the server ends" in log
        assert "SIGKILL" in log and "Traceback" not in log


def test_a_suspended_engine_is_stalled_until_it_goes_on() -> None:
    with start_server("--num-pages", "512") as server:
        [engine_id] = server.children()
        os.kill(engine_id, signal.SIGSTOP)
        try:
            wait_for_health(server, (503, "stalled"), seconds=10)
        finally:
            os.kill(engine_id, signal.SIGCONT)
        wait_for_health(server, (200, None), seconds=10)
        assert server.generate(text="A", sampling_params={"max_new_tokens": 1})


def test_a_suspended_engine_cannot_keep_the_server() -> None:
    with start_server("--num-pages", "512") as server:
        [engine_id] = server.children()
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(ask, server, index) for index in range(2)]
            while server.metric("dovetail_running_sequences") < 2:
                time.sleep(0.05)
            os.kill(engine_id, signal.SIGSTOP)
            started = time.monotonic()
            assert server.end() == 0
            assert time.monotonic() - started < 7
            for future in futures:
                assert "error" in future.result(5)[1]
