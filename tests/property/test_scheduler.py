"""The scheduler against thousands of workloads: every request gets the script's answer, once.

Rules of the design that an in-order device would not show are checked between the steps
(``tests.support.referee``). At the end the scheduler is broken on purpose, in many ways, and each
must be noticed.
"""

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from dovetail.cache.ledger import KVLedger
from dovetail.core.mailbox import Outbox
from dovetail.sched import builder as builder_module
from dovetail.sched import scheduler as scheduler_module
from dovetail.sched.admission import PrefixHolds
from dovetail.sched.builder import PlanBuilder
from dovetail.sched.finish import ABORTED
from dovetail.sched.plan import FROM_DEVICE, ROW_FIELDS
from dovetail.sched.progress import NEVER, Progress
from dovetail.sched.running import RunningSequences
from dovetail.sched.scheduler import Scheduler
from dovetail.sched.sequence import Sequence, SequenceState, TokenRecord
from dovetail.sched.slots import SlotTable
from dovetail.wire.request import CaptureParams, LogprobParams
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


def wrap(owner: type, name: str, make: Callable) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutant that replaces ``owner.name`` by ``make(original)``."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def release_before_the_last_step_retires(original):
    def decide_finish(self, sequence, reason):
        events = original(self, sequence, reason)
        if sequence.holding is not None:
            self._ledger.release(sequence.holding)
            sequence.holding = self._ledger.open(b"", [], max_cached=0)
        return events

    return decide_finish


def publish_before_commit(original):
    def plan_chunk(self, builder, sequence, budget):
        width = original(self, builder, sequence, budget)
        self._ledger.publish(sequence.holding, sequence.known_ids, sequence.planned_len)
        return width

    return plan_chunk


def forget_what_is_in_flight(original):
    return property(lambda self: self.request.max_new_tokens - self.num_generated)


def requeue_nowhere(original):
    def requeue(self, sequence):
        self._give_up_memory(sequence)
        sequence.state = SequenceState.WAITING

    return requeue


def retract_the_oldest(original):
    return property(lambda self: next(iter(self), None))


def keep_pages_at_retraction(original):
    def start(self, holding, epoch):
        original(self, holding, epoch)
        if self.num_retractions:
            self.planned_len = self.computed_len = self.known_len - 1

    return start


def forget_the_record_at_retraction(original):
    def forget_memory(self):
        original(self)
        self._known_ids = list(self.request.prompt_token_ids)
        self._record = TokenRecord()

    return forget_memory


def leak_at_retraction(original):
    def requeue(self, sequence):
        self._ledger.open(b"", sequence.known_ids, max_cached=len(sequence.known_ids))
        original(self, sequence)

    return requeue


def tell_only_the_first_pages(original):
    def add_pages(self, sequence):
        if sequence.num_pages_sent == [0]:
            original(self, sequence)

    return add_pages


def commit_surplus_rows(original):
    def commit(self, plan, result):
        for sequence in self._leaving:
            if sequence.state is SequenceState.FINISHING and sequence.num_inflight:
                sequence.append(0, 0.0, 0, None)
        return original(self, plan, result)

    return commit


def abort_what_has_finished(original):
    def finish_open(self, sequences):
        events = []
        for sequence in sequences:
            if sequence.finish is not None and sequence.num_inflight == 0:
                sequence.finish = ABORTED
                events.append(self._end(sequence))
        return events + original(self, sequences)

    return finish_open


def finish_twice(original):
    def finish_open(self, sequences):
        for sequence in sequences:
            sequence.finish = None
        return original(self, sequences)

    return finish_open


def one_last_event_for_all_samples(original):
    def end(self, sequence):
        event = original(self, sequence)
        self._open._sequences.pop(sequence.request.request_id, None)
        return event

    return end


def forget_the_label(original):
    def end(self, sequence):
        if sequence.request.group is not None:
            self._open._groups[sequence.request.group].add(-1)
        return original(self, sequence)

    return end


def keep_old_pages(original):
    def begin_epoch(self, epoch):
        flush, self._ledger.flush = self._ledger.flush, lambda: None
        original(self, epoch)
        self._ledger.flush = flush

    return begin_epoch


def read_nothing(original):
    return lambda self: None


def score_again_after_retraction(original):
    def forget_memory(self):
        original(self)
        self.planned_score = 1

    return forget_memory


def lose_scores_in_flight(original):
    def retract(self):
        victim = original(self)
        if victim is not None:
            victim.scored = victim.planned_score
        return victim

    return retract


def prompt_scores_with_every_event(original):
    def news_of(sequence):
        emitted = sequence.num_emitted
        sequence.num_emitted = 0
        news = original(sequence)
        return type(news)(
            **{name: getattr(news, name) for name in news.__struct_fields__}
            | {name: getattr(news, name)[emitted:] for name in ("token_ids", "logprobs", "epochs")}
        )

    return news_of


def shift_the_targets(original):
    def build(self, **ids):
        self._targets = self._targets[1:] + self._targets[:1]
        return original(self, **ids)

    return build


def all_samples_alike(original):
    def slot_writes(tenants):
        writes = original(tenants)
        return type(writes)(
            **{name: getattr(writes, name) for name in writes.__slots__}
            | {"sample_index": np.zeros_like(writes.sample_index)}
        )

    return slot_writes


def hand_scores_to_the_neighbour(original):
    def commit(self, plan, result):
        sampled = original(self, plan, result)
        return {row: sampled[other] for row, other in zip(sampled, reversed(sampled), strict=True)}

    return commit


