"""What HTTP costs beside the engine, on the embedded model.

    python -m benchmarks.server_overhead [--rounds N] [--output FILE.jsonl]

1. Milliseconds that one request of one token takes longer over HTTP than in this process.
2. Milliseconds that one token of a lone stream takes longer, in OpenAI's and the native dialect.
3. CPU milliseconds of the front-end process for each streamed token, 32 streams at once.
4. CPU milliseconds of the engine's process for each of their tokens, served against driven from
   this process without HTTP. The engine does the same work; more means that HTTP disturbs it.

Both sides are measured in turn, round by round; medians are reported.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.common import describe_run
from dovetail import Engine, SamplingParams
from dovetail.core.client import EngineClient
from dovetail.core.process import RemoteEngine

PROMPT = list(range(100, 132))
NUM_STREAMS = 32
NUM_TOKENS = 128  # of a lone stream
NUM_MANY = 512  # of each of many: long enough that it does not count how they arrive
OPTIONS = {"num_pages": 4096, "prefix_cache": False}
FLAGS = ("--num-pages", "4096", "--no-prefix-cache")
GREEDY = {"temperature": 0, "ignore_eos": True}


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(description="What HTTP costs beside the engine.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with running_server() as server:
        lines = [*alone(server, args.rounds), *together(server, args.rounds)]
    run = describe_run(sys.argv, "uvicorn", "starlette", "httptools")
    text = "\n".join(json.dumps({"floor": None, **line, **run}) for line in lines)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


class Server:
    """A running ``dovetail serve``."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.address = address
        self.process_id = process.pid
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        [self.engine_id] = [int(word) for word in path.read_text().split()]
        self._connection = HTTPConnection(address)

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Post on a kept connection; return the whole reply."""
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", path, json.dumps(body), headers)
        reply = self._connection.getresponse()
        data = reply.read()
        assert reply.status == 200, data
        return data


@contextmanager
def running_server() -> Iterator[Server]:
    """Run the server on a free port."""
    words = [sys.executable, "-m", "dovetail.cli", "serve", "--port", "0", *FLAGS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            yield Server(process, ready.strip().rpartition("http://")[2])
        finally:
            process.terminate()


def alone(server: Server, rounds: int) -> Iterator[dict[str, Any]]:
    """One request at a time, over HTTP and in this process."""
    with Engine(**OPTIONS) as engine:  # type: ignore[arg-type]

        def local(num_tokens: int) -> None:
            params = SamplingParams(max_new_tokens=num_tokens, temperature=0, ignore_eos=True)
            for _ in engine.stream(PROMPT, params):
                pass

        def native(num_tokens: int, **more: object) -> None:
            params = GREEDY | {"max_new_tokens": num_tokens}
            body = {"input_ids": PROMPT, "sampling_params": params}
            server.post("/generate", body | more)

        def openai(num_tokens: int) -> None:
            body = {"prompt": PROMPT, "max_tokens": num_tokens, "stream": True}
            server.post("/v1/completions", body | GREEDY)

        one = in_turn(rounds * 15, lambda: local(1), lambda: native(1))
        yield line("a request of one token", 1, *one, unit="ms a request", per=1)
        whole = in_turn(
            rounds,
            lambda: local(NUM_TOKENS),
            lambda: native(NUM_TOKENS, stream=True),
            lambda: openai(NUM_TOKENS),
        )
        for name, seconds in zip(("native", "openai"), whole[1:], strict=True):
            yield line(
                f"a lone stream, {name}", 1, whole[0], seconds, unit="ms a token", per=NUM_TOKENS
            )


def together(server: Server, rounds: int) -> Iterator[dict[str, Any]]:
    """Many streams at once: CPU time of front end and engine."""
    port = RemoteEngine(**OPTIONS)
    client = EngineClient(port)
    front, served, driven = [], [], []
    num_tokens = NUM_STREAMS * NUM_MANY
    try:
        for _ in range(rounds):
            before = cpu_seconds(server.process_id), cpu_seconds(server.engine_id)
            stream_over_http(server.address)
            front.append(cpu_seconds(server.process_id) - before[0])
            served.append(cpu_seconds(server.engine_id) - before[1])
            start = cpu_seconds(port.process_id)
            asyncio.run(stream_without_http(client))
            driven.append(cpu_seconds(port.process_id) - start)
    finally:
        client.close()
    cost = statistics.median(front) / num_tokens
    yield {
        "work": "front end, CPU time",
        "shape": f"{NUM_STREAMS} streams of {NUM_MANY} tokens",
        "batch": NUM_STREAMS,
        "value": round(1e3 * cost, 4),
        "unit": "CPU ms a token",
    }
    yield line(
        "engine's process, CPU time", NUM_STREAMS, statistics.median(driven),
        statistics.median(served), unit="CPU ms a token", per=num_tokens,
    )  # fmt: skip


def in_turn(rounds: int, *works: Callable[[], None]) -> list[float]:
    """Do all in turn, round by round; return the median seconds of each."""
    seconds: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        for place, work in enumerate(works):
            started = time.perf_counter()
            work()
            if number:  # the first round warms up
                seconds[place].append(time.perf_counter() - started)
    return [statistics.median(some) for some in seconds]


def line(
    work: str, batch: int, without: float, with_http: float, *, unit: str, per: int
) -> dict[str, Any]:
    """Return a line of what HTTP adds; ``without`` and ``with_http`` in seconds for ``per``."""
    return {
        "work": f"HTTP's share of {work}",
        "shape": f"{len(PROMPT)} prompt tokens, {per // batch} generated",
        "batch": batch,
        "value": round(1e3 * (with_http - without) / per, 4),
        "unit": unit,
        "without_http": round(1e3 * without / per, 4),
        "with_http": round(1e3 * with_http / per, 4),
        "ratio": round(with_http / without, 4),
    }


def stream_over_http(address: str) -> None:
    """Read all streams to their end, on as many connections."""
    body = {"prompt": PROMPT, "max_tokens": NUM_MANY, "stream": True} | GREEDY

    def read() -> None:
        connection = HTTPConnection(address)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        assert reply.status == 200 and reply.read().endswith(b"data: [DONE]\n\n")
        connection.close()

    threads = [Thread(target=read) for _ in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def stream_without_http(client: EngineClient) -> None:
    """Read the same streams from an engine's process, in this one."""
    params = SamplingParams(max_new_tokens=NUM_MANY, temperature=0, ignore_eos=True)

    async def read() -> None:
        async with aclosing(client.events(client.requests.make(PROMPT, params))) as events:
            async for _ in events:
                pass

    await asyncio.gather(*(read() for _ in range(NUM_STREAMS)))


def cpu_seconds(process_id: int) -> float:
    """Return the CPU time that a process has used, all its threads together."""
    total = 0
    for task in Path(f"/proc/{process_id}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


if __name__ == "__main__":
    main()
