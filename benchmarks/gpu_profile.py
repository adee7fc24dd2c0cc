"""Where the time of a work goes on one GPU: by kind of step, and by kernel.

    python -m benchmarks.gpu_profile 30b-a3b --at 4 12 --out profile.jsonl

Runs work a of ``benchmarks.gpu`` and looks into it for some tenths of a second at some moments.
"""

import argparse
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import describe_run
from benchmarks.gpu import SHAPES, params, work_a
from benchmarks.gpu_rates import gpu_facts
from dovetail.core.engine import Engine
from dovetail.sched.plan import FROM_DEVICE, StepPlan

NUM_KERNELS = 14


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
    """Return the kernels of the next seconds, and the share of time in which none ran."""
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
    table = [
        {"kernel": name, "share": round(ns / window, 4), "calls": counts[name],
         "us_a_call": round(ns / 1e3 / counts[name], 2)}
        for name, ns in times.most_common(NUM_KERNELS)
    ]  # fmt: skip
    return {"idle": round(1 - busy / window, 4), "window_s": window / 1e9, "kernels": table}


def main() -> None:
    """Run and print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("--at", nargs="+", type=float, default=[3.0, 8.0], help="seconds")
    parser.add_argument("--window", type=float, default=0.3)
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
    about = describe_run(["-m", "benchmarks.gpu_profile", args.shape], "triton", gpu=gpu_facts())
    about |= {"device": torch.cuda.get_device_name(), "shape": args.shape}
    lines: list[dict[str, object]] = []
    with engine:
        engine.generate([[5] * 40], params(4))  # compiles what is left
        log = StepLog(engine)
        prompts, lens = work_a()
        sampling = [params(n) for n in lens]
        started = time.perf_counter()
        work = threading.Thread(target=engine.generate, args=(prompts, sampling))
        work.start()
        for at in args.at:
            time.sleep(max(0.0, started + at - time.perf_counter()))
            lines.append({"work": f"a: kernels at {at:g} s"} | kernels_during(args.window))
        work.join()
        taken = round(time.perf_counter() - started, 3)
        lines.append({"work": "a: steps", "value": taken, "unit": "s", "steps": log.summary()})
    for line in lines:
        text = json.dumps(line | about)
        print(json.dumps(line, indent=1), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
