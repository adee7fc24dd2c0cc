"""The scheduler against thousands of workloads: every request gets the script's answer, once.

The loop and the ledger are the engine's own; the device is scripted (``tests.support.scripted``)
and answers by what it finds in the pages. Between the steps, rules of the design are checked that
an in-order device would not show. At the end the scheduler is broken on purpose, in many ways, and
each must be noticed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from dovetail.cache.ledger import KVLedger
from dovetail.errors import InvariantError
from dovetail.exec.packet import PacketWriter, packet_schema
from dovetail.exec.pending import PendingStep
from dovetail.sched.builder import PlanBuilder
from dovetail.sched.finish import ABORTED
from dovetail.sched.plan import FROM_DEVICE, RowStatus, StepPlan
from dovetail.sched.scheduler import Scheduler
from dovetail.sched.sequence import Sequence, SequenceState, TokenRecord
from dovetail.sched.slots import SlotTable
from tests.support.scripted import EOS_ID, VOCAB_SIZE, PagedFake, Tokens, next_token, plain_config
from tests.support.stepper import Output, Stepper

CONTEXT_LEN = 40
TOKEN_BYTES = [b"ab"[i % 2 : i % 2 + 1] * (i % 3) + b"xyz"[i % 5 : i % 5 + 1] for i in range(32)]
STOPS = ("aab", "xx", "bx", "yb", "zz")


# -- workloads ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One request, when it comes, and when its client gives up (or None)."""

    prompt: tuple[int, ...]
    sampling: dict
    arrives_at: int
    aborted_after: int | None
    captures: bool