def reuse_the_whole_prompt(original):
    def open_holding(self, namespace, token_ids, *, max_cached):
        return original(self, namespace, token_ids, max_cached=max_cached and max_cached + 1)

    return open_holding


def prefill_first(original):
    def rows_of(self):
        rows = original(self)
        order = np.argsort(rows.start == FROM_DEVICE, kind="stable")
        return type(rows)(**{name: getattr(rows, name)[order] for name in ROW_FIELDS})

    return rows_of


def promise_no_room(original):
    def extend(self, sequence, num_tokens):
        return original(self, sequence, num_tokens - 1)

    return extend


def decode_while_leaving(original):
    def retract(self):
        victim = original(self)
        if victim is not None and victim.state is SequenceState.RETRACTING:
            victim.state = SequenceState.RUNNING
        return victim

    return retract


def look_for_no_end_ids(original):
    def needs_look(self, *rows):
        self._num_end_rows = 0
        return original(self, *rows)

    return needs_look


def look_for_no_length(original):
    def look_when_committed(self):
        original(self)
        if self._progress.commit_look_at[self.slot]:
            self._progress.commit_look_at[self.slot] = NEVER

    return look_when_committed


def keep_nothing_up(original):
    def look_when_committed(self):
        original(self)
        self._progress.upkeep_at[self.slot] = NEVER

    return look_when_committed


def tell_again_what_waited(original):
    def catch_up(self):
        emitted = self.num_emitted
        original(self)
        self.num_emitted = emitted

    return catch_up


def hand_tokens_to_the_neighbour(original):
    def commit_one(self, slots, token_ids, logprobs, epoch):
        return original(self, slots, token_ids[::-1], logprobs, epoch)

    return commit_one


MUTANTS = {
    "release at finish, without waiting": wrap(
        Scheduler, "_decide_finish", release_before_the_last_step_retires
    ),
    "sampled tokens in flight are forgotten": wrap(
        Sequence, "samples_left", forget_what_is_in_flight
    ),
    "publish before commit": wrap(Scheduler, "_plan_chunk", publish_before_commit),
    "retract without requeue": wrap(Scheduler, "_requeue", requeue_nowhere),
    "admit beyond the slots": wrap(SlotTable, "num_free", lambda _: property(lambda self: 1)),
    "retract the oldest": wrap(RunningSequences, "last", retract_the_oldest),
    "a retracted one goes on as if": wrap(Sequence, "start", keep_pages_at_retraction),
    "retraction restarts": wrap(Sequence, "forget_memory", forget_the_record_at_retraction),
    "retraction leaks": wrap(Scheduler, "_requeue", leak_at_retraction),
    "new pages are not told": wrap(PlanBuilder, "add_pages", tell_only_the_first_pages),
    "surplus tokens are kept": wrap(Scheduler, "commit", commit_surplus_rows),
    "abort after the end": wrap(Scheduler, "_finish_open", abort_what_has_finished),
    "abort again": wrap(Scheduler, "_finish_open", finish_twice),
    "one last event for all samples": wrap(Scheduler, "_end", one_last_event_for_all_samples),
    "labels are kept": wrap(Scheduler, "_end", forget_the_label),
    "streams are kept": wrap(Outbox, "_end_one", lambda _: lambda self, request_id: None),
    "a prefill holds others for ever": wrap(PrefixHolds, "remove", lambda _: lambda self, s: None),
    "prompts are scored again after a retraction": wrap(
        Sequence, "forget_memory", score_again_after_retraction
    ),
    "scores in flight are lost at a retraction": wrap(
        Scheduler, "retract_last", lose_scores_in_flight
    ),
    "a hit of tokens that are to be scored": wrap(
        Sequence, "max_cached_len", lambda _: property(lambda self: self.known_len - 1)
    ),
    "scores of another row": wrap(Scheduler, "_commit_prompt_scores", hand_scores_to_the_neighbour),
    "targets of another token": wrap(PlanBuilder, "build", shift_the_targets),
    "all samples have one noise": wrap(builder_module, "_slot_writes", all_samples_alike),
    "payload without bound": wrap(PlanBuilder, "max_scored", lambda _: lambda self, s: 10**6),
    "prompt scores come again": wrap(scheduler_module, "news_of", prompt_scores_with_every_event),
    "a hit of the whole prompt": wrap(KVLedger, "open", reuse_the_whole_prompt),
    "prefill rows first": wrap(PlanBuilder, "_rows", prefill_first),
    "no page for the next token": wrap(Scheduler, "_extend", promise_no_room),
    "a retracted sequence runs on": wrap(Scheduler, "retract_last", decode_while_leaving),
    "old pages under new weights": wrap(Scheduler, "begin_epoch", keep_old_pages),
    "end ids of steady rows are passed over": wrap(Progress, "needs_look", look_for_no_end_ids),
    "lengths of steady rows are passed over": wrap(
        Sequence, "look_when_committed", look_for_no_length
    ),
    "tokens wait without end": wrap(Sequence, "look_when_committed", keep_nothing_up),
    "tokens that waited are told again": wrap(Sequence, "catch_up", tell_again_what_waited),
    "tokens wait for another": wrap(Progress, "commit_one", hand_tokens_to_the_neighbour),
    "nobody is read out for new weights": wrap(Scheduler, "plan_leaving", read_nothing),
}


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
