"""The explorer's scenarios on a GPU whose lanes sleep: the engine as it is, and mutants of it.

    python -m tests.device.races healthy --depth 2
    python -m tests.device.races MUTANT
    python -m tests.device.races        # plays what lines of JSON on its standard input ask for

Prints a JSON line for each. A process has one allocator, which PyTorch chooses when it starts. Some
mutants end in an illegal access, after which a process has no GPU any more, so it ends.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch

from dovetail.exec.cuda.runner import CudaRunner
from dovetail.exec.device import Device
from dovetail.kernels.registry import load_kernels
from tests.device import mutants as gpu_mutants
from tests.device.sleepy import SleepyLane, sleepy_gpu
from tests.explore import mutants
from tests.explore.mutants import Mutation
from tests.explore.scenario import Model, check, play, random_scenario
from tests.explore.test_snapshot import SnapshotEveryStep
from tests.support.gpu_engine import gpu_executor
from tests.support.handmade import fx_count, fx_moe, fx_tag
from tests.support.oracle import Oracle
from tests.support.stamps import stepper_of

MAKERS = {"count": fx_count, "tag": fx_tag, "moe": fx_moe}
SHAPE = {"page_size": 4, "chunk_size": 16, "max_running": 5}
"""The same for all seeds: each shape of the page table is a compilation of its own."""

TOKENS = r"output: .*: (token \d+ .*instead of|\d+ tokens instead of)"
READOUT = r"output: \nArrays are not equal"
PACKET = r"InvariantError: the step of packet \d+ ran on packet"
JUNK_RESULT = rf"{PACKET}|ValueError: .* is not a valid RowStatus|InvariantError: rows of slots"
VIEW = "InvariantError: a step result holds a view of foreign memory"
STALE = r"InvariantError: (a plan names stale slots|slot .* is stale)"
FREED = r"InvariantError: audit: step .* free"
SHARED = r"InvariantError: audit: step .* writes shared"
LOST_COUNT = (
    r"AssertionError: $|KeyError: <dovetail\.sched\.sequence\.Sequence"
    r"|InvariantError: (\d+ tokens (computed|do not fill)|a sequence ends with rows of)"
)
FOREIGN_ROWS = r"output: .*rows from position|ValueError: operands|RuntimeError: generator"
FOREIGN_STAMP = r"AssertionError: rows of step|AssertionError: \nArrays are not equal"
BAD_TOKEN = r"IndexError: |OverflowError: "
FAULT = r"DeviceError: "


@dataclass(frozen=True)
class Mutant:
    """A mutation on a GPU and how it may be caught.

    Attributes:
        mutate: patches the engine; None leaves it as it is.
        caught_by: pattern that some catch matches; "" for one that must not be caught.
        or_by: pattern that the others match.
        model: whose scenarios show it; "stamp" is FX-STAMP with a snapshot of every step.
        audited: see ``tests.explore.test_mutants``.
    """

    mutate: Mutation | None
    caught_by: str
    or_by: str = "$"
    model: str = "count"
    audited: bool = True


MUTANTS = {
    "one_staging_block": Mutant(mutants.one_staging_block, ""),
    "staging_has_no_fence": Mutant(
        # A step that runs on another's packet may reach outside its memory: a catch too.
        gpu_mutants.staging_has_no_fence,
        f"{PACKET}|{FAULT}",
    ),
    "staged_late": Mutant(mutants.staged_late, "ValueError: .*read-only"),
    "staged_late_unfrozen": Mutant(mutants.staged_late_unfrozen, TOKENS, READOUT),
    "one_result_block": Mutant(mutants.one_result_block, "InvariantError: a ring .* still in use"),
    "one_result_block_unchecked": Mutant(
        gpu_mutants.one_result_block_unchecked, f"{TOKENS}|{JUNK_RESULT}", BAD_TOKEN
    ),
    "result_block_released_at_submit": Mutant(
        gpu_mutants.result_block_released_at_submit, f"{TOKENS}|{JUNK_RESULT}", BAD_TOKEN
    ),
    "one_payload_block": Mutant(
        mutants.one_payload_block, "InvariantError: a ring .* still in use"
    ),
    "payload_block_released_at_submit": Mutant(mutants.payload_block_released_at_submit, READOUT),
    "copy_does_not_wait": Mutant(
        gpu_mutants.copy_does_not_wait, f"{TOKENS}|{JUNK_RESULT}", f"{BAD_TOKEN}|{READOUT}"
    ),
    "result_is_read_at_once": Mutant(
        gpu_mutants.result_is_read_at_once, f"{TOKENS}|{JUNK_RESULT}", f"{BAD_TOKEN}|{READOUT}"
    ),
    "retired_too_early": Mutant(
        gpu_mutants.retired_too_early, f"{TOKENS}|{JUNK_RESULT}", f"{BAD_TOKEN}|{READOUT}"
    ),
    "copy_lane_reads_state": Mutant(gpu_mutants.copy_lane_reads_state, TOKENS, READOUT),
    "snapshot_skipped": Mutant(gpu_mutants.snapshot_skipped, FOREIGN_STAMP, model="stamp"),
    "result_is_a_view": Mutant(mutants.result_is_a_view, VIEW),
    "result_is_an_unseen_view": Mutant(
        mutants.result_is_an_unseen_view, f"{TOKENS}|{JUNK_RESULT}", BAD_TOKEN
    ),
    "readout_is_a_view": Mutant(mutants.readout_is_a_view, VIEW),
    "rows_are_read_at_once": Mutant(mutants.rows_are_read_at_once, READOUT),
    "tenant_not_sent": Mutant(mutants.tenant_not_sent, STALE, audited=False),
    "released_in_flight": Mutant(mutants.released_in_flight, FREED, STALE),
    "released_in_flight-unaudited": Mutant(mutants.released_in_flight, STALE, audited=False),
    "stale_handle_accepted": Mutant(
        gpu_mutants.stale_handle_accepted,
        f"{TOKENS}|{READOUT}|{LOST_COUNT}",
        FOREIGN_ROWS,
        audited=False,
    ),
    "retracted_in_flight": Mutant(mutants.retracted_in_flight, STALE, audited=False),
    "pages_released_in_flight": Mutant(mutants.pages_released_in_flight, FREED),
    "pages_released_before_the_gather": Mutant(mutants.pages_released_before_the_gather, FREED),
    "published_when_planned": Mutant(mutants.published_when_planned, SHARED),
    "published_with_last_token": Mutant(mutants.published_with_last_token, SHARED),
}

Play = Callable[[int], str | None]


def scenario_play(model: Model, *, depth: int, audited: bool, graphs: bool) -> Play:
    """Return what plays the scenario of a seed and says how it went wrong; None if it did not."""

    def play_one(seed: int) -> str | None:
        fixed = SHAPE | {
            "depth": depth,
            "graphs": graphs,
            "num_pages": 16 + (0, 1, 4, 64)[seed % 4],
        }
        scenario = random_scenario(model.quiz, seed, **fixed)
        device = sleepy_gpu(seed)
        make = gpu_executor(model.folder, device)
        # An engine's own thread is adopted, others that submit are not.
        thread = device.adopt_thread() if seed % 2 else nullcontext()
        try:
            with thread:
                outputs = play(scenario, model.folder, device, audited=audited, make_executor=make)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        lanes = (device.compute, device.copy)
        assert sum(lane.num_sleeps for lane in lanes if isinstance(lane, SleepyLane))
        try:
            check(scenario, model.quiz, outputs)
        except AssertionError as error:
            return f"output: {error}"
        return None

    return play_one


def stamp_play(*, depth: int) -> Play:
    """Return what checks that each step of FX-STAMP takes its own rows away."""

    def make_runner(config: Any, model: Any, device: Device) -> CudaRunner:
        runner = CudaRunner(config, model, device, load_kernels("triton", device.torch_device))
        torch.cuda.synchronize()
        return runner

    def play_one(seed: int) -> str | None:
        stepper = stepper_of(sleepy_gpu(seed), make_runner=make_runner, depth=depth)
        watched = stepper.loop.executor = SnapshotEveryStep(stepper)
        for i in range(4):
            prompt = [(5 * i + j) % 29 + 3 for j in range(4 * i + 3)]
            stepper.add(prompt, capture=("experts",), max_new_tokens=9, temperature=0.0)
        try:
            stepper.run()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        assert watched.num_checked > 50
        stepper.close()
        return None

    return play_one


def catches(play_one: Play, seeds: range, *, until: str) -> Iterator[str | None]:
    """Yield how each seed went, until one went so.

    After a fault of the GPU there is nothing left to play on.
    """
    for seed in seeds:
        found = play_one(seed)
        yield found
        if found is not None and re.match(f"{until}|{FAULT}" if until else FAULT, found):
            return


class Stage:
    """Plays mutants, one after another, on models that it makes once, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, Model] = {}
        self._backend = torch.cuda.memory.get_allocator_backend()
        self._graphs = self._backend != "cudaMallocAsync"  # with which they are refused

    def run(
        self, name: str, *, depth: int = 1, num_seeds: int = 6, until_caught: bool = False
    ) -> dict[str, object]:
        """Play ``healthy`` on all models, or a mutant on its own, and return what was seen.

        ``until_caught`` leaves out the seeds after the first that catches it as it should be.
        """
        started, mutant = time.perf_counter(), MUTANTS.get(name)
        models = [*MAKERS, "stamp"] if mutant is None else [mutant.model]
        audited = mutant is None or mutant.audited
        until = mutant.caught_by if mutant is not None and until_caught else ""
        found: dict[str, list[str | None]] = {}
        with MonkeyPatch.context() as patch:
            if mutant is not None and mutant.mutate is not None:
                mutant.mutate(patch)
            for model in models:
                play_one = self._play_of(model, depth=depth, audited=audited)
                seen = catches(play_one, range(num_seeds), until=until)
                found[model] = list(seen)
        return {
            "mutant": name,
            "depth": depth,
            "allocator": os.environ.get("PYTORCH_ALLOC_CONF", "default"),
            "backend": self._backend,
            "graphs": [model for model in models if self._graphs and model != "stamp"],
            "found": found,
            "has_gpu": _has_gpu(),
            "seconds": round(time.perf_counter() - started, 2),
        }

    def _play_of(self, name: str, *, depth: int, audited: bool) -> Play:
        if name == "stamp":
            return stamp_play(depth=depth)
        if name not in self._models:
            made = MAKERS[name](self._folder / name)
            self._models[name] = Model(name, made, oracle=partial(Oracle, made))
        model = self._models[name]
        return scenario_play(model, depth=depth, audited=audited, graphs=self._graphs)


def _has_gpu() -> bool:
    """Return whether the GPU still answers this process."""
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError:
        return False
    return True


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=["healthy", *MUTANTS])
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        if args.name is not None:
            print(json.dumps(stage.run(args.name, depth=args.depth, num_seeds=args.seeds)))
        for asked in sys.stdin if args.name is None else ():
            line = stage.run(**json.loads(asked))
            print(json.dumps(line), flush=True)
            if not line["has_gpu"]:
                break
    sys.stdout.flush()
    os._exit(0)  # a GPU that has failed would complain at each destructor


if __name__ == "__main__":
    main()
