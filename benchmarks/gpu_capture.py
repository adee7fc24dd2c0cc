"""What the capture of expert rows costs on one GPU.

    python -m benchmarks.gpu_capture 30b-a3b --out capture.jsonl
    python -m benchmarks.gpu_capture 30b-a3b --works b --steps-b 64 --out capture.jsonl
    python -m benchmarks.gpu_capture --snapshot --out capture.jsonl

1. Works a and b of ``benchmarks.gpu`` with capture off, and on with all rows returned, in turn in
   one process: the mean ratio of their times, with its 95 % interval. Work b is a batch of 256 rows
   of ``--steps-b`` tokens, by default the longer leg of ``benchmarks.gpu``. Both engines use one
   set of weights and one pool of keys and values, for they never run at once; so neither is short
   of pages. Beside each ratio stand the steps of both, how many held read-outs, how many nothing
   else, the bytes read, the milliseconds from the last forward's result to the answer, and host
   microseconds a step.
2. ``--snapshot``: packing a step's rows (256 tokens, 40 layers, 8 of int32, with their places:
   329,728 bytes) into the step's block, beside its copy to the host and a copy on the device; and
   the read-out of as many rows by page table. On a stream, launched by the host, and in a graph.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import add_line, describe_run
from benchmarks.gpu import SHAPES, prompts_of_b, seconds, work_a
from benchmarks.gpu_rates import gpu_facts, graph_us, stream_us
from dovetail.capture.sidecar import Sidecar
from dovetail.config.capture import ColumnSpec
from dovetail.core.engine import Engine
from dovetail.core.local import LocalEngine
from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.cuda.rows import RowCopies
from dovetail.exec.kv import KVStore
from dovetail.exec.packet import PacketSchema, PacketWriter, packet_schema
from dovetail.exec.readback import PayloadLayout, PayloadSlice, payload_layout
from dovetail.models.registry import build_model
from dovetail.sched.builder import PlanBuilder
from dovetail.sched.plan import Readout, StepPlan

WARM = 256
"""Requests of a work that come before its pairs, and do not count."""

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)
"""Student's t that 95 % stay below, both ways, for 1, 2, 3, ... degrees of freedom."""

COLUMNS = ("experts",)
TOKENS, LAYERS, TOP_K, PAGE_SIZE = 256, 40, 8, 16
SNAPSHOT_BYTES = 329_728