@dataclass(frozen=True)
class Workload:
    """A configuration, requests, and the steps after which the youngest is retracted."""

    config: dict
    jobs: tuple[Job, ...]
    retract_at: frozenset[int] = frozenset()
    num_failing: int = 0

    def status(self, token_ids: Tokens) -> RowStatus:
        """Some draws fail: how, depends on the tokens before alone."""
        failing = hash((7, *token_ids)) % 64 < self.num_failing
        return RowStatus.NON_FINITE if failing else RowStatus.OK


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    # Prompts share beginnings, so that prefixes meet.
    prompt = [1] * draw(st.integers(0, 20)) + draw(st.lists(st.integers(3, 5), max_size=6))
    prompt = prompt or [draw(st.integers(0, VOCAB_SIZE - 1))]
    room = CONTEXT_LEN - len(prompt)
    sampling = {
        "max_new_tokens": draw(st.just(room) | st.integers(0, room)),
        "ignore_eos": draw(st.sampled_from([True, True, False])),
        "stop_token_ids": draw(st.sampled_from([None, None, (6,), (7, 8)])),
        "stop": draw(st.sampled_from([None] * 6 + [*STOPS, STOPS[:3]])),
    }
    return Job(
        prompt=tuple(prompt),
        sampling=sampling,
        arrives_at=draw(st.integers(0, 12)),
        aborted_after=draw(st.none() | st.none() | st.integers(0, 25)),
        captures=draw(st.booleans()),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    page_size = draw(st.sampled_from([1, 4, 16]))
    least = -(-CONTEXT_LEN // page_size)
    config = {
        "context_len": CONTEXT_LEN,
        "page_size": page_size,
        "num_pages": least + draw(st.integers(0, least)),
        "chunk_size": draw(st.sampled_from([1, 3, 8, CONTEXT_LEN])),
        "max_running": draw(st.integers(1, 6)),
        "depth": draw(st.integers(0, 3)),
        "prefix_cache": draw(st.booleans()),
    }
    return Workload(
        config=config,
        jobs=tuple(draw(st.lists(jobs(), min_size=1, max_size=8))),
        retract_at=frozenset(draw(st.just([]) | st.lists(st.integers(1, 60), max_size=4))),
        num_failing=draw(st.sampled_from([0, 0, 2])),
    )


# -- what must come out ---------------------------------------------------------------------


@dataclass
class Answer:
    """The script's answer to a request."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = "length"
    matched: int | str | None = None


def answer_of(job: Job, status: Callable[[Tokens], RowStatus]) -> Answer:
    """Apply the documented rules, token by token, without any schedule."""
    answer, text = Answer(), b""
    stops = job.sampling["stop"] or ()
    stops = (stops,) if isinstance(stops, str) else stops
    while len(answer.token_ids) < job.sampling["max_new_tokens"]:
        context = [*job.prompt, *answer.token_ids]
        if status(context) is not RowStatus.OK:
            return Answer(answer.token_ids, "error")
        token = next_token(context)
        answer.token_ids.append(token)
        is_eos = token == EOS_ID and not job.sampling["ignore_eos"]
        if is_eos or token in (job.sampling["stop_token_ids"] or ()):
            return Answer(answer.token_ids, "stop", token)
        before, text = len(text), text + TOKEN_BYTES[token]
        for end in range(before + 1, len(text) + 1):
            ending = [stop for stop in stops if text[:end].endswith(stop.encode())]
            if ending:
                return Answer(answer.token_ids, "stop", max(ending, key=len))
    return answer


def check_output(job: Job, output: Output, want: Answer, config: dict) -> None:
    """A request has the script's answer, or the beginning of it if it was aborted."""
    assert output.finish is not None and output.usage is not None
    if output.finish.type == "abort":
        assert job.aborted_after is not None
        assert output.token_ids == want.token_ids[: len(output.token_ids)]
    else:
        got = (output.token_ids, output.finish.type, output.finish.matched)
        assert got == (want.token_ids, want.finish, want.matched)
    cached = output.usage.cached_tokens
    assert cached % config["page_size"] == 0 and cached < len(job.prompt)
    assert config["prefix_cache"] or not cached
    assert output.usage.prompt_tokens == len(job.prompt)
    if job.captures and output.finish.type in ("stop", "length"):
        forwarded = [*job.prompt, *output.token_ids][: len(job.prompt) + len(output.token_ids) - 1]
        if not job.sampling["max_new_tokens"]:
            forwarded = list(job.prompt)
        assert output.captured["tokens"].tolist() == forwarded
    elif job.captures and output.captured:
        seen = output.captured["tokens"].tolist()
        assert seen == [*job.prompt, *output.token_ids][: len(seen)]
    assert job.captures or not output.captured


# -- rules that hold at every step ----------------------------------------------------------


class Referee:
    """Runs a workload's plans on a scripted device and checks each of them."""

    def __init__(self, workload: Workload) -> None:
        self.config = plain_config(**workload.config)
        self.device = PagedFake(
            num_slots=self.config.max_running,
            page_size=self.config.page_size,
            status=workload.status,
        )
        schema = packet_schema(self.config)
        self._writer = PacketWriter(schema)
        self._words = np.zeros(schema.num_bytes // 4, dtype=np.int32)
        self.stepper = Stepper(self.config, self, token_bytes=TOKEN_BYTES.__getitem__)
        self._plan = self.stepper.scheduler.plan
        self.stepper.scheduler.plan = self.plan
        self.stepper.on_step = self.after_step
        self._records: dict[int, tuple[Sequence, TokenRecord, list[int]]] = {}

    def plan(self) -> StepPlan | None:
        """Let the scheduler plan; see that somebody gets on, and nobody goes too far."""
        scheduler = self.stepper.scheduler
        was_oldest = scheduler._running.oldest
        plan = self._plan()
        assert plan is not None or self.stepper.loop.inflight or not scheduler.num_open, "stalled"
        assert was_oldest is None or was_oldest in scheduler._running, "the oldest was retracted"
        oldest, pages_are_coming = scheduler._running.oldest, bool(scheduler._leaving)
        if oldest is not None and not pages_are_coming:
            is_planned = plan is not None and oldest.slot in plan.rows.slot
            could_be = oldest.may_sample or oldest.is_prefilling
            assert is_planned or not could_be, "the oldest sits idle"
        for sequence in scheduler._running:
            num_sampled = len(sequence.record) + sequence.pending_samples
            assert num_sampled <= sequence.request.max_new_tokens, "a surplus draw is planned"
        return plan

    def submit(self, plan: StepPlan) -> PendingStep:
        """Check the plan, run it, and check what it touched."""
        self.check_shape(plan)
        self.check_pages_of_flying_steps()
        pending = self.device.submit(plan)
        step = self.device.steps[plan.step_id]
        references = self.stepper.ledger._pools[0].ref_count
        assert all(references(page) == 1 for page in step.written), "writes a shared page"
        flying = {pending.plan.step_id for pending in self.stepper.loop.inflight}
        for page in step.reused:
            assert self.device.written_by[page] not in flying | {plan.step_id}, "not yet computed"
        return pending

    def close(self) -> None:
        """Nothing to let go of."""

    def check_shape(self, plan: StepPlan) -> None:
        """A plan fits its packet; each sequence is there once; decode rows come first."""
        rows, config = plan.rows, self.config
        self._writer.write(plan, self._words)
        assert len(set(rows.slot.tolist())) == len(rows) <= config.max_running
        assert len(set(plan.slot_writes.slot.tolist())) == len(plan.slot_writes)
        is_decode = rows.start == FROM_DEVICE
        assert (np.diff(is_decode.astype(int)) <= 0).all(), "a decode row after a prefill row"
        assert (rows.width > 0).all() and (rows.width[is_decode] == 1).all()
        assert rows.width[~is_decode].sum() == len(plan.token_ids) <= config.chunk_size
        assert plan.num_tokens <= config.max_step_tokens
        assert (rows.bound <= config.max_pages_per_sequence * config.page_size).all()

    def check_pages_of_flying_steps(self) -> None:
        """No page is free that a step in flight reads or writes."""
        references = self.stepper.ledger._pools[0].ref_count
        for pending in self.stepper.loop.inflight:
            for page in self.device.steps[pending.plan.step_id].read:
                assert references(page), f"page {page} is free, and a step in flight reads it"

    def after_step(self, _: int) -> None:
        """Pages in flight are kept, and no record has forgotten or changed a token."""
        self.check_pages_of_flying_steps()
        for request_id, sequence in self.stepper.scheduler._sequences.items():
            record = sequence.record
            assert len(record) == len(record.logprobs) == len(record.epochs)
            seen = self._records.setdefault(request_id, (sequence, record, []))
            assert seen[:2] == (sequence, record) and record.token_ids[: len(seen[2])] == seen[2]
            seen[2][:] = record.token_ids


def most_steps(workload: Workload) -> int:
    """Turns within which everybody ends, if the oldest always gets on."""
    latency = workload.config["depth"] + 2
    lengths = sum(len(job.prompt) + job.sampling["max_new_tokens"] for job in workload.jobs)
    restarts = (1 + len(workload.retract_at)) * lengths
    return 12 + latency * (restarts + 4 * len(workload.jobs))


def run_workload(workload: Workload) -> Referee:
    """Run to the end and check every rule."""
    referee = Referee(workload)
    stepper = referee.stepper
    todo = sorted(workload.jobs, key=lambda job: job.arrives_at)
    started: list[tuple[Job, int]] = []
    turn = 0
    while todo or stepper.is_busy:
        while todo and todo[0].arrives_at <= turn:
            job = todo.pop(0)
            capture = ("tokens",) if job.captures else ()
            started.append((job, stepper.add(job.prompt, capture=capture, **job.sampling)))
        for job, request_id in started:
            if job.aborted_after is not None and turn == job.arrives_at + job.aborted_after:
                stepper.abort(request_id)
        for request_id, sequence in stepper.scheduler._sequences.items():
            if sequence.state is SequenceState.FINISHING:
                stepper.abort(request_id)  # comes too late, always
        if stepper.is_busy:  # an idle loop would wait for a message
            if turn in workload.retract_at:
                stepper.scheduler.retract_youngest()
            stepper.step()
        turn += 1
        assert turn <= most_steps(workload), "somebody starves"
    stepper.check_idle()
    for job, request_id in started:
        want = answer_of(job, workload.status)
        check_output(job, stepper.outputs[request_id], want, workload.config)
    stepper.ledger.flush()
    stepper.ledger.check()
    assert stepper.ledger.stats().free == referee.config.num_pages
    return referee


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
def test_every_schedule_gives_the_answers_of_the_script(workload):
    run_workload(workload)


def test_the_workloads_reach_the_hard_cases():
    """What the property is about does happen: retraction, hits, evictions, all finishes."""
    seen: Counter[str] = Counter()

    @settings(max_examples=80, deadline=None, derandomize=True, database=None)
    @given(workloads())
    def survey(workload):
        referee = run_workload(workload)
        stats = referee.stepper.ledger.stats()
        counts = Counter(hits=stats.hit_tokens, evictions=stats.evictions)
        for output in referee.stepper.outputs.values():
            assert output.finish is not None and output.usage is not None
            counts[output.finish.type] += 1
            counts["stop string"] += isinstance(output.finish.matched, str)
            counts["aborted with tokens"] += output.finish.type == "abort" and output.num_events > 1
            counts["retracted"] += output.usage.num_retractions
            if not workload.retract_at:
                counts["retracted for want of pages"] += output.usage.num_retractions
        seen.update(counts)

    survey()
    assert min(seen.values()) >= 3 and len(seen) == 10, seen


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


def requeue_nowhere(original):
    def requeue(self, sequence):
        self._give_up_memory(sequence)
        sequence.state = SequenceState.WAITING

    return requeue


def retract_the_oldest(original):
    def retract(self):
        self._running, kept = type(self._running)(), self._running
        if kept.oldest is not None:
            self._running.add(kept.oldest)
        victim = original(self)
        if victim is not None:
            kept.remove(victim)
        self._running = kept
        return victim

    return retract


def recompute_the_prompt_alone(original):
    def open_sequence(self, sequence, builder):
        has_opened = original(self, sequence, builder)
        sequence.prefill_len = min(sequence.prefill_len, sequence.prompt_len)
        return has_opened

    return open_sequence


def forget_the_record_at_retraction(original):
    def forget_memory(self):
        original(self)
        self.known_ids = list(self.request.prompt_token_ids)
        self.record = TokenRecord()

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
        for sequence in self._leaving.values():
            if sequence.state is SequenceState.FINISHING and sequence.pending_samples:
                sequence.append(0, 0.0, 0)
        return original(self, plan, result)

    return commit


def abort_what_has_finished(original):
    def abort(self, request_id):
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.finish is not None:
            sequence.finish = ABORTED
            return [self._last_event(sequence)]
        return original(self, request_id)

    return abort


def reuse_the_whole_prompt(original):
    def open_holding(self, namespace, token_ids, *, max_cached):
        return original(self, namespace, token_ids, max_cached=max_cached and max_cached + 1)

    return open_holding


def prefill_first(original):
    def build(self, **ids):
        self._rows.sort(key=lambda row: row[2] == FROM_DEVICE)
        return original(self, **ids)

    return build


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


MUTANTS = {
    "release at finish, without waiting": wrap(
        Scheduler, "_decide_finish", release_before_the_last_step_retires
    ),
    "sampled tokens in flight are forgotten": wrap(
        Sequence,
        "may_sample",
        lambda _: property(lambda self: len(self.record) < self.request.max_new_tokens),
    ),
    "publish before commit": wrap(Scheduler, "_plan_chunk", publish_before_commit),
    "retract without requeue": wrap(Scheduler, "_requeue", requeue_nowhere),
    "admit beyond the slots": wrap(SlotTable, "num_free", lambda _: property(lambda self: 1)),
    "retract the oldest": wrap(Scheduler, "retract_youngest", retract_the_oldest),
    "output is not recomputed": wrap(Scheduler, "_open", recompute_the_prompt_alone),
    "retraction restarts": wrap(Sequence, "forget_memory", forget_the_record_at_retraction),
    "retraction leaks": wrap(Scheduler, "_requeue", leak_at_retraction),
    "new pages are not told": wrap(PlanBuilder, "add_pages", tell_only_the_first_pages),
    "surplus tokens are kept": wrap(Scheduler, "commit", commit_surplus_rows),
    "abort after the end": wrap(Scheduler, "abort", abort_what_has_finished),
    "a hit of the whole prompt": wrap(KVLedger, "open", reuse_the_whole_prompt),
    "prefill rows first": wrap(PlanBuilder, "build", prefill_first),
    "no page for the next token": wrap(Scheduler, "_extend", promise_no_room),
    "a retracted sequence runs on": wrap(Scheduler, "retract_youngest", decode_while_leaving),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_broken_scheduler_is_noticed(mutant, monkeypatch):
    @settings(
        max_examples=400,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        report_multiple_bugs=False,
    )
    @given(workloads())
    def hunt(workload):
        run_workload(workload)

    mutant(monkeypatch)
    # A page that the device was not told is a KeyError there; too many tenants, an IndexError.
    with pytest.raises((AssertionError, InvariantError, KeyError, IndexError)):
        hunt()
