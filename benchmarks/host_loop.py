"""What the host costs: plan, commit and events, on an executor that computes nothing.

    python -m benchmarks.host_loop [--output FILE.jsonl]

1. Milliseconds a step at 16 to 1,024 running rows, steady decode, page size 16: the loop's plan,
   commit and delivery of events; building the packet is the executor's and not in it. Of requests
   that are streamed, each token an event, and of those whose tokens come together at the end.
2. The p99 of ``plan()`` with 10,000 requests queued behind a full batch, against an empty queue.
3. Tokens forwarded for a group of 16 equal prompts of 500 tokens.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.common import describe_run
from dovetail.cache.groups import PagedGroup
from dovetail.cache.ledger import KVLedger
from dovetail.config.resolve import options_from, resolve
from dovetail.core.loop import EngineLoop
from dovetail.core.mailbox import Inbox, Outbox
from dovetail.exec.fake import FakeExecutor
from dovetail.sched.scheduler import Scheduler
from dovetail.wire.control import Admit
from dovetail.wire.request import Request, SamplingParams

CONTEXT_LEN = 2048


class HostLoop:
    """The engine's host half on a fake executor."""

    def __init__(self, *, max_running: int, depth: int = 1) -> None:
        self.config = resolve(
            options_from(
                {
                    "max_running": max_running,
                    "num_pages": max_running * 16 + 128,
                    "context_len": CONTEXT_LEN,
                    "depth": depth,
                }
            )
        )
        ledger = KVLedger((PagedGroup(name="paged", page_size=16),), (self.config.num_pages,))
        self.scheduler = Scheduler(self.config, ledger, token_bytes=lambda token_id: b"x")
        self.executor = FakeExecutor(
            lambda token_ids: 7, num_slots=max_running, page_size=self.config.page_size
        )
        self.loop = EngineLoop(
            self.scheduler, self.executor, inbox=Inbox(), outbox=Outbox(), depth=depth
        )
        self._num_requests = 0

    def add(self, prompt: list[int], *, max_new_tokens: int, is_streamed: bool = True) -> None:
        """Queue a request whose events go nowhere."""
        request = Request(
            request_id=self._num_requests,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
            seed=0,
            is_streamed=is_streamed,
        )
        self._num_requests += 1
        self.loop.outbox.open(request.request_id, lambda news: None)
        self.loop.inbox.put(Admit(request))


def step_milliseconds(num_rows: int, *, is_streamed: bool) -> dict[str, float]:
    """Return the median, mean and p99 of a steady decode step, executor time taken out."""
    host = HostLoop(max_running=num_rows)
    rng = np.random.default_rng(0)
    for i in range(num_rows):  # of several lengths: pages do not all end together
        host.add(
            rng.integers(3, 2000, 24 + i % 16).tolist(), max_new_tokens=220, is_streamed=is_streamed
        )
    while host.scheduler.num_waiting or host.scheduler.num_running < num_rows:
        host.loop.step()
    in_executor = 0.0
    submit = host.executor.submit

    def timed_submit(plan):
        nonlocal in_executor
        started = time.perf_counter()
        pending = submit(plan)
        in_executor += time.perf_counter() - started
        return pending

    host.executor.submit = timed_submit
    seconds = []
    for _ in range(150):
        in_executor, started = 0.0, time.perf_counter()
        host.loop.step()
        seconds.append(time.perf_counter() - started - in_executor)
    return {
        "median_ms": round(1e3 * statistics.median(seconds), 3),
        "mean_ms": round(1e3 * statistics.fmean(seconds), 3),
        "p99_ms": round(1e3 * float(np.quantile(seconds, 0.99)), 3),
    }


def plan_p99_milliseconds(num_queued: int, *, num_rows: int = 64) -> tuple[float, float]:
    """Return p99 and median of ``plan()`` while requests end and others start."""
    host = HostLoop(max_running=num_rows)
    rng = np.random.default_rng(1)
    for _ in range(num_queued + num_rows):
        host.add(rng.integers(3, 2000, 24).tolist(), max_new_tokens=int(rng.integers(8, 40)))
    host.loop.step()
    plan, seconds = host.scheduler.plan, []

    def timed_plan():
        started = time.perf_counter()
        result = plan()
        seconds.append(time.perf_counter() - started)
        return result

    host.scheduler.plan = timed_plan
    for _ in range(400):
        if num_queued == 0:  # as many arrive as end, but none waits
            missing = num_rows - host.scheduler.num_running - host.scheduler.num_waiting
            for _ in range(missing):
                host.add(
                    rng.integers(3, 2000, 24).tolist(), max_new_tokens=int(rng.integers(8, 40))
                )
        host.loop.step()
    quantiles = np.quantile(seconds, [0.99, 0.5])
    return 1e3 * float(quantiles[0]), 1e3 * float(quantiles[1])


def group_tokens(*, depth: int) -> int:
    """Return the tokens forwarded for 16 equal prompts of 500 tokens, one output token each."""
    host = HostLoop(max_running=32, depth=depth)
    prompt = np.random.default_rng(2).integers(3, 2000, 500).tolist()
    for _ in range(16):
        host.add(prompt, max_new_tokens=1)
    num_tokens = 0
    submit = host.executor.submit

    def counting_submit(plan):
        nonlocal num_tokens
        num_tokens += plan.num_tokens
        return submit(plan)

    host.executor.submit = counting_submit
    host.loop.step()
    while host.scheduler.num_open or host.loop.inflight:
        host.loop.step()
    return num_tokens


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(
        description="What the host costs, on an executor that computes nothing."
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines = [
        {"work": f"host loop, steady decode{how}", "batch": rows, "unit": "ms a step"}
        | (found := step_milliseconds(rows, is_streamed=is_streamed))
        | {"value": found["median_ms"]}
        for how, is_streamed in (("", True), (", tokens at the end", False))
        for rows in (16, 64, 256, 1024)
    ]
    pairs = [(plan_p99_milliseconds(0), plan_p99_milliseconds(10_000)) for _ in range(5)]
    empty, full = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    lines.append(
        {
            "work": "p99 of plan(), 10,000 queued against none, 64 rows",
            "batch": 64,
            "unit": "ratio",
            "value": round(full / empty, 3),
            "p99_ms": {"empty": round(empty, 3), "queued": round(full, 3)},
            "median_ms": {
                name: round(statistics.median(pair[i][1] for pair in pairs), 3)
                for i, name in enumerate(("empty", "queued"))
            },
        }
    )
    lines += [
        {
            "work": f"group of 16 equal prompts of 500 tokens, depth {depth}",
            "batch": 16,
            "unit": "tokens forwarded",
            "value": group_tokens(depth=depth),
            "floor": 500 + 15 * (500 - 496),
        }
        for depth in (0, 1, 2)
    ]
    run = describe_run(sys.argv)
    text = "\n".join(
        json.dumps({"shape": "host only", "floor": None, **line, **run}) for line in lines
    )
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
