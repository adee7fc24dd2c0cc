"""Times of the engine on one GPU, beside their floors and the best of other engines.

a: 512 requests, prompts and outputs of 100 to 1,024 tokens, all at once; seconds.
b: a decode step of so many rows after prompts of 128 tokens: ``(T(272 new) - T(16 new)) / 256``,
   the least of each leg of some interleaved repeats; milliseconds.
c: 16 prompts of 4,096 tokens, one new token; seconds.
d: work a, with logprobs and, of a mixture of experts, the experts of each token returned.

    python -m benchmarks.gpu 30b-a3b --works a b c --out results.jsonl

SHAPE is a folder of ``benchmarks/shapes``; weights are random, in bf16. The best of other engines
was measured on one H200 whose device copy made 4.26 TB/s and whose bf16 product 789 TFLOP/s: vLLM
0.26 and SGLang 0.5.17, without FlashInfer, each in a process of its own.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import describe_run
from benchmarks.floors import Floor
from benchmarks.gpu_rates import gpu_rates
from dovetail.core.engine import Engine
from dovetail.wire.request import SamplingParams

SHAPES = Path(__file__).parent / "shapes"
BATCHES = (1, 32, 128, 256)
BEST_PEER = {
    ("0.6b", "a"): 10.22, ("0.6b", "c"): 0.188,
    ("0.6b", "b"): dict(zip(BATCHES, (1.69, 2.05, 3.58, 5.44), strict=True)),
    ("30b-a3b", "a"): 29.97, ("30b-a3b", "c"): 1.014,
    ("30b-a3b", "b"): dict(zip(BATCHES, (4.15, 15.59, 18.89, 21.85), strict=True)),
}  # fmt: skip
TEMPERATURE = 0.6
PROMPT_LEN, SHORT, LONG = 128, 16, 272
CONTEXT_OF_B = PROMPT_LEN + (SHORT + LONG - 1) / 2


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=TEMPERATURE, ignore_eos=True)


def seconds(
    engine: Engine, prompts: list[list[int]], lens: list[int], capture: Sequence[str] = ()
) -> float:
    started = time.perf_counter()
    outs = engine.generate(prompts, [params(n) for n in lens], capture=tuple(capture))
    taken = time.perf_counter() - started
    assert [len(out.token_ids) for out in outs] == lens
    if capture:
        assert all(out.routes is not None for out in outs)
    return taken


def work_a() -> tuple[list[list[int]], list[int]]:
    random.seed(0)
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(512)
    ]
    lens = [random.randint(100, 1024) for _ in prompts]
    assert (sum(map(len, prompts)), sum(lens)) == (291_939, 284_413)
    return prompts, lens


def prompts_of_b(batch: int) -> list[list[int]]:
    return [[(7 * i + j) % 10000 for j in range(PROMPT_LEN)] for i in range(batch)]


def step_ms(engine: Engine, batch: int, repeats: int) -> float:
    prompts, short, long = prompts_of_b(batch), [], []
    for _ in range(repeats):
        short.append(seconds(engine, prompts, [SHORT] * batch))
        long.append(seconds(engine, prompts, [LONG] * batch))
    return (min(long) - min(short)) / (LONG - SHORT) * 1e3


def distinct_experts(engine: Engine, batch: int) -> float:
    """Return how many experts of a layer one decode step read, on average over the layers."""
    outs = engine.generate(prompts_of_b(batch), params(4), capture=("experts",))
    rows = np.stack([out.routes.ids[-1] for out in outs if out.routes is not None])
    layers = range(rows.shape[1])
    return float(np.mean([len(np.unique(rows[:, layer])) for layer in layers]))


class Lines:
    """Writes a line for each result."""

    def __init__(self, shape: str, floor: Floor, about: dict[str, object], out: Path) -> None:
        self._shape, self._floor, self._about, self._out = shape, floor, about, out

    def write(self, work: str, batch: int, value: float, unit: str, **more: object) -> None:
        peers = BEST_PEER.get((self._shape, work))
        peer = peers.get(batch) if isinstance(peers, dict) else peers
        line = {"work": work, "shape": self._shape, "batch": batch, "value": value, "unit": unit}
        line |= {"floor": round(self._floor_of(work, batch, more), 4)} | self._about
        line |= {"best_peer": peer} | more
        print(json.dumps({name: line[name] for name in list(line)[:6]} | more), flush=True)
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _floor_of(self, work: str, batch: int, more: dict[str, object]) -> float:
        if work == "b":
            distinct = more.get("distinct_experts")
            known = float(distinct) if isinstance(distinct, float) else None
            return 1e3 * self._floor.step(batch, CONTEXT_OF_B, distinct=known)
        if work == "c":
            return self._floor.prefill([4096] * 16)
        prompts, lens = work_a()
        return self._floor.generate([len(prompt) for prompt in prompts], lens, rows=len(lens))


def run(engine: Engine, args: argparse.Namespace, lines: Lines) -> None:
    """Measure the works that were asked for."""
    captures = bool(engine.config.capture)
    for batch in args.batches if "b" in args.works else ():
        more = {"distinct_experts": distinct_experts(engine, batch)} if captures else {}
        lines.write("b", batch, step_ms(engine, batch, args.repeats), "ms", **more)
    if "c" in args.works:
        prompts = [[(7 * i + j) % 10000 for j in range(4096)] for i in range(16)]
        lines.write("c", 16, min(seconds(engine, prompts, [1] * 16) for _ in range(3)), "s")
    for work in "ad":
        if work in args.works:
            columns = engine.config.capture if work == "d" else ()
            times = [seconds(engine, *work_a(), columns) for _ in range(args.runs)]
            lines.write(work, 512, min(times), "s", runs=times, capture=list(columns))


def main() -> None:
    """Measure and write lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--works", nargs="+", default=["a", "b", "c"], choices=list("abcd"))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--repeats", type=int, default=5, help="of each leg of b (5)")
    parser.add_argument("--runs", type=int, default=2, help="of a and d, the least counts (2)")
    parser.add_argument("--kv-memory", help="(what 0.9 of the GPU leaves)")
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--capture", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    started = time.perf_counter()
    memory = {} if args.kv_memory is None else {"kv_memory": args.kv_memory}
    engine = Engine(
        SHAPES / args.shape, device="cuda", load_format="dummy", prefix_cache=False,
        max_running=args.max_running, context_len=4352, chunk_size=args.chunk_size,
        capture=tuple(args.capture), **memory,
    )  # fmt: skip
    about = {"start_s": round(time.perf_counter() - started, 2), "max_running": args.max_running}
    command = ["-m", "benchmarks.gpu", args.shape, "--works", *args.works]
    about |= describe_run(command, "triton")
    with engine:
        about |= {"device": torch.cuda.get_device_name(), "rates": gpu_rates()}
        torch.cuda.empty_cache()
        run(engine, args, Lines(args.shape, Floor(engine.config.model), about, args.out))


if __name__ == "__main__":
    main()
