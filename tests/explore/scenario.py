"""What happens in one run of the explorer, as a function of a seed, and how it is played.

The seed decides everything: requests, page size, chunk size, depth, pool size, arrivals, aborts,
forced retractions, and in which legal order a ``SimDevice`` runs what was submitted.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dovetail.config.schema import EngineConfig
from dovetail.exec.device import Device
from dovetail.exec.executor import Executor
from dovetail.exec.pending import StepExecutor
from dovetail.sched import sequence
from dovetail.wire.request import CaptureParams
from tests.explore.audit import PlanAudit, PoisonedPages
from tests.explore.devices import DEVICES
from tests.explore.questions import CONTEXT_LEN, Question, Quiz, quiz_of
from tests.support.compare import assert_logprobs, assert_same_routes, assert_same_tokens
from tests.support.harness import Harness, Output
from tests.support.oracle import Oracle

UNKNOWN_ID = 10_000


class Model:
    """A fixture model: its name, its folder and the questions that it can be asked."""

    def __init__(self, name: str, folder: Path, *, oracle: Callable[[], Oracle]) -> None:
        self.name = name
        self.folder = folder
        self.quiz = quiz_of(name, oracle)


@dataclass(frozen=True)
class Job:
    """One request of a scenario.

    Attributes:
        question: what is asked.
        start: turn of the loop before which it arrives.
        aborts: turns before which it is aborted; it may have ended by then.
        capture: whether the captured columns are read out.
        interval: of rows that leave while it runs.
    """

    question: Question
    start: int
    aborts: tuple[int, ...]
    capture: bool
    interval: int


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        seed: where it comes from; also of the device.
        options: of the engine.
        jobs: the requests.
        retractions: turns before which the running sequence last in line loses its memory.
    """

    seed: int
    options: dict[str, Any]
    jobs: tuple[Job, ...]
    retractions: frozenset[int]


