"""What shaping draws costs a decode step on one GPU: a steady batch, once for each kind of request.

    python -m benchmarks.gpu_shaped [SHAPE] [--rows N] [--steps N] [--out FILE.jsonl]

SHAPE is a folder of ``benchmarks/shapes``; weights are random, in bf16, so the logits are nearly
flat and truncation leaves many tokens. All rows ask for the same. Milliseconds of a step, the least
of three runs of so many steps.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_line, describe_run
from benchmarks.gpu_rates import gpu_facts
from benchmarks.stepped import SteppedEngine
from dovetail.wire.request import LogprobParams

SHAPES = Path(__file__).parent / "shapes"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1},
    "biases": {"logit_bias": {7: -5.0, 9: 2.0}},
    "raw logprobs": {"logprobs": LogprobParams(kind="raw")},
    "all": {
        "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "logit_bias": {7: -5.0}, "logprobs": LogprobParams(kind="truncated"),
    },
}  # fmt: skip
PROMPT_LEN, RUNS = 128, 3


def step_ms(engine: SteppedEngine, num_rows: int, num_steps: int, kind: dict[str, Any]) -> float:
    """Return the time of a step in which all rows decode.

    Raises:
        RuntimeError: some rows ended meanwhile: the first began long before the last.
    """
    engine.fill(num_rows, PROMPT_LEN, max_new_tokens=(RUNS + 1) * num_steps, **kind)
    found = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(num_steps):
            engine.loop.step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - started) / num_steps * 1e3)
    if engine.scheduler.num_running < num_rows:
        raise RuntimeError(f"only {engine.scheduler.num_running} of {num_rows} rows are left")
    engine.finish()
    return min(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", nargs="?", default="0.6b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="a file that gets the lines too")
    args = parser.parse_args()
    started = time.perf_counter()
    engine = SteppedEngine(
        model=str(SHAPES / args.shape), dtype="bfloat16", device="cuda", max_running=args.rows,
        context_len=1024, kv_memory="12GiB",
    )  # fmt: skip
    print(f"started in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    run = describe_run(sys.argv, "triton", gpu=gpu_facts())
    for name, kind in KINDS.items():
        value = round(step_ms(engine, args.rows, args.steps, kind), 3)
        line = {
            "work": f"decode step: {name}", "shape": args.shape, "batch": args.rows,
            "value": value, "unit": "ms", "floor": None,
        } | run  # fmt: skip
        print(json.dumps(line), flush=True)
        add_line(args.out, line)


if __name__ == "__main__":
    main()
