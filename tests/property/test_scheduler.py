"""The scheduler against thousands of workloads: every request gets the script's answer, once.

Rules of the design that an in-order device would not show are checked between the steps
(``tests.support.referee``). At the end the scheduler is broken on purpose, in many ways
(``tests.property.scheduler_mutants``), and each must be noticed.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from dovetail.wire.request import CaptureParams, LogprobParams
from tests.property.scheduler_mutants import MUTANTS
from tests.support.referee import CONTEXT_LEN, Job, Workload, run_workload
from tests.support.scripted import MAX_TOP, VOCAB_SIZE

STOPS = ("aab", "xx", "bx", "yb", "zz")


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    # Prompts share beginnings, so that prefixes meet.
    prompt = [1] * draw(st.integers(0, 20)) + draw(st.lists(st.integers(3, 5), max_size=6))
    prompt = prompt or [draw(st.integers(0, VOCAB_SIZE - 1))]
    sampling = {
        "max_new_tokens": draw(st.integers(0, CONTEXT_LEN - len(prompt))),
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([None, (6,), (7, 8)])),
        "stop": draw(st.sampled_from([None, None, *STOPS, STOPS[:3]])),
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "logit_bias": draw(st.sampled_from([None, {3: 1.0}, dict.fromkeys(range(20), 0.5)])),
    }
    return Job(
        prompt=tuple(prompt),
        sampling=sampling,
        arrives_at=draw(st.integers(0, 12)),
        aborted_after=draw(st.none() | st.integers(0, 25)),
        capture=draw(captures(len(prompt))),
        logprobs=draw(scores(len(prompt))),
        group=draw(st.sampled_from([None, None, "a", "b"])),
        priority=draw(st.integers(-1, 1)),
        is_streamed=draw(st.booleans()),
    )


@st.composite
def captures(draw: st.DrawFn, prompt_len: int) -> CaptureParams:
    if draw(st.booleans()):
        return CaptureParams()
    return CaptureParams(
        columns=("tokens",),
        start_len=draw(st.sampled_from([0, 0, 0, prompt_len // 2, prompt_len])),
        interval=draw(st.sampled_from([0, 0, 0, 2, 7])),
    )


@st.composite
def scores(draw: st.DrawFn, prompt_len: int) -> LogprobParams:
    if draw(st.booleans()):
        return LogprobParams()
    return LogprobParams(
        kind=draw(st.sampled_from(["scaled", "raw"])),
        logprob_start_len=draw(st.sampled_from([-1, 0, prompt_len // 2, prompt_len])),
        top_logprobs_num=draw(st.integers(0, MAX_TOP)),
        token_ids_logprob=tuple(draw(st.lists(st.integers(0, 9), max_size=MAX_TOP))),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    page_size = draw(st.sampled_from([1, 4, 16]))
    least = -(-CONTEXT_LEN // page_size)
    config = {
        "context_len": CONTEXT_LEN,
        "page_size": page_size,
        "num_pages": least + draw(st.just(0) | st.integers(0, least)),
        "chunk_size": draw(st.sampled_from([1, 3, 8, CONTEXT_LEN])),
        "max_running": draw(st.integers(1, 6)),
        "depth": draw(st.integers(0, 3)),
        "prefix_cache": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority", "longest-prefix"])),
        "max_payload_bytes": draw(st.sampled_from([None, None, 1 << 20])),
    }
    return Workload(
        config=config,
        jobs=tuple(draw(st.lists(jobs(), min_size=1, max_size=8))),
        retract_at=frozenset(draw(st.just([]) | st.lists(st.integers(1, 60), max_size=4))),
        refit_at=frozenset(draw(st.just([]) | st.lists(st.integers(0, 30), max_size=2))),
        group_aborts=frozenset(
            draw(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab")), max_size=1))
        ),
        num_failing=draw(st.sampled_from([0, 0, 3])),
        share=draw(st.sampled_from([None, 0.0])),
        most_new=draw(st.sampled_from([1, 2, 5, 64])),
        look_every=draw(st.sampled_from([1, 7, 1000])),
    )


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_every_schedule_gives_the_answers_of_the_script(workload):
    run_workload(workload)


def test_the_workloads_reach_the_hard_cases():
    """What the property is about does happen: retraction, hits, evictions, all finishes."""
    seen: dict[str, int] = {}

    @settings(max_examples=350, deadline=None, derandomize=True, database=None)
    @given(workloads())
    def survey(workload):
        referee = run_workload(workload)
        outputs = referee.stepper.all_outputs
        stats = referee.stepper.ledger.stats()
        for output in outputs:
            seen[output.finish.type] = seen.get(output.finish.type, 0) + 1
        counts = {
            "retracted": sum(output.usage.num_retractions for output in outputs),
            "retracted for want of pages": sum(
                output.usage.num_retractions
                for output in outputs
                if not workload.retract_at | workload.refit_at
            ),
            "aborted with tokens": sum(
                output.finish.type == "abort" and len(output.token_ids) > 0 for output in outputs
            ),
            "stop string": sum(isinstance(output.finish.matched, str) for output in outputs),
            "hit": stats.hit_tokens,
            "evictions": stats.evictions,
            "several samples": sum(len(s) > 1 for s in referee.stepper.samples.values()),
            "prompt scores": sum(o.prompt_scores is not None for o in outputs),
            "prompt scores of a retracted one": sum(
                o.prompt_scores is not None and o.usage.num_retractions > 0 for o in outputs
            ),
            "prompt scores after a hit": sum(
                o.prompt_scores is not None and o.usage.cached_tokens > 0 for o in outputs
            ),
            "top of a retracted one": sum(
                bool(o.top) and o.usage.num_retractions > 0 for o in outputs
            ),
            "refits under way": referee.stepper.scheduler.epoch,
            "groups aborted": sum(
                job.group in {label for _, label in workload.group_aborts} for job in workload.jobs
            ),
        }
        for name, count in counts.items():
            seen[name] = seen.get(name, 0) + count

    survey()
    assert min(seen.values()) >= 5 and len(seen) == 17, seen


# -- the scheduler, broken on purpose -------------------------------------------------------


def hunt() -> None:
    """Play the same workloads every time; the first that goes wrong raises."""

    @settings(
        max_examples=500,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(workloads())
    def play(workload):
        run_workload(workload)

    play()


def test_the_hunt_finds_nothing_in_the_scheduler_as_it_is():
    hunt()


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_broken_scheduler_is_noticed(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(Exception) as caught:
        hunt()
    # Else the mutant does not fit the code any more, and nothing was put to the test.
    assert not isinstance(caught.value, TypeError | AttributeError | NameError), caught.value
    print(type(caught.value).__name__, str(caught.value)[:200])
