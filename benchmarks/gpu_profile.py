"""Where the time of a work goes on one GPU: by kind of step, and by kernel.

    python -m benchmarks.gpu_profile 30b-a3b --works b c a --at 4 12 --out profile.jsonl

Runs works of ``benchmarks.gpu`` and looks into them for some tenths of a second: into a at some
moments, into b when all rows decode, into c from its beginning on.
"""

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import add_line, describe_run
from benchmarks.gpu import BATCHES, LONG, SHAPES, params, prompts_of_b, prompts_of_c, work_a
from benchmarks.gpu_rates import gpu_facts
from dovetail.core.engine import Engine
from dovetail.sched.plan import FROM_DEVICE, StepPlan

NUM_KERNELS = 14
SETTLED = 16
"""Decode steps that have passed when a look is taken at them."""

C_SECONDS = 2.0
"""More than work c takes."""

LONGEST_PREFILL_S = 60.0
"""More than the prompts of work b take."""


class StepLog:
    """What was committed when."""

    def __init__(self, engine: Engine) -> None:
        scheduler: Any = engine.port.scheduler
        commit = scheduler.commit
        self.steps: list[tuple[float, int, int]] = []

        def logged(plan: StepPlan, result: Any) -> Any:
            num_decode = int((plan.rows.start == FROM_DEVICE).sum())
            self.steps.append((time.perf_counter(), num_decode, plan.num_tokens - num_decode))
            return commit(plan, result)

        scheduler.commit = logged

    def wait_for_decode(self) -> None:
        """Return when the newest steps were decode steps alone.

        Raises:
            TimeoutError: they never were.
        """
        deadline = time.monotonic() + LONGEST_PREFILL_S
        while len(self.steps) < SETTLED or any(tokens for _, _, tokens in self.steps[-SETTLED:]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {SETTLED} decode steps in a row came")
            time.sleep(1e-3)

    def summary(self) -> list[dict[str, object]]:
        """Return counts and seconds of steps by kind: decode rows, tokens of prompts."""
        kinds: dict[str, Counter[str]] = {}
        for (before, _, _), (at, rows, tokens) in zip(self.steps, self.steps[1:], strict=False):
            if tokens:
                kind = f"with {_bucket(tokens, 1024)} prompt tokens"
            else:
                kind = f"decode, {_bucket(rows, 64)} rows"
            found = kinds.setdefault(kind, Counter())
            found.update(steps=1, us=round(1e6 * (at - before)), rows=rows, tokens=tokens)
        return [
            {"kind": kind, "steps": c["steps"], "s": round(c["us"] / 1e6, 3),
             "ms_a_step": round(c["us"] / 1e3 / c["steps"], 2),
             "rows": round(c["rows"] / c["steps"], 1), "tokens": round(c["tokens"] / c["steps"])}
            for kind, c in sorted(kinds.items(), key=lambda item: -item[1]["us"])
        ]  # fmt: skip


def _bucket(number: int, size: int) -> str:
    low = (number - 1) // size * size
    return f"{low + 1} to {low + size}"


def kernels_during(seconds: float) -> dict[str, object]:
    """Return the kernels of the next seconds, and the share of time in which none ran.

    Nothing is seen of graphs that were launched before: take seconds for several steps.

    Raises:
        RuntimeError: the GPU was seen to do next to nothing, which no work here lets it.
    """
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        time.sleep(seconds)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    spans, times, counts = [], Counter[str](), Counter[str]()
    for event in profiler.profiler.kineto_results.events():
        if event.device_type().name != "CUDA" or not event.duration_ns():
            continue
        spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        times[event.name()[:70]] += event.duration_ns()
        counts[event.name()[:70]] += 1
    spans.sort()
    busy, end = 0, 0
    for begin, stop in spans:
        busy += max(0, stop - max(begin, end))
        end = max(end, stop)
    window = (spans[-1][1] - spans[0][0]) if spans else 1
    if busy < window / 10:
        raise RuntimeError(f"{seconds:g} s were too short to see a step: say --window")
    table = [
        {"kernel": name, "share": round(ns / window, 4), "calls": counts[name],
         "us_a_call": round(ns / 1e3 / counts[name], 2)}
        for name, ns in times.most_common(NUM_KERNELS)
    ]  # fmt: skip
    return {"idle": round(1 - busy / window, 4), "window_s": window / 1e9, "kernels": table}


def looks(
    engine: Engine,
    prompts: list[list[int]],
    lens: Sequence[int],
    waits: Sequence[Callable[[], None]],
    window: float,
) -> list[dict[str, object]]:
    """Run requests, and return what ran on the GPU behind each of some waits."""
    work = threading.Thread(target=engine.generate, args=(prompts, [params(n) for n in lens]))
    work.start()
    found: list[dict[str, object]] = []
    for wait in waits:
        wait()
        found.append(kernels_during(window))
    work.join()
    return found


def lines_of(engine: Engine, args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield what is found in each work."""
    log = StepLog(engine)
    for work in args.works:
        if work == "b":
            for batch in args.batches:
                log.steps.clear()
                prompts, lens = prompts_of_b(batch), [LONG] * batch
                [found] = looks(engine, prompts, lens, [log.wait_for_decode], args.window)
                yield {"work": f"b: kernels, {batch} rows", "batch": batch, **found}
        elif work == "c":
            prompts = prompts_of_c()
            engine.generate(prompts, params(1))  # compiles
            [found] = looks(engine, prompts, [1] * len(prompts), [lambda: None], C_SECONDS)
            yield {"work": "c: kernels", "batch": len(prompts), **found}
        else:
            yield from _lines_of_a(engine, log, args)


def _lines_of_a(
    engine: Engine, log: StepLog, args: argparse.Namespace
) -> Iterator[dict[str, object]]:
    log.steps.clear()
    prompts, lens = work_a()
    started = time.perf_counter()

    def until(at: float) -> None:
        time.sleep(max(0.0, started + at - time.perf_counter()))

    found = looks(engine, prompts, lens, [partial(until, at) for at in args.at], args.window)
    taken = round(time.perf_counter() - started, 3)
    for at, kernels in zip(args.at, found, strict=True):
        yield {"work": f"a: kernels at {at:g} s", **kernels}
    yield {"work": "a: steps", "value": taken, "unit": "s", "steps": log.summary()}


def main() -> None:
    """Run and print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("--works", nargs="+", default=["b", "c", "a"], choices=list("abc"))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="of b")
    parser.add_argument("--at", nargs="+", type=float, default=[3.0, 8.0], help="seconds of a")
    parser.add_argument("--window", type=float, default=0.4, help="seconds of a look (0.4)")
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--kv-memory", default="60GiB")
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine = Engine(
        SHAPES / args.shape, device="cuda", load_format="dummy", prefix_cache=False,
        max_running=args.max_running, kv_memory=args.kv_memory, context_len=4352,
        chunk_size=args.chunk_size,
    )  # fmt: skip
    command = ["-m", "benchmarks.gpu_profile", *sys.argv[1:]]
    about = describe_run(command, "triton", gpu=gpu_facts())
    about |= {"device": torch.cuda.get_device_name(), "shape": args.shape}
    with engine:
        engine.generate([[5] * 40], params(4))  # compiles what is left
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True):
            engine.generate([[5] * 40], params(4))  # the first profile of a process sees no graph
        for line in lines_of(engine, args):
            print(json.dumps(line, indent=1), flush=True)
            add_line(args.out, line | about)


if __name__ == "__main__":
    main()
