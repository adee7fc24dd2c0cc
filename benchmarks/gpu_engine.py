"""Times of the engine on one GPU: works a, b and c on a model shape with random weights.

a: 512 requests, prompts and outputs of 100 to 1,024 tokens; seconds.
b: a decode step of so many rows after prompts of 128 tokens: ``(T(272 new) - T(16 new)) / 256``,
   the least of each leg; milliseconds.
c: 16 prompts of 4,096 tokens, one new token; seconds.

python -m benchmarks.gpu_engine FOLDER --works a b c --out results.jsonl
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch

from benchmarks.common import describe_run
from benchmarks.gpu import gpu_rates
from dovetail.core.engine import Engine
from dovetail.wire.request import SamplingParams

TEMPERATURE = 0.6


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=TEMPERATURE, ignore_eos=True)


def seconds(engine: Engine, prompts: list[list[int]], lens: list[int]) -> float:
    started = time.perf_counter()
    outs = engine.generate(prompts, [params(n) for n in lens])
    taken = time.perf_counter() - started
    assert [len(out.token_ids) for out in outs] == lens
    return taken


def work_a(engine: Engine) -> tuple[list[list[int]], list[int]]:
    random.seed(0)
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(512)
    ]
    lens = [random.randint(100, 1024) for _ in prompts]
    assert (sum(map(len, prompts)), sum(lens)) == (291_939, 284_413)
    return prompts, lens


def step_ms(engine: Engine, batch: int, repeats: int) -> float:
    prompts = [[(7 * i + j) % 10000 for j in range(128)] for i in range(batch)]
    short, long = [], []
    for _ in range(repeats):
        short.append(seconds(engine, prompts, [16] * batch))
        long.append(seconds(engine, prompts, [272] * batch))
    return (min(long) - min(short)) / 256 * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--works", nargs="+", default=["a", "b", "c"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 128, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-memory", help="default: 0.9 of the GPU, less what else is there")
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    started = time.perf_counter()
    engine = Engine(
        args.folder, device="cuda", load_format="dummy", prefix_cache=False, max_running=256,
        kv_memory=args.kv_memory, context_len=4352, chunk_size=args.chunk_size,
    )  # fmt: skip
    start_s = time.perf_counter() - started
    about = describe_run(["-m", "benchmarks.gpu_engine", str(args.folder.name)], "triton")
    about |= {"device": torch.cuda.get_device_name(), "rates": gpu_rates(), "start_s": start_s}

    def write(work: str, batch: int, value: float, unit: str) -> None:
        line = {"work": work, "shape": args.folder.name, "batch": batch, "value": value}
        print(work, batch, round(value, 4), unit, flush=True)
        with args.out.open("a") as file:
            file.write(json.dumps(line | {"unit": unit, "floor": None} | about) + "\n")

    with engine:
        print("start", round(start_s, 1), "s", flush=True)
        for batch in args.batches if "b" in args.works else ():
            write("b", batch, step_ms(engine, batch, args.repeats), "ms")
        if "c" in args.works:
            prompts = [[(7 * i + j) % 10000 for j in range(4096)] for i in range(16)]
            write("c", 16, min(seconds(engine, prompts, [1] * 16) for _ in range(3)), "s")
        if "a" in args.works:
            write("a", 512, min(seconds(engine, *work_a(engine)) for _ in range(2)), "s")


if __name__ == "__main__":
    main()