class SharedMemory:
    """Weights, keys and values of the first engine, lent to the second."""

    def __init__(self) -> None:
        self._models: list[object] = []
        self._pools: list[Tensor] = []

    def build_model(self, *args: object, **kwargs: object) -> object:
        """Build the model once."""
        if not self._models:
            self._models.append(build_model(*args, **kwargs))  # type: ignore[arg-type]
        return self._models[0]

    def fill_store(
        self, store: KVStore, config: Any, device: Any, fill: Callable[..., None]
    ) -> None:
        """Make a ``KVStore`` whose keys and values are those of the first."""
        pools = iter(self._pools)

        def zeros(tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            lent = next(pools, None)
            if lent is None:
                return device.memory.zeros(tag, shape, dtype)
            assert lent.shape == shape and lent.dtype == dtype
            return lent

        lender = SimpleNamespace(zeros=zeros)
        fill(store, config, SimpleNamespace(memory=lender, register_state=device.register_state))
        self._pools = self._pools or [store.k_LCKD, store.v_LCKD]


def engines_of(args: argparse.Namespace) -> tuple[Engine, Engine]:
    """Return an engine without capture and one with it; two sets of memory would not fit."""
    shared, fill = SharedMemory(), KVStore.__init__

    def fill_store(store: KVStore, config: Any, device: Any) -> None:
        shared.fill_store(store, config, device, fill)

    with (
        mock.patch("dovetail.core.local.build_model", shared.build_model),
        mock.patch.object(KVStore, "__init__", fill_store),
    ):
        off, on = (
            Engine(
                SHAPES / args.shape, device="cuda", load_format="dummy", prefix_cache=False,
                max_running=args.max_running, num_pages=args.pages, context_len=2176,
                chunk_size=8192, capture=columns,
            )
            for columns in ((), COLUMNS)
        )  # fmt: skip
    return off, on


class Meter:
    """Counts an engine's steps, and times the parts of its loop. One run at a time."""

    def __init__(self, engine: Engine) -> None:
        port = engine.port
        assert isinstance(port, LocalEngine)
        self._columns = engine.config.columns
        self._patches = ExitStack()
        self.start()
        for owner, method, name in (
            (port.scheduler, "plan", "plan"),
            (port.scheduler, "commit", "commit"),
            (port.loop.executor, "submit", "submit"),
            (port.loop.outbox, "put", "events"),
        ):
            self._patches.enter_context(
                mock.patch.object(owner, method, self._timed(getattr(owner, method), name))
            )

    def start(self) -> None:
        """Begin anew."""
        self.counts = dict.fromkeys(("steps", "with_readouts", "readouts_alone", "readouts"), 0)
        self.num_bytes = 0
        self.ended_at = 0.0
        self._seconds: dict[str, list[float]] = {}

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            found = call(*args)
            self._seconds.setdefault(name, []).append(time.perf_counter() - started)
            if name == "submit":
                self._count(args[0])
            if name == "commit" and len(args[0].rows):
                self.ended_at = started
            return found

        return timed

    def _count(self, plan: StepPlan) -> None:
        self.counts["steps"] += 1
        if plan.readouts:
            self.counts["with_readouts"] += 1
            self.counts["readouts_alone"] += not len(plan.rows)
            self.counts["readouts"] += len(plan.readouts)
            self.num_bytes += payload_layout(plan, self._columns).readout_bytes

    def found(self, finished: float) -> dict[str, object]:
        """Return what a run that is finished took."""
        host = {
            name: [round(1e6 * statistics.median(times), 1), round(1e3 * sum(times), 2)]
            for name, times in self._seconds.items()
        }
        return {
            **self.counts,
            "bytes": self.num_bytes,
            "drain_ms": round(1e3 * (finished - self.ended_at), 2),
            "us_a_step_and_ms": host,
        }


class Side:
    """One of the two that are compared."""

    def __init__(self, engine: Engine, capture: tuple[str, ...]) -> None:
        self._engine, self._capture, self._meter = engine, capture, Meter(engine)
        self.runs: list[dict[str, object]] = []

    def run(self, prompts: list[list[int]], lens: list[int]) -> float:
        """Return the seconds of a run."""
        gc.collect()  # not while the clock runs
        self._meter.start()
        taken = seconds(self._engine, prompts, lens, self._capture)
        self.runs.append(self._meter.found(time.perf_counter()))
        return taken


def interleaved(
    off: Callable[[], float], on: Callable[[], float], repeats: int
) -> list[tuple[float, float]]:
    """Return pairs of seconds; who comes first alternates."""
    pairs = []
    for turn in range(repeats):
        if turn % 2:
            with_rows = on()
            without = off()
        else:
            without = off()
            with_rows = on()
        pairs.append((without, with_rows))
        print([round(x, 4) for x in pairs[-1]], flush=True)
    return pairs


def ratio_and_interval(pairs: list[tuple[float, float]]) -> dict[str, object]:
    """Return the rate with capture over that without: the pairs' mean, 95 % by Student's t.

    Few pairs make it wide, as they should: to draw from four again and again would not.
    """
    off_N, on_N = np.array(pairs).T
    ratios = off_N / on_N
    mean = float(ratios.mean())
    freedom = len(pairs) - 1
    half = T_95[min(freedom, len(T_95)) - 1] * float(ratios.std(ddof=1)) / len(pairs) ** 0.5
    return {
        "value": round(mean, 5),
        "interval": [round(mean - half, 5), round(mean + half, 5)],
        "median_of_pairs": round(float(np.median(ratios)), 5),
        "seconds": [[round(float(x), 4) for x in pair] for pair in pairs],
    }


def works_of(args: argparse.Namespace) -> dict[str, tuple[list[list[int]], list[int], int]]:
    """Return prompts, output lengths and repeats of each work."""
    prompts, lens = work_a()
    prompts, lens = prompts[: args.requests], [min(n, args.cut) for n in lens[: args.requests]]
    batch = prompts_of_b(256)
    works = {
        "a": (prompts, lens, args.repeats_a),
        "b": (batch, [args.steps_b] * len(batch), args.repeats_b),
    }
    return {work: works[work] for work in args.works}


def costs(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the lines of the works, each when it is known."""
    started = time.perf_counter()
    off_engine, on_engine = engines_of(args)
    print("started", round(time.perf_counter() - started, 1), flush=True)
    with off_engine, on_engine:
        off, on = Side(off_engine, ()), Side(on_engine, COLUMNS)
        gc.collect()
        gc.freeze()  # what stays for good is not looked at again
        for work, (prompts, lens, repeats) in works_of(args).items():
            for side in (off, on):  # kernels are compiled, memory is found
                side.run(prompts[:WARM], [min(n, 8) for n in lens[:WARM]])
                side.runs.clear()
            pairs = interleaved(
                lambda asked=prompts, n=lens: off.run(asked, n),
                lambda asked=prompts, n=lens: on.run(asked, n),
                repeats,
            )
            line = {"work": f"capture on and returned, work {work}", "batch": len(prompts)}
            line |= {"shape": args.shape, "unit": "rate of off", "floor": 1.0}
            line |= {"num_tokens": sum(lens), "max_running": args.max_running}
            line |= ratio_and_interval(pairs) | {"off": off.runs[-1], "on": on.runs[-1]}
            line |= {"drains_ms": [[run["drain_ms"] for run in side.runs] for side in (off, on)]}
            print(json.dumps(line), flush=True)
            yield line


def snapshot() -> Iterator[dict[str, object]]:
    """Yield the lines of the snapshot and of its copies."""
    device = CudaDevice()
    spec = ColumnSpec(np.dtype(np.int32), (LAYERS, TOP_K), -1)
    num_pages, slots_of_page = 8192, torch.arange(PAGE_SIZE, device="cuda")
    rows = torch.zeros(num_pages * PAGE_SIZE + 1, LAYERS, TOP_K, dtype=torch.int32, device="cuda")
    columns = {"rows": spec}
    config: Any = SimpleNamespace(
        max_running=TOKENS, max_page_writes=320, max_step_tokens=TOKENS, columns=columns,
        page_size=PAGE_SIZE, max_payload_bytes=2**22,
    )  # fmt: skip
    schema = packet_schema(config)
    table = torch.randperm(num_pages, device="cuda")[: TOKENS * 16].view(TOKENS, 16).int()
    tables: Any = SimpleNamespace(page_table_SB=table)
    packet, layout = _packet(config, schema)
    sidecars = {"rows": Sidecar(spec, rows)}
    copies = RowCopies(packet, schema, tables, sidecars, page_size=PAGE_SIZE)
    kv_slots = (table[:, 0].long() * PAGE_SIZE + slots_of_page[3])[:TOKENS]
    block, host = device.device_block(SNAPSHOT_BYTES), device.host_block(SNAPSHOT_BYTES)
    other, num_bytes = torch.empty_like(block), TOKENS * LAYERS * TOP_K * 4
    places = {
        "rows": PayloadSlice(0, spec.dtype, (TOKENS, LAYERS, TOP_K)),
        "kv_slots": PayloadSlice(num_bytes, np.dtype(np.int64), (TOKENS,)),
    }
    packed = block[:num_bytes].view(torch.int32).view(TOKENS, LAYERS, TOP_K)

    def by_torch() -> None:
        packed.copy_(rows.index_select(0, kv_slots))
        block[num_bytes:].view(torch.int64).copy_(kv_slots)

    parts: dict[str, Callable[[], object]] = {
        "snapshot packed": lambda: copies.snapshot(kv_slots, places, block),
        "snapshot packed by torch": by_torch,
        "snapshot's bytes copied on the device": lambda: other.copy_(block),
        "snapshot copied to the host": lambda: host.copy_(block, non_blocking=True),
        "as many rows read out, 16 sequences": lambda: copies.read_out(layout, block),
    }
    for work, run in parts.items():
        times = [stream_us(run, calls=200) for _ in range(5)]
        line: dict[str, object] = {"work": work}
        line |= {"shape": f"{TOKENS} tokens x {LAYERS} layers x {TOP_K}, int32"}
        line |= {"batch": TOKENS, "value": round(min(times), 2), "unit": "us"}
        line |= {"median": round(statistics.median(times), 2), "bytes": SNAPSHOT_BYTES}
        if "host" not in work:
            line["graph_us"] = round(graph_us(lambda _, run=run: run(), calls=200), 2)
        print(json.dumps(line), flush=True)
        yield line
    device.close()


def _packet(config: Any, schema: PacketSchema) -> tuple[Tensor, PayloadLayout]:
    """Return a packet, on the device, that reads out 16 rows of each of 16 sequences."""
    readouts = tuple(Readout(slot, 1, 0, PAGE_SIZE, ("rows",)) for slot in range(16))
    plan = replace(PlanBuilder(config).build(step_id=0, epoch=0), readouts=readouts)
    layout = payload_layout(plan, config.columns)
    words = np.zeros(schema.num_bytes // 4, dtype=np.int32)
    PacketWriter(schema).write(plan, words, number=1, result=0, copies=layout.copies)
    return torch.from_numpy(words).cuda(), layout


def main() -> None:
    """Measure and write lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", nargs="?", default="30b-a3b")
    parser.add_argument("--snapshot", action="store_true", help="only what a snapshot costs")
    parser.add_argument("--works", nargs="+", default=["b", "a"], choices=list("ab"))
    parser.add_argument("--requests", type=int, default=512, help="of work a (512)")
    parser.add_argument("--cut", type=int, default=1024, help="most output tokens of one (1024)")
    parser.add_argument("--repeats-a", type=int, default=4)
    parser.add_argument("--repeats-b", type=int, default=12)
    parser.add_argument("--steps-b", type=int, default=272, help="tokens a row of work b (272)")
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--pages", type=int, default=37_500, help="of 16 tokens, shared (37,500)")
    parser.add_argument("--out", type=Path, help="lines are added to this file, too")
    args = parser.parse_args()
    if min(args.repeats_a, args.repeats_b) < 2:
        parser.error("--repeats-a and --repeats-b: at least 2, or there is no interval")
    about = describe_run(["-m", "benchmarks.gpu_capture", *sys.argv[1:]], "triton", gpu=gpu_facts())
    about |= {"device": torch.cuda.get_device_name()}
    for line in snapshot() if args.snapshot else costs(args):
        add_line(args.out, {"floor": None, **line, **about})


if __name__ == "__main__":
    main()