def random_scenario(quiz: Quiz, seed: int, **fixed: Any) -> Scenario:
    """Return the scenario of a seed; ``fixed`` are engine options that are not left to it."""
    rng = random.Random(seed)
    page_size = rng.choice((1, 4, 16))
    least_pages = CONTEXT_LEN // page_size
    options = {
        "dtype": "float32",
        "context_len": CONTEXT_LEN,
        "depth": rng.choice((0, 1, 1, 1, 2, 2)),
        "page_size": page_size,
        "num_pages": least_pages + rng.choice((0, 1, 16 // page_size, 4 * least_pages)),
        "chunk_size": rng.choice((4, 7, 16, -1)),
        "max_running": rng.choice((2, 3, 5, 8)),
        "prefix_cache": rng.random() < 0.85,
        "capture": quiz.columns,
    }
    questions = quiz.questions(rng, rng.randint(3, 9))
    last_start = rng.choice((2, 2, 8, 40))  # many arrivals at once, or now and then
    jobs = []
    for start, question in zip(
        sorted(rng.randint(0, last_start) for _ in questions), questions, strict=True
    ):
        first_abort = start + rng.randint(0, 25)
        aborts = (first_abort, first_abort + rng.randint(0, 2)) if rng.random() < 0.25 else ()
        capture = rng.random() < 0.6
        interval = random.Random(f"{seed} {len(jobs)}").choice((0, 0, 1, 5))
        jobs.append(Job(question, start, aborts, capture, interval))
    count = rng.choice((0, 0, 2, 6))
    retractions = frozenset(rng.randint(1, 60) for _ in range(count))
    return Scenario(seed, options | fixed, tuple(jobs), retractions)


def explore(
    model: Model, seeds: Iterable[int], device: str = "sim", *, depth: int | None = None
) -> list[Output]:
    """Play the scenario of each seed, check the outputs and return them; an error names the seed.

    ``device`` is a name of ``DEVICES``; a depth that is not given is the seed's.
    """
    fixed = {} if depth is None else {"depth": depth}
    seen: list[Output] = []
    for seed in seeds:
        try:
            scenario = random_scenario(model.quiz, seed, **fixed)
            outputs = play(scenario, model.folder, DEVICES[device](seed))
            check(scenario, model.quiz, outputs)
        except Exception as error:
            options = f"--device {device}" + ("" if depth is None else f" --depth {depth}")
            error.add_note(f"again: python -m tests.explore {model.name} {seed} {options}")
            raise
        seen += outputs
    return seen


def play(
    scenario: Scenario,
    folder: Path,
    device: Device,
    *,
    audited: bool = True,
    make_executor: Callable[[EngineConfig], StepExecutor] | None = None,
) -> list[Output]:
    """Run a scenario on a model and return what each job got.

    KV starts as NaN and does so again whenever a page changes hands. After every turn the ledger
    and, if ``audited``, all plans in flight are checked; at the end every page must be free.
    ``make_executor`` is that of ``device`` if it is not one that runs on the CPU.
    """
    harness = Harness(folder, device=device, make_executor=make_executor, **scenario.options)
    assert isinstance(harness.executor, Executor)
    harness.loop.executor = PoisonedPages(harness.executor, harness.ledger)
    if audited:
        audit = PlanAudit(harness.loop.executor, harness.ledger)
        harness.loop.executor = audit
        harness.on_step = lambda _: audit.check()
    try:
        # Sequences are short here, and some of their rows are to be read ahead, too.
        with mock.patch.multiple(sequence, EARLY_ROWS=3, LATE_ROWS=2):
            outputs = _play(scenario, harness)
    except BaseException:
        with contextlib.suppress(Exception):  # what is left may fail as well
            harness.close()
        raise
    harness.close()
    harness.check_idle()
    harness.ledger.flush()
    assert harness.ledger.stats().free == harness.config.num_pages
    return outputs


def _play(scenario: Scenario, harness: Harness) -> list[Output]:
    jobs, ids = scenario.jobs, dict[int, int]()
    last_turn = max((job.start for job in jobs), default=0)
    turn = 0
    while turn <= last_turn or harness.is_busy:
        for index, job in enumerate(jobs):
            if turn in job.aborts:  # before the arrival it is an id that does not exist
                harness.abort(ids.get(index, UNKNOWN_ID))
            if turn == job.start:
                columns = ("tokens", *scenario.options["capture"]) if job.capture else ()
                capture = CaptureParams(columns=columns, interval=job.interval)
                question = job.question
                ids[index] = harness.add(question.prompt, capture=capture, **question.sampling)
        if turn in scenario.retractions:
            harness.scheduler.retract_last()
        if harness.is_busy:
            harness.step()
        turn += 1
    return [harness.outputs[ids[index]] for index in range(len(jobs))]


def check(scenario: Scenario, quiz: Quiz, outputs: list[Output]) -> None:
    """Compare every output with the right answer."""
    for number, (job, output) in enumerate(zip(scenario.jobs, outputs, strict=True)):
        _check_output(job, quiz, output, context=f"request {number} of {len(outputs)}")


def _check_output(job: Job, quiz: Quiz, output: Output, *, context: str) -> None:
    question, finish, usage = job.question, output.finish, output.usage
    assert finish is not None and usage is not None
    assert finish.type != "error", f"{context}: {finish}"
    assert job.aborts or finish.type != "abort", f"{context}: {finish}"
    right = quiz.answer(question)
    if finish.type == "abort":
        right = _beginning(right, len(output.token_ids))
    count = assert_same_tokens(output.token_ids, right, context=context)
    assert_logprobs(output.logprobs[:count], right.logprobs[:count], context=context)
    if finish.type != "abort" and count == len(right.token_ids):
        assert finish.type == right.finish, f"{context}: {finish} instead of {right.finish}"
    assert usage.prompt_tokens == len(question.prompt), context
    assert usage.cached_tokens < len(question.prompt), context
    forwarded = np.array([*question.prompt, *output.token_ids][: _num_forwarded(job, output)])
    captured = output.captured.get("tokens", forwarded[:0])
    if finish.type == "abort":
        forwarded = forwarded[: len(captured)]
    if job.capture and quiz.columns and len(forwarded):
        experts = output.captured["experts"]
        assert_same_routes(experts, quiz.routing(tuple(forwarded.tolist())), context=context)
    if job.capture:
        np.testing.assert_array_equal(captured, forwarded, err_msg=context)
    else:
        assert output.captured == {}, context


def _num_forwarded(job: Job, output: Output) -> int:
    """All tokens but the last one, which was sampled and never an input."""
    return len(job.question.prompt) + max(len(output.token_ids) - 1, 0)


def _beginning(answer: Any, count: int) -> Any:
    """The answer of a request that was stopped after ``count`` tokens."""
    columns = ("token_ids", "logprobs", "gaps", "border_gaps", "router_gaps")
    return dataclasses.replace(answer, **{name: getattr(answer, name)[:count] for name in columns})
