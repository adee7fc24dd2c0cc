"""Where the host's time of a step goes, on the engine's own thread, with clients beside it.

    python -m benchmarks.host_parts [SHAPE] [--device cuda] [--rows N] [--out FILE.jsonl]

Microseconds of the parts of a decode step of so many rows, medians and means of the steps that
neither start nor end a request: ``messages`` taken, ``plan``, ``submit``, ``result`` read without
the wait for it, ``commit``, ``events`` handed out. Works: ``whole``, where ``Engine.generate``
takes all tokens at the end; ``framed``, as a served engine hands out streams: a frame a step, to a
thread that writes it; ``streamed``, as many asyncio streams of one event loop in this process.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from benchmarks.common import add_line, describe_run
from dovetail.core.engine import Engine
from dovetail.core.link import Link
from dovetail.core.mailbox import News
from dovetail.errors import EngineError
from dovetail.exec import executor as executor_module
from dovetail.wire.codec import FROM_ENGINE
from dovetail.wire.process import Events
from dovetail.wire.request import SamplingParams

SHAPES = Path(__file__).parent / "shapes"
PROMPT_LEN = 128
PARTS = ("messages", "plan", "submit", "result", "commit", "events")


class StepClock:
    """Times the parts of each turn of a running engine's loop. Made while the loop is idle."""

    def __init__(self, engine: Engine, rows: int) -> None:
        loop: Any = engine.port.loop
        self._rows = rows
        self._now: dict[str, float] = {}
        self._is_steady = False
        self.steps: list[dict[str, float]] = []
        self._time(loop.inbox, "take", "messages")
        self._time(loop.scheduler, "plan", "plan", self._look)
        self._time(loop.executor, "submit", "submit")
        self._time(executor_module, "read_result", "result")
        self._time(loop.executor, "_collect", "wait and result")
        self._time(loop.scheduler, "commit", "commit")
        self._time(loop.outbox, "put", "events")
        step = loop.step

        def timed_step() -> None:
            self._now, self._is_steady, started = {}, False, time.perf_counter()
            step()
            if self._is_steady:
                self._now["all"] = time.perf_counter() - started
                self.steps.append(self._now)

        loop.step = timed_step

    def _look(self, plan: Any) -> None:
        """A steady step decodes all rows, and forwards nothing else."""
        self._is_steady = (
            plan is not None and len(plan.rows) == plan.num_tokens == self._rows
        ) and not len(plan.slot_writes)

    def _time(
        self, owner: Any, method: str, name: str, look: Callable[[Any], None] | None = None
    ) -> None:
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = original(*args, **kwargs)
            self._now[name] = self._now.get(name, 0.0) + time.perf_counter() - started
            if look is not None:
                look(found)
            return found

        setattr(owner, method, timed)

    def take(self) -> dict[str, dict[str, float]]:
        """Return microseconds of the parts since the last call, without the wait for the device."""
        steps, self.steps = self.steps, []
        times: dict[str, list[float]] = {name: [] for name in (*PARTS, "host")}
        for step in steps:
            for name in PARTS:
                times[name].append(step.get(name, 0.0))
            waited = step.get("wait and result", 0.0) - step.get("result", 0.0)
            times["host"].append(step["all"] - waited)
        return {
            kind.__name__: {name: round(1e6 * kind(values), 1) for name, values in times.items()}
            for kind in (statistics.median, statistics.fmean)
        } | {"steps": {"number": float(len(steps))}}


def prompts_of(rows: int) -> list[list[int]]:
    """Return prompts of several lengths, so that pages do not all end together."""
    return [[(7 * i + j) % 1000 + 3 for j in range(PROMPT_LEN + i % 16)] for i in range(rows)]


def whole(engine: Engine, rows: int, params: SamplingParams) -> None:
    engine.generate(prompts_of(rows), params)


def framed(engine: Engine, rows: int, params: SamplingParams) -> None:
    ours, theirs = Pipe()
    link = Link(ours, lambda: True)

    def deliver(news: News) -> None:
        assert not isinstance(news, EngineError), news
        link.send(FROM_ENGINE.encode(Events(tuple(news))))

    for request in engine.requests.make_all(prompts_of(rows), params):
        engine.port.start(request, deliver)
    while theirs.poll(1.0):
        theirs.recv_bytes()  # not decoded: that is the front end's work, in a process of its own
    link.close(1.0)


def streamed(engine: Engine, rows: int, params: SamplingParams) -> None:
    async def read(prompt: list[int]) -> None:
        async for _ in engine.astream(prompt, params):
            pass

    async def read_all() -> None:
        await asyncio.gather(*map(read, prompts_of(rows)))

    asyncio.run(read_all())


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", nargs="?", help="of benchmarks/shapes (the embedded model's)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each request (400)")
    parser.add_argument("--capture", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = () if args.shape is None else (SHAPES / args.shape,)
    memory = {"kv_memory": "40GiB"} if args.device == "cuda" else {}
    params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True, temperature=0.6)
    about = describe_run(["-m", "benchmarks.host_parts", args.shape or ""])
    with Engine(
        *model, device=args.device, load_format="dummy", max_running=args.rows, context_len=1024,
        chunk_size=2048, capture=tuple(args.capture), **memory,
    ) as engine:  # fmt: skip
        clock = StepClock(engine, args.rows)
        for work in (whole, framed, streamed):
            work(engine, args.rows, params)
            line = {"work": f"host time of a step: {work.__name__}", "batch": args.rows}
            line |= {"shape": args.shape or "tiny-moe", "unit": "us", "floor": None}
            parts = clock.take()
            line |= {"value": parts["median"]["host"]} | parts | about
            print(json.dumps(line), flush=True)
            add_line(args.out, line)


if __name__ == "__main__":
    main()
