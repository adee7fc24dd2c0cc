"""How fast a checkpoint of safetensors reaches the GPU, beside one copy from pinned memory.

    python -m benchmarks.gpu_load 0.6b --out lines.jsonl

The checkpoint has the shape's weights, random, and is read again and again, so from the page cache.
The copy goes one way from memory that is pinned already: no load is faster.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import add_line, describe_run
from benchmarks.gpu_rates import gpu_facts
from benchmarks.stepped import empty_model
from dovetail.config.resolve import options_from, resolve
from dovetail.dist.comm import LocalComm
from dovetail.exec.registry import load_backend
from dovetail.weights.load import load_weights

SHAPES = Path(__file__).parent / "shapes"
COPIED_BYTES = 2**28


def write_checkpoint(shape: Path, folder: Path) -> None:
    """Write a model of the shape with random weights, as transformers does."""
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(shape), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def load_seconds(folder: Path, repeats: int) -> tuple[list[float], int]:
    """Return the seconds of each load into one model, and the bytes of its weights."""
    config = resolve(options_from({"model": str(folder), "device": "cuda"}))
    backend = load_backend(config)
    model, seconds = empty_model(config, backend), []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with backend.weight_copies() as copy:
            load_weights(model, folder, comm=LocalComm(), on_progress=None, copy=copy)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    backend.device.close()
    return seconds, sum(parameter.nbytes for parameter in model.parameters())


def pinned_rate(repeats: int) -> float:
    """Return the bytes a second of one copy from pinned memory, the best of ``repeats``."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8).pin_memory()
    target, seconds = torch.empty_like(source, device="cuda"), []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return COPIED_BYTES / min(seconds)


def main() -> None:
    """Measure and print a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(SHAPES / args.shape, Path(folder))
        seconds, num_bytes = load_seconds(Path(folder), args.repeats)
    rate = pinned_rate(args.repeats)
    argv = ["-m", "benchmarks.gpu_load", *map(str, sys.argv[1:])]
    line = describe_run(argv, "triton", "transformers", "safetensors", gpu=gpu_facts()) | {
        "work": "weights loaded", "shape": args.shape, "batch": None, "unit": "GB/s",
        "value": round(num_bytes / statistics.median(seconds) / 1e9, 2),
        "floor": None, "one_copy_GB_per_s": round(rate / 1e9, 2), "bytes": num_bytes,
        "seconds": [round(each, 3) for each in seconds],
    }  # fmt: skip
    print(json.dumps(line))
    add_line(args.out, line)


if __name__ == "__main__":
    main()
