"""``dovetail bench``: how fast the engine is here. One JSON line a result.

Owns the measuring; the engine has none of it. Every number is measured when it is printed. Prompts
are random ids, so results say nothing about prefix hits between prompts.

* ``offline``: many prompts at once, tokens per second of the whole.
* ``decode``: time of one step of a full batch. Two runs of the same prompts differ in their number
  of steps alone, so start and prefill cancel in the difference; of each run the least time of some
  interleaved repeats counts.
* ``prefill``: tokens of one prompt per second until its first token is drawn.
"""

import argparse
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dovetail.cli.machine import machine_facts, seconds_of
from dovetail.cli.options import engine_options
from dovetail.cli.progress import open_engine, progress_bar
from dovetail.core.engine import Engine
from dovetail.core.generation import Generation
from dovetail.errors import RequestError
from dovetail.wire.request import SamplingParams

SHORT_STEPS = 8  # of the shorter decode run: by then the batch is full

Ids = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One number.

    Attributes:
        work, shape: what was done, and to what.
        batch: most sequences at once.
        value, unit: the number.
    """

    work: str
    shape: str
    batch: int
    value: float
    unit: str


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    options = engine_options(args)
    if args.work == "prefill":
        options["prefix_cache"] = False  # a repeat must not find the prompt computed
    if args.work == "decode":
        options.setdefault("max_running", max(128, *args.batches))
    with open_engine(options) as engine:
        torch.set_num_threads(engine.config.num_threads)
        facts = machine_facts()
        command = shlex.join(["dovetail", *args.words])
        for measurement in _MEASURES[args.work](engine, args):
            unknown = {"floor": None, "best_peer": None}
            line = {**asdict(measurement), **unknown, **facts, "command": command}
            print(json.dumps(line), flush=True)
    return 0


def _offline(engine: Engine, args: argparse.Namespace) -> Iterator[Measurement]:
    rng = np.random.default_rng(args.seed)
    input_lens = rng.integers(args.input_len[0], args.input_len[1] + 1, args.num_prompts).tolist()
    output_lens = rng.integers(
        args.output_len[0], args.output_len[1] + 1, args.num_prompts
    ).tolist()
    prompts = _random_prompts(engine, rng, input_lens)
    params = [_fixed_len(output_len, args) for output_len in output_lens]
    _warm_up(engine, rng, args)
    with progress_bar() as progress:
        task = progress.add_task("offline", total=args.num_prompts)

        def on_finish(_index: int, _generations: list[Generation]) -> None:
            progress.advance(task)

        seconds = seconds_of(partial(engine.generate, prompts, params, on_finish=on_finish))
    shape = (
        f"{_what_runs(engine, args)}, {args.num_prompts} prompts of {_shown(args.input_len)} "
        f"tokens, {_shown(args.output_len)} out"
    )
    batch = min(args.num_prompts, engine.config.max_running)
    for unit, lens in (("input tokens/s", input_lens), ("output tokens/s", output_lens)):
        value = round(sum(lens) / seconds, 1)
        yield Measurement(work="offline", shape=shape, batch=batch, value=value, unit=unit)


def _decode(engine: Engine, args: argparse.Namespace) -> Iterator[Measurement]:
    rng = np.random.default_rng(args.seed)
    for batch in args.batches:
        for context in args.contexts:
            _check_decode(engine, batch, context, args.steps)
    _warm_up(engine, rng, args)
    for batch in args.batches:
        for context in args.contexts:
            prompts = _random_prompts(engine, rng, [context - SHORT_STEPS] * batch)

            def run(num_tokens: int, prompts: Ids = prompts) -> float:
                params = _fixed_len(num_tokens, args)
                return seconds_of(partial(engine.generate, prompts, params))

            with progress_bar() as progress:
                repeats = progress.track(
                    range(args.repeats), description=f"decode, {batch} at once"
                )
                seconds = step_seconds(run, num_steps=args.steps, repeats=repeats)
            shape = f"{_what_runs(engine, args)}, context {context} to {context + args.steps}"
            value = round(1e3 * seconds, 4)
            yield Measurement(work="decode", shape=shape, batch=batch, value=value, unit="ms/step")


def step_seconds(
    run: Callable[[int], float], *, num_steps: int, repeats: Iterable[object]
) -> float:
    """Return the time of one step, from the difference of two runs.

    Args:
        run: generates so many tokens and returns the seconds that it took.
        num_steps: steps that the longer run has more.
        repeats: how often, one item a repeat; the two runs alternate.

    Raises:
        RequestError: the longer run was not slower; names the flag.
    """
    legs = (SHORT_STEPS, SHORT_STEPS + num_steps)
    for leg in legs:
        run(leg)  # finds no prefixes yet
    least = dict.fromkeys(legs, math.inf)
    for _ in repeats:
        for leg in legs:
            least[leg] = min(least[leg], run(leg))
    seconds = (least[legs[1]] - least[legs[0]]) / num_steps
    if seconds <= 0:
        raise RequestError("--steps", f"{num_steps} steps are lost in the noise; give more")
    return seconds


def _prefill(engine: Engine, args: argparse.Namespace) -> Iterator[Measurement]:
    rng = np.random.default_rng(args.seed)
    _warm_up(engine, rng, args)
    for input_len in args.input_lens:
        prompts = _random_prompts(engine, rng, [input_len])
        params = _fixed_len(1, args)
        least = math.inf
        with progress_bar() as progress:
            for _ in progress.track(range(args.repeats), description=f"prefill {input_len}"):
                least = min(least, seconds_of(partial(engine.generate, prompts, params)))
        shape = (
            f"{_what_runs(engine, args)}, prompt of {input_len} tokens, chunks of "
            f"{engine.config.chunk_size}"
        )
        value = round(input_len / least, 1)
        yield Measurement(work="prefill", shape=shape, batch=1, value=value, unit="input tokens/s")


def _check_decode(engine: Engine, batch: int, context: int, num_steps: int) -> None:
    """Refuse what would not run as one batch; its step would not be the one asked about.

    Raises:
        RequestError: names the flag.
    """
    config, longest = engine.config, context + num_steps
    if batch > config.max_running:
        raise RequestError("--batches", f"{batch} is above --max-running {config.max_running}")
    if context <= SHORT_STEPS or longest > config.context_len:
        raise RequestError(
            "--contexts",
            f"{context} with {num_steps} steps; legal are {SHORT_STEPS + 1} to "
            f"{config.context_len - num_steps}",
        )
    need = batch * -(-longest // config.page_size)
    if need > config.num_pages:
        raise RequestError(
            "--batches",
            f"{batch} sequences of {longest} tokens need {need} pages, but the pool has "
            f"{config.num_pages}; raise --kv-memory",
        )


def _random_prompts(engine: Engine, rng: np.random.Generator, lens: list[int]) -> Ids:
    vocab_size = engine.config.model.vocab_size
    return [rng.integers(0, vocab_size, length).tolist() for length in lens]


def _fixed_len(num_tokens: int, args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=num_tokens,
        ignore_eos=True,
        temperature=args.temperature,
        sampling_seed=args.seed,
    )


def _warm_up(engine: Engine, rng: np.random.Generator, args: argparse.Namespace) -> None:
    """The first steps of a process pay for what later ones find ready."""
    engine.generate(_random_prompts(engine, rng, [8] * 4), _fixed_len(8, args))


def _what_runs(engine: Engine, args: argparse.Namespace) -> str:
    name = Path(engine.config.model_folder).name
    return f"{name} {engine.config.dtype}, temperature {args.temperature:g}"


def _shown(lengths: tuple[int, int]) -> str:
    return str(lengths[0]) if lengths[0] == lengths[1] else f"{lengths[0]} to {lengths[1]}"


_MEASURES = {"offline": _offline, "decode": _decode, "prefill": _prefill}
