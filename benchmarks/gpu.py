"""Times of the engine on one GPU, beside their floors and the best of other engines.

a: 512 requests, prompts and outputs of 100 to 1,024 tokens, all at once; seconds.
b: a decode step of so many rows after prompts of 128 tokens: ``(T(272 new) - T(16 new)) / 256``,
   the least of each leg of some interleaved repeats; milliseconds.
c: 16 prompts of 4,096 tokens, one new token; seconds.
d: work a, with the logprobs and the experts of each token returned; of a dense model it is a.

Of the runs of a, c and d the last one counts, as it did for the others.

    python -m benchmarks.gpu 30b-a3b --works b c d a --budget 120 --out results.jsonl

SHAPE is a folder of ``benchmarks/shapes``; weights are random, in bf16. With d among the works the
engine keeps the rows of experts in all of them, returns them in d alone, and b tells how many
experts a step read. The best of other engines was measured on one H200 whose device copy made 4.26
TB/s and whose bf16 product 789 TFLOP/s: vLLM 0.26 and SGLang 0.5.17, without FlashInfer, each in a
process of its own; that of d is vLLM's a, and the 0.8 % that returning experts cost it at least.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import describe_run, write_newest
from benchmarks.floors import Floor
from benchmarks.gpu_rates import gpu_facts
from dovetail.config.model import ModelConfig
from dovetail.core.engine import Engine
from dovetail.wire.request import SamplingParams

SHAPES = Path(__file__).parent / "shapes"
BATCHES = (1, 32, 128, 256)
BEST_PEER = {
    ("0.6b", "a"): 10.22, ("0.6b", "c"): 0.188,
    ("0.6b", "b"): dict(zip(BATCHES, (1.69, 2.05, 3.58, 5.44), strict=True)),
    ("30b-a3b", "a"): 29.97, ("30b-a3b", "c"): 1.014, ("30b-a3b", "d"): 30.2,
    ("30b-a3b", "b"): dict(zip(BATCHES, (4.15, 15.59, 18.89, 21.85), strict=True)),
}  # fmt: skip
TEMPERATURE = 0.6
PROMPT_LEN, SHORT, LONG = 128, 16, 272
NUM_SEEN = 8
"""Decode steps in which distinct experts are counted."""

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
        for prompt, n, out in zip(prompts, lens, outs, strict=True):
            assert out.routes is not None and len(out.routes.ids) == len(prompt) + n - 1
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


def prompts_of_c() -> list[list[int]]:
    return [[(7 * i + j) % 10000 for j in range(4096)] for i in range(16)]


def step_ms(engine: Engine, batch: int, repeats: int) -> float:
    prompts, short, long = prompts_of_b(batch), [], []
    for _ in range(repeats):
        short.append(seconds(engine, prompts, [SHORT] * batch))
        long.append(seconds(engine, prompts, [LONG] * batch))
    return (min(long) - min(short)) / (LONG - SHORT) * 1e3


def distinct_experts(engine: Engine, prompts: list[list[int]]) -> float:
    """Return how many experts of a layer so many rows of decode choose, on average.

    Over the layers, and over some tokens behind the first; from a short run of its own. Tokens of
    the same index stand for a step. In work b they are of one, or of steps few apart; in work a
    prompts begin at different steps, and what tokens choose does not depend on that.
    """
    outs = engine.generate(prompts, params(NUM_SEEN + 1), capture=("experts",))
    ids_RTLK = np.stack([out.routes.ids[-NUM_SEEN:] for out in outs if out.routes is not None])
    _, num_steps, num_layers, _ = ids_RTLK.shape
    places = [(step, layer) for step in range(num_steps) for layer in range(num_layers)]
    return float(np.mean([len(np.unique(ids_RTLK[:, step, layer])) for step, layer in places]))


@dataclass(frozen=True)
class Figure:
    """One line to be measured.

    Attributes:
        work, batch, unit: of the line.
        floor: in that unit.
        estimate_s: how long it takes to measure, about.
        measure: returns the value and what else the line says.
    """

    work: str
    batch: int
    unit: str
    floor: float
    estimate_s: float
    measure: Callable[[], tuple[float, dict[str, object]]]


class Works:
    """The works of one engine."""

    def __init__(self, engine: Engine, *, repeats: int, runs: int, batches: Sequence[int]) -> None:
        self._engine = engine
        self._floor = Floor(engine.config.model)
        self._repeats, self._runs, self._batches = repeats, runs, batches

    def figures(self, works: Sequence[str]) -> Iterator[Figure]:
        """Yield the figures of some works, in their order."""
        for work in works:
            if work == "b":
                yield from map(self._decode, self._batches)
            elif work == "c":
                yield self._prefill()
            else:
                yield self._requests(work)

    def _decode(self, batch: int) -> Figure:
        step = self._floor.step(batch, CONTEXT_OF_B)
        estimate = self._repeats * (SHORT + LONG) * (1.4 * step + 5e-4)
        return Figure("b", batch, "ms", 1e3 * step, estimate, partial(self._measure_step, batch))

    def _measure_step(self, batch: int) -> tuple[float, dict[str, object]]:
        more: dict[str, object] = {}
        if "experts" in self._engine.config.capture:
            distinct = distinct_experts(self._engine, prompts_of_b(batch))
            floor = self._floor.step(batch, CONTEXT_OF_B, distinct=distinct)
            more = {"distinct_experts": distinct, "floor": round(1e3 * floor, 4)}
        return step_ms(self._engine, batch, self._repeats), more | {"repeats": self._repeats}

    def _prefill(self) -> Figure:
        prompts = prompts_of_c()

        def measure() -> tuple[float, dict[str, object]]:
            times = [seconds(self._engine, prompts, [1] * 16) for _ in range(self._runs)]
            return times[-1], {"runs": times}

        floor = self._floor.prefill([4096] * 16)
        return Figure("c", 16, "s", floor, self._runs * 2 * floor, measure)

    def _requests(self, work: str) -> Figure:
        prompts, lens = work_a()
        columns = self._engine.config.capture if work == "d" else ()

        def measure() -> tuple[float, dict[str, object]]:
            times = [seconds(self._engine, prompts, lens, columns) for _ in range(self._runs)]
            more: dict[str, object] = {"runs": times, "returned": list(columns)}
            if "experts" in self._engine.config.capture:
                more["distinct_experts"] = distinct_experts(self._engine, prompts)
            return times[-1], more

        floor = self._floor.generate([len(prompt) for prompt in prompts], lens, rows=len(lens))
        return Figure(work, 512, "s", floor, self._runs * 1.5 * floor, measure)


class Lines:
    """Writes a line for each figure, as soon as it is known."""

    def __init__(self, shape: str, about: dict[str, object], out: Path | None) -> None:
        self._shape, self._about, self._out = shape, about, out

    def write(self, figure: Figure, value: float, more: dict[str, object]) -> None:
        peers = BEST_PEER.get((self._shape, figure.work))
        peer = peers.get(figure.batch) if isinstance(peers, dict) else peers
        line: dict[str, object] = {"work": figure.work, "shape": self._shape}
        line |= {"batch": figure.batch, "value": value, "unit": figure.unit}
        line |= {"floor": round(figure.floor, 4)} | self._about | {"best_peer": peer} | more
        short = ("work", "shape", "batch", "value", "unit", "floor", "best_peer", *more)
        print(json.dumps({name: line[name] for name in short}), flush=True)
        if self._out is not None:
            write_newest(self._out, line, of=("work", "shape", "batch"))


def start(args: argparse.Namespace) -> Engine:
    """Return the engine that the flags ask for."""
    folder = SHAPES / args.shape
    capture = args.capture
    if capture is None:
        is_moe = ModelConfig.from_folder(folder).moe is not None
        capture = ["experts"] if "d" in args.works and is_moe else []
    memory = {} if args.kv_memory is None else {"kv_memory": args.kv_memory}
    return Engine(
        folder, device="cuda", load_format="dummy", prefix_cache=False,
        max_running=args.max_running, context_len=4352, chunk_size=args.chunk_size,
        capture=tuple(capture), **memory,
    )  # fmt: skip


def main() -> None:
    """Measure and write lines."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(path.name for path in SHAPES.iterdir()))
    parser.add_argument("--works", nargs="+", default=["b", "c", "a"], choices=list("abcd"))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--repeats", type=int, default=5, help="of each leg of b (5)")
    parser.add_argument("--runs", type=int, default=2, help="of a, c and d, the last counts (2)")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS",
        help="leave out what would take longer than is left of so many (no limit)",
    )  # fmt: skip
    parser.add_argument("--kv-memory", help="(what 0.9 of the GPU leaves)")
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--chunk-size", type=int, default=8192)
    parser.add_argument("--capture", nargs="*", help="columns that are kept (experts, for d)")
    parser.add_argument("--out", type=Path, help="for whole lines; its older ones are replaced")
    args = parser.parse_args()
    engine = start(args)
    about: dict[str, object] = {"start_s": round(time.perf_counter() - started, 2)}
    about |= {"max_running": args.max_running, "capture": list(engine.config.capture)}
    about |= {"pool": engine.config.reasons["num_pages"]}
    about |= {"chunk_size": engine.config.chunk_size}
    with engine:
        command = ["-m", "benchmarks.gpu", *sys.argv[1:]]
        about |= describe_run(command, "triton", gpu=gpu_facts())
        torch.cuda.empty_cache()
        lines = Lines(args.shape, about, args.out)
        works = Works(engine, repeats=args.repeats, runs=args.runs, batches=args.batches)
        for figure in works.figures(args.works):
            left = args.budget - (time.perf_counter() - started)
            if left < figure.estimate_s:
                what = f"{figure.work} of {figure.batch}, about {figure.estimate_s:.0f} s"
                print(f"left out: {what}, {left:.0f} left", file=sys.stderr)
                continue
            lines.write(figure, *figure.measure())


if __name__ == "__main__":
    main()
