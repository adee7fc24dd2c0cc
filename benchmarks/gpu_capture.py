"""What the capture of expert rows costs on one GPU.

    python -m benchmarks.gpu_capture 30b-a3b --out capture.jsonl
    python -m benchmarks.gpu_capture --snapshot --out capture.jsonl

1. Works a and b of ``benchmarks.gpu`` with capture off, and on with all rows returned, in turn in
   one process, on one set of weights: the ratio of their times, with a bootstrap interval. Of work
   a the first ``--requests`` requests, outputs cut to ``--cut`` tokens; work b is a batch of 256.
2. ``--snapshot``: packing a step's rows (256 tokens, 40 layers, 8 of int32, with their places:
   329,728 bytes) into the step's block, beside its copy to the host.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from benchmarks.common import describe_run
from benchmarks.gpu import SHAPES, prompts_of_b, seconds, work_a
from benchmarks.gpu_rates import stream_us
from dovetail.core.engine import Engine
from dovetail.exec.cuda.device import CudaDevice
from dovetail.models.registry import build_model

RESAMPLES = 10_000
COLUMNS = ("experts",)
TOKENS, LAYERS, TOP_K = 256, 40, 8
SNAPSHOT_BYTES = 329_728


def engines_of(shape: str, kv_memory: str) -> tuple[Engine, Engine]:
    """Return an engine without capture and one with it; two sets of weights would not fit."""
    models = []

    def build_once(*args: object, **kwargs: object) -> object:
        if not models:
            models.append(build_model(*args, **kwargs))  # type: ignore[arg-type]
        return models[0]

    with mock.patch("dovetail.core.local.build_model", build_once):
        off, on = (
            Engine(
                SHAPES / shape, device="cuda", load_format="dummy", prefix_cache=False,
                max_running=256, kv_memory=kv_memory, context_len=2176, chunk_size=8192,
                capture=columns,
            )
            for columns in ((), COLUMNS)
        )  # fmt: skip
    return off, on


def interleaved(
    off: Callable[[], float], on: Callable[[], float], repeats: int
) -> list[tuple[float, float]]:
    """Return pairs of seconds; who comes first alternates, and the first pair does not count."""
    pairs = []
    for turn in range(repeats + 1):
        if turn % 2:
            with_rows = on()
            without = off()
        else:
            without = off()
            with_rows = on()
        if turn:
            pairs.append((without, with_rows))
    return pairs


def ratio_and_interval(pairs: list[tuple[float, float]]) -> dict[str, object]:
    """Return the rate with capture over that without: the mean's ratio, 95 % by bootstrap."""
    off_N, on_N = np.array(pairs).T
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(pairs), (RESAMPLES, len(pairs)))
    ratios = off_N[picks].mean(axis=1) / on_N[picks].mean(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {
        "value": round(float(off_N.mean() / on_N.mean()), 5),
        "interval": [round(float(low), 5), round(float(high), 5)],
        "seconds": [[round(float(x), 4) for x in pair] for pair in pairs],
    }


def costs(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return the lines of works a and b."""
    off, on = engines_of(args.shape, args.kv_memory)
    prompts, lens = work_a()
    prompts, lens = prompts[: args.requests], [min(n, args.cut) for n in lens[: args.requests]]
    batch = prompts_of_b(256)
    works = {
        "a": (prompts, lens, args.repeats_a),
        "b": (batch, [args.steps_b] * len(batch), args.repeats_b),
    }
    found: list[dict[str, object]] = []
    with off, on:
        for work, (asked, out_lens, repeats) in works.items():
            pairs = interleaved(
                lambda asked=asked, n=out_lens: seconds(off, asked, n),
                lambda asked=asked, n=out_lens: seconds(on, asked, n, COLUMNS),
                repeats,
            )
            line = {"work": f"capture on and returned, work {work}", "batch": len(asked)}
            line |= {"shape": args.shape, "unit": "rate of off", "floor": 1.0}
            found.append(line | ratio_and_interval(pairs))
            print(json.dumps(found[-1]), flush=True)
    return found


def snapshot() -> list[dict[str, object]]:
    """Return the lines of the snapshot and of its copy to the host."""
    device = CudaDevice()
    rows = torch.zeros(2**17, LAYERS, TOP_K, dtype=torch.int32, device="cuda")
    slots = torch.randint(0, len(rows), (TOKENS,), device="cuda")
    block, host = device.device_block(SNAPSHOT_BYTES), device.host_block(SNAPSHOT_BYTES)
    num_bytes = TOKENS * LAYERS * TOP_K * 4
    packed = block[:num_bytes].view(torch.int32).view(TOKENS, LAYERS, TOP_K)
    places = block[num_bytes:].view(torch.int64)
    assert len(places) == TOKENS

    def pack() -> None:
        packed.copy_(rows.index_select(0, slots))
        places.copy_(slots)

    shape = f"{TOKENS} tokens x {LAYERS} layers x {TOP_K}, int32, with places"
    parts = {
        "snapshot packed": pack,
        "snapshot copied to the host": lambda: host.copy_(block, non_blocking=True),
    }
    found = []
    for work, run in parts.items():
        times = [stream_us(run, calls=200) for _ in range(5)]
        found.append(
            {"work": work, "shape": shape, "batch": TOKENS, "value": round(min(times), 2)}
            | {"unit": "us", "median": round(statistics.median(times), 2), "bytes": SNAPSHOT_BYTES}
        )
        print(json.dumps(found[-1]), flush=True)
    device.close()
    return found


def main() -> None:
    """Measure and write lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", nargs="?", default="30b-a3b")
    parser.add_argument("--snapshot", action="store_true", help="only what a snapshot costs")
    parser.add_argument("--requests", type=int, default=256, help="of work a (256)")
    parser.add_argument("--cut", type=int, default=256, help="most output tokens of one (256)")
    parser.add_argument("--repeats-a", type=int, default=4)
    parser.add_argument("--repeats-b", type=int, default=12)
    parser.add_argument("--steps-b", type=int, default=64, help="tokens a row of work b (64)")
    parser.add_argument("--kv-memory", default="16GiB")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    about = describe_run(["-m", "benchmarks.gpu_capture", *sys.argv[1:]], "triton")
    about |= {"device": torch.cuda.get_device_name()}
    for line in snapshot() if args.snapshot else costs(args):
        with args.out.open("a") as file:
            file.write(json.dumps({"floor": None, **line, **about}) + "\n")


if __name__ == "__main__":
    main()
