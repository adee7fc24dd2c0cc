"""Memory over many requests: resident size and KV pages, sampled as the engine works.

    python -m benchmarks.soak [--requests 20000] [--output FILE.jsonl]

Short random requests, a third of them sharing a prefix, some aborted, in waves through one engine
with a small pool. Resident memory is read after each wave; the growth is the slope of a straight
line through the readings after the first fifth. Pages: at the end none may be held.
"""

import argparse
import gc
import json
import os
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

import dovetail
from benchmarks.common import describe_run

WAVE = 250


def resident_bytes() -> int:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_wave(engine: dovetail.Engine, rng: np.random.Generator, shared: list[int]) -> None:
    """Run one wave of requests to their end; one in fifty is dropped on the way."""
    prompts = []
    for _ in range(WAVE):
        prompt = rng.integers(3, 2048, rng.integers(4, 24)).tolist()
        prompts.append(shared + prompt if rng.random() < 0.33 else prompt)
    dropped = [engine.stream(prompt) for prompt in prompts[: WAVE // 50]]
    params = dovetail.SamplingParams(max_new_tokens=4, ignore_eos=True)
    engine.generate(prompts[WAVE // 50 :], params)
    for stream in dropped:
        next(stream)
    del dropped


def main() -> None:
    """Run the waves and print one JSON line."""
    parser = argparse.ArgumentParser(description="Memory over many requests.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 2048, 40).tolist()
    readings: list[int] = []
    with dovetail.Engine(context_len=256, num_pages=512, max_running=64) as engine:
        waves = range(args.requests // WAVE)
        for _ in track(waves, description="waves", console=Console(stderr=True)):
            run_wave(engine, rng, shared)
            gc.collect()
            readings.append(resident_bytes())
        engine.generate("done", dovetail.SamplingParams(max_new_tokens=1))
        stats = engine.stats()
    settled = np.array(readings[len(readings) // 5 :], dtype=float)
    slope = np.polyfit(np.arange(len(settled)) * WAVE, settled, 1)[0]
    line = {
        "work": "soak: growth of resident memory",
        "shape": "tiny-moe float32, prompts 4 to 63, 4 out",
        "batch": args.requests,
        "value": round(float(slope), 1),
        "unit": "bytes a request",
        "floor": 0,
        "resident_MiB": {
            "after a fifth": round(settled[0] / 2**20, 1),
            "at the end": round(settled[-1] / 2**20, 1),
            "most": round(settled.max() / 2**20, 1),
        },
        "pages": {
            "in all": stats.num_pages,
            "held": stats.num_pages - stats.num_free_pages - stats.num_cached_pages,
        },
        **describe_run(sys.argv),
    }
    print(json.dumps(line))
    if args.output is not None:
        args.output.write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
