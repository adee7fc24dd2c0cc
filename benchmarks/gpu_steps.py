"""What a step costs beside its kernels, on one GPU: copies, waits, allocations, host time.

    python -m benchmarks.gpu_steps [FOLDER] [--rows N] [--capture COLUMN] [--out FILE.jsonl]

1. Copies between host and device, waiting calls and allocations a step, of 200 steady decode steps
   and of 40 steps that each take a new prompt, as CUPTI saw them.
2. Host microseconds of building and sending the packet, and of a whole step without its wait
   for a result.
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import add_line, describe_run
from benchmarks.gpu_rates import gpu_facts
from benchmarks.stepped import SteppedEngine
from dovetail.exec.cuda.calls import DriverCalls
from dovetail.exec.cuda.device import CudaEvent, CudaLane
from dovetail.exec.readback import payload_layout

STEADY, PROMPTS, TIMED = 200, 40, 600
WAITING = re.compile(r"cu\w*(Synchronize|MemcpyHtoD|MemcpyDtoH)(_v\d+)?|cudaMemcpy|cudaMemset")
WAITED = re.compile(r"(Event|Stream|Context) Sync\w*")
ALLOCATING = re.compile(r"cu(da)?(Malloc|Free|HostAlloc|FreeHost|MemAlloc|MemFree|HostRegister)\w*")


def count_calls(run: Callable[[], object]) -> Counter[str]:
    """Run, and return what the driver did meanwhile.

    The names are ``HtoD``, ``DtoH``, ``pageable`` (of these), ``packets`` (that were fetched),
    ``waiting calls`` and ``allocating calls`` (of the runtime: most calls of the driver are not
    seen), ``waits`` (by whoever's call), ``events asked for``, ``allocations`` (of PyTorch's
    allocator), ``graph launches`` and ``kernel launches``; waits and calls stand under their own
    names, too. The end of the count waits once.
    """
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    watch = _ExperimentalConfig(enable_cuda_sync_events=True)
    found: Counter[str] = Counter()
    ask = DriverCalls.has_happened

    def ask_and_count(self: DriverCalls, event: int) -> bool:
        found["events asked for"] += 1
        return ask(self, event)

    with (
        mock.patch.object(DriverCalls, "has_happened", ask_and_count),
        profile(activities=activities, acc_events=True, experimental_config=watch) as profiler,
    ):
        run()
        found["allocations"] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        found.update(_kinds(event.name()))
    # CUPTI reports as waits for an event those calls, too, that ask whether it has happened.
    found["waits"] -= found["events asked for"]
    return found


def _kinds(name: str) -> list[str]:
    """Return what an event of the profiler counts as."""
    if name.startswith("Memcpy"):
        kinds = [way for way in ("HtoD", "DtoH") if way in name]
        return kinds + (["pageable"] if kinds and "Pageable" in name else [])
    if name.startswith("_fetch_kernel"):
        return ["packets"]
    if WAITED.fullmatch(name):
        return ["waits", name]
    if WAITING.fullmatch(name):
        return ["waiting calls", name]
    if ALLOCATING.fullmatch(name):
        return ["allocating calls", name]
    if "GraphLaunch" in name:
        return ["graph launches"]
    return ["kernel launches"] if "LaunchKernel" in name else []


def steady_counts(engine: SteppedEngine, num_steps: int = STEADY) -> Counter[str]:
    """Return the counts of steady decode steps; the engine has nothing else to do."""

    def run() -> None:
        for _ in range(num_steps):
            engine.loop.step()

    return count_calls(run)


def prompt_counts(
    engine: SteppedEngine,
    num_steps: int = PROMPTS,
    *,
    num_prompts: int = 1,
    prompt_len: int = 100,
) -> Counter[str]:
    """Return the counts of steps that each take new prompts, beside the rows that decode."""

    def run() -> None:
        for i in range(num_steps * num_prompts):
            engine.add([(11 * i + j) % 1000 + 3 for j in range(prompt_len)], max_new_tokens=1)
            if (i + 1) % num_prompts == 0:
                engine.loop.step()

    return count_calls(run)


class Stopwatch:
    """Notes the seconds of some calls until it is left."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._patches = ExitStack()

    def __enter__(self) -> "Stopwatch":
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time a method from now on."""
        original = getattr(owner, method)
        times = self.seconds.setdefault(name, [])

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                times.append(time.perf_counter() - started)

        self._patches.enter_context(mock.patch.object(owner, method, timed))

    def us(self, name: str) -> float:
        """Return the median in microseconds."""
        return round(1e6 * statistics.median(self.seconds[name]), 1)

    def spread_us(self, name: str) -> list[float]:
        """Return the microseconds that a tenth, half and nine tenths of the calls do not exceed."""
        tenths = statistics.quantiles(self.seconds[name], n=10)
        return [round(1e6 * tenths[i], 1) for i in (0, 4, 8)]


def host_times(engine: SteppedEngine, num_steps: int = TIMED) -> dict[str, Any]:
    """Return microseconds of the parts of a steady step, medians; ``host`` has no wait.

    Parts of ``submit`` come from steps of their own: to watch a call costs it a microsecond or two.
    """
    executor: Any = engine.executor
    runner, host = executor._runner, list[float]()
    with Stopwatch() as watch:
        for owner, method, name in (
            (engine.scheduler, "plan", "plan"),
            (engine.scheduler, "commit", "commit"),
            (CudaEvent, "wait", "wait"),
            (executor, "submit", "submit"),
            (executor, "_stage", "packet"),
        ):
            watch.watch(owner, method, name)
        for _ in range(num_steps):
            num_waits, started = len(watch.seconds["wait"]), time.perf_counter()
            engine.loop.step()
            taken = time.perf_counter() - started
            host.append(taken - sum(watch.seconds["wait"][num_waits:]))
    watch.seconds["host"] = host
    parts: dict[str, Any] = {name: watch.us(name) for name in watch.seconds}
    parts |= {f"{name}, spread": watch.spread_us(name) for name in ("packet", "host")}
    with Stopwatch() as watch:
        for owner, method, name in (
            (executor._staging, "acquire", "packet: block"),
            (executor._writer, "write", "packet: write"),
            (runner, "run", "run"),
            (runner._tenants, "are_shaped", "run: look at rows"),
            (runner._graphs, "replay", "run: replay"),
            (CudaLane, "record", "an event recorded"),
            (CudaLane, "wait", "an event waited for"),
            (CudaLane, "download", "download: copy"),
        ):
            watch.watch(owner, method, name)
        for _ in range(num_steps):
            engine.loop.step()
    parts |= {name: watch.us(name) for name in watch.seconds}
    return parts | packet_alone_us(engine)


def packet_alone_us(engine: SteppedEngine, calls: int = 50) -> dict[str, float]:
    """Return microseconds of the newest plan's packet and of its parts, each in a loop."""
    executor: Any = engine.executor
    plan, result = engine.loop.inflight[-1].plan, executor._results._blocks[0]
    layout, staging = payload_layout(plan, executor._columns), executor._staging
    words = np.zeros(executor._schema.num_bytes // 4, dtype=np.int32)
    parts: dict[str, Callable[[], object]] = {
        "packet": lambda: staging.release(executor._stage(plan, staging._next + 1, result, layout)),
        "packet: block": lambda: staging.release(staging.acquire()),
        "packet: write": lambda: executor._writer.write(
            plan, words, number=1, result=0, copies=layout.copies
        ),
    }
    found: dict[str, float] = {}
    torch.cuda.synchronize()  # all packets that were written have been taken
    turn = staging._next
    for name, run in parts.items():
        started = time.perf_counter()
        for _ in range(calls):
            run()
        taken = time.perf_counter() - started
        found[f"{name}, again and again"] = round(1e6 * taken / calls, 1)
    staging._next = turn  # for none of these packets there was a step
    return found


def lines(engine: SteppedEngine, rows: int) -> list[dict[str, Any]]:
    """Measure, and return the lines."""
    new_tokens = 128 + 2 * TIMED + 2 * STEADY + 2 * PROMPTS
    engine.fill(rows, 128, max_new_tokens=new_tokens)
    parts = host_times(engine)  # first: who has profiled once launches more slowly
    found: list[dict[str, Any]] = []
    for name, counts, num_steps in (
        ("steady decode", steady_counts(engine), STEADY),
        ("a new prompt each", prompt_counts(engine), PROMPTS),
    ):
        a_step = {kind: round(number / num_steps, 3) for kind, number in sorted(counts.items())}
        copies = a_step.get("HtoD", 0) + a_step.get("DtoH", 0)
        found.append(
            {"work": f"copies a step: {name}", "value": copies, "unit": "copies"}
            | {"a_step": a_step}
        )
    for name, value in (("packet built and sent", "packet"), ("host time", "host")):
        found.append({"work": f"step: {name}", "value": parts[value], "unit": "us", "us": parts})
    engine.executor.close()
    return found


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="(the embedded model's shape)")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--capture", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = {} if args.folder is None else {"model": str(args.folder)}
    engine = SteppedEngine(
        **model, device="cuda", max_running=args.rows + 8, prefix_cache=False, context_len=2048,
        kv_memory="60GiB", chunk_size=2048 - args.rows - 8, capture=tuple(args.capture),
    )  # fmt: skip
    shape = "tiny-moe" if args.folder is None else args.folder.name
    about = describe_run(
        ["-m", "benchmarks.gpu_steps", *map(str, sys.argv[1:])], "triton", gpu=gpu_facts()
    )
    about |= {"device": torch.cuda.get_device_name(), "shape": shape, "batch": args.rows}
    with engine.executor.adopt_thread():
        measured = lines(engine, args.rows)
    for part in measured:
        line = {"floor": None, "capture": args.capture, **about, **part}
        print(json.dumps(line), flush=True)
        add_line(args.out, line)


if __name__ == "__main__":
    main()
