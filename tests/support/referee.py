"""Workloads for the scheduler, the script's answers to them, and rules that hold at every step.

Owns what must come out whatever the schedule was, and what a plan may touch. The loop and the
ledger are the engine's own; the device is scripted (``tests.support.scripted``). Imports no torch.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import numpy as np

from dovetail.config.capture import ColumnSpec
from dovetail.config.payload import readout_bytes, sample_score_bytes, score_bytes
from dovetail.core.control import Refit
from dovetail.exec.packet import PacketWriter, packet_schema
from dovetail.exec.pending import PendingStep
from dovetail.exec.readback import payload_layout
from dovetail.sched import progress
from dovetail.sched import sequence as sequence_module
from dovetail.sched.plan import FROM_DEVICE, RowStatus, StepPlan
from dovetail.sched.scheduler import Scheduler
from dovetail.sched.sequence import Sequence, SequenceState
from dovetail.wire.request import CaptureParams, LogprobParams
from dovetail.wire.result import FinishReason, Scores
from tests.support.scripted import (
    EOS_ID,
    PagedFake,
    as_sample,
    asked_of,
    logprob_of,
    next_token,
    plain_config,
    top_of,
)
from tests.support.stepper import Output, Stepper

CONTEXT_LEN = 40
NOTHING_ASKED, NOTHING_CAPTURED = LogprobParams(), CaptureParams()
TOKEN_BYTES = [b"ab"[i % 2 : i % 2 + 1] * (i % 3) + b"xyz"[i % 5 : i % 5 + 1] for i in range(32)]
COLUMNS = {"tokens": ColumnSpec(np.dtype(np.int32), (), -1)}


# -- workloads ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One request, when it comes, and when its client gives up (or None)."""

    prompt: tuple[int, ...]
    sampling: dict
    arrives_at: int = 0
    aborted_after: int | None = None
    capture: CaptureParams = NOTHING_CAPTURED
    logprobs: LogprobParams = NOTHING_ASKED
    group: str | None = None
    priority: int = 0
    is_streamed: bool = True


@dataclass(frozen=True)
class Workload:
    """A configuration and what happens to it.

    Attributes:
        config: of ``plain_config``.
        jobs: the requests.
        retract_at: turns before which the last in line is retracted.
        refit_at: turns that begin with new weights.
        group_aborts: (turn, label) of aborts of whole groups.
        num_failing: of 64 draws, how many fail.
        share: what the scheduler believes of output lengths; 0 admits too many. None: its guess.
        most_new: tokens that may wait before a record takes them.
        look_every: turns between two looks at the records, which then take what waits.
    """

    config: dict
    jobs: tuple[Job, ...]
    retract_at: frozenset[int] = frozenset()
    refit_at: frozenset[int] = frozenset()
    group_aborts: frozenset[tuple[int, str]] = frozenset()
    num_failing: int = 0
    share: float | None = None
    most_new: int = 64
    look_every: int = 1

    def status(self, token_ids: list[int]) -> RowStatus:
        """Some draws fail: how, depends on the tokens before alone."""
        failing = hash((7, *token_ids)) % 64 < self.num_failing
        return RowStatus.NON_FINITE if failing else RowStatus.OK

    def aborts(self, job: Job) -> bool:
        """True if somebody gives the request up."""
        return job.aborted_after is not None or any(
            label == job.group for _, label in self.group_aborts
        )


# -- what must come out ---------------------------------------------------------------------


@dataclass
class Answer:
    """The script's answer to a request."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = "length"
    matched: int | str | None = None


def answer_of(job: Job, sample_index: int, status: Callable[[list[int]], RowStatus]) -> Answer:
    """Apply the documented rules, token by token, without any schedule."""
    answer, text = Answer(), b""
    stops = job.sampling.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else stops
    while len(answer.token_ids) < job.sampling["max_new_tokens"]:
        context = [*job.prompt, *answer.token_ids]
        if status(context) is not RowStatus.OK:
            return Answer(answer.token_ids, "error")
        token = next_token(as_sample(context, sample_index))
        answer.token_ids.append(token)
        is_eos = token == EOS_ID and not job.sampling.get("ignore_eos")
        if is_eos or token in (job.sampling.get("stop_token_ids") or ()):
            return Answer(answer.token_ids, "stop", token)
        before, text = len(text), text + TOKEN_BYTES[token]
        for end in range(before + 1, len(text) + 1):
            ending = [stop for stop in stops if text[:end].endswith(stop.encode())]
            if ending:
                return Answer(answer.token_ids, "stop", max(ending, key=len))
    return answer


def check_output(
    job: Job, output: Output, want: Answer, config: dict, *, may_be_aborted: bool
) -> None:
    """A generation has the script's answer, or the beginning of it if it was aborted."""
    assert output.finish is not None and output.usage is not None
    if output.finish.type == "abort":
        assert may_be_aborted
        assert output.token_ids == want.token_ids[: len(output.token_ids)]
    else:
        got = (output.token_ids, output.finish.type, output.finish.matched)
        assert got == (want.token_ids, want.finish, want.matched)
    _check_usage(job, output, config)
    _check_capture(job, output)
    _check_scores(job, output)


def _check_usage(job: Job, output: Output, config: dict) -> None:
    assert output.usage is not None
    cached, start = output.usage.cached_tokens, job.logprobs.logprob_start_len
    assert cached % config["page_size"] == 0 and cached < len(job.prompt)
    assert config["prefix_cache"] or not cached
    if 0 <= start < len(job.prompt) - 1:
        assert cached < max(start, 1), "a cached token whose successor's logprob is asked for"
    assert output.usage.prompt_tokens == len(job.prompt)


def _check_capture(job: Job, output: Output) -> None:
    assert output.finish is not None
    start = job.capture.start_len
    if not job.capture.columns:
        assert not output.captured
    elif output.finish.type in ("stop", "length"):
        forwarded = [*job.prompt, *output.token_ids][: len(job.prompt) + len(output.token_ids) - 1]
        if not job.sampling["max_new_tokens"]:
            forwarded = list(job.prompt)
        assert output.captured["tokens"].tolist() == forwarded[start:]
    elif output.captured:
        seen = output.captured["tokens"].tolist()
        assert seen == [*job.prompt, *output.token_ids][start : start + len(seen)]


def _check_scores(job: Job, output: Output) -> None:
    """Each score is that of its very context, once, in order."""
    assert output.finish is not None
    asked, prompt = job.logprobs, list(job.prompt)
    num_top, num_ids = asked.top_logprobs_num, len(asked.token_ids_logprob)
    contexts = [[*prompt, *output.token_ids[:i]] for i in range(len(output.token_ids))]
    wanted = [top_of(context, num_top) for context in contexts]
    assert output.top == (wanted if num_top else [])
    asked_for = [asked_of(context, num_ids) for context in contexts]
    assert output.id_logprobs == (asked_for if num_ids else [])
    start = asked.logprob_start_len
    positions = range(max(start, 1), len(prompt)) if start >= 0 else range(0)
    got = output.prompt_scores or Scores()
    if output.finish.type == "abort":
        positions = positions[: len(got.logprobs)]
    assert got.logprobs == tuple(logprob_of(prompt[:p], prompt[p]) for p in positions)
    tops = [top_of(prompt[:p], num_top) for p in positions if num_top]
    assert got.top_ids == tuple(ids for ids, _ in tops)
    assert got.top_logprobs == tuple(values for _, values in tops)
    asked_for = [asked_of(prompt[:p], num_ids) for p in positions if num_ids]
    assert got.id_logprobs == tuple(asked_for)


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
        with mock.patch.object(progress, "MOST_NEW", workload.most_new):
            self.stepper = Stepper(self.config, self, token_bytes=TOKEN_BYTES.__getitem__)
        self._look_every = workload.look_every
        if workload.share is not None:
            self.stepper.scheduler._lengths.share = workload.share
        self._plan = self.stepper.scheduler.plan
        self.stepper.scheduler.plan = self.plan
        self.stepper.on_step = self.after_step
        self._columns: dict[Sequence, dict[str, list]] = defaultdict(dict)
        self._epoch = self.stepper.scheduler.epoch
        self.decided: dict[Sequence, FinishReason] = {}
        self.asked: list[tuple[int, int, int]] = []  # read-outs, scores of prompts, of samples
        self._num_drawn: Counter[Sequence] = Counter()

    def plan(self) -> StepPlan | None:
        """Let the scheduler plan, and see that somebody gets on."""
        scheduler = self.stepper.scheduler
        before = list(scheduler._running)
        plan = self._plan()
        check_victims(before)
        assert plan is not None or self.stepper.loop.inflight or not scheduler.num_open, "stalled"
        first = next(iter(scheduler._running), None)
        # Pages, or room in the payload, may be on their way; a newcomer finds the payload used.
        must_wait = bool(scheduler._leaving) or (
            plan is not None and first is not None and is_short_of_payload(plan, first.slot)
        )
        if first is not None and not must_wait:
            is_planned = plan is not None and first.slot in plan.rows.slot
            flying = (pending.plan.rows for pending in self.stepper.loop.inflight)
            sampled = first.num_generated + sum(
                int(rows.samples[rows.slot == first.slot].sum()) for rows in flying
            )
            could_be = first.is_prefilling or sampled < first.request.max_new_tokens
            assert is_planned or not could_be, "the first in line sits idle"
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

    def update(self, work: Callable[[], None]) -> None:
        """Change weights, while nothing has memory and nothing is in flight."""
        assert not self.stepper.loop.inflight
        assert self.stepper.ledger.stats().held == 0, "somebody goes on over the old cache"
        self.device.update(work)

    def close(self) -> None:
        """Nothing to let go of."""

    def check_shape(self, plan: StepPlan) -> None:
        """A plan fits its packet and its payload; each sequence is there once; decodes first."""
        rows, config = plan.rows, self.config
        self._writer.write(plan, self._words, number=1, result=0)
        can_wait = sum(
            readout_bytes(r.end - r.start, COLUMNS.values()) for r in plan.readouts
        ) + sum(
            score_bytes(s.count, num_top=s.num_top, num_ids=s.num_ids)
            for s in plan.scores
            if s.is_prompt
        )
        of_prompts = sum(score.is_prompt for score in plan.scores)
        self.asked.append((len(plan.readouts), of_prompts, len(plan.scores) - of_prompts))
        room = config.max_payload_bytes - sample_score_bytes(config.max_running)
        assert can_wait <= room, "more read-outs and prompt scores than the payload holds"
        assert payload_layout(plan, COLUMNS).num_bytes <= config.max_payload_bytes
        assert len(set(rows.slot.tolist())) == len(rows) <= config.max_running
        assert len(set(plan.slot_writes.slot.tolist())) == len(plan.slot_writes)
        is_decode = rows.start == FROM_DEVICE
        assert (np.diff(is_decode.astype(int)) <= 0).all(), "a decode row after a prefill row"
        assert (rows.width > 0).all() and (rows.width[is_decode] == 1).all()
        assert rows.width[~is_decode].sum() == len(plan.token_ids) <= config.chunk_size
        assert plan.num_tokens <= config.max_step_tokens
        assert (plan.page_writes.column("index") < config.max_pages_per_sequence).all()
        for slot, generation, samples in zip(
            rows.slot.tolist(), rows.generation.tolist(), rows.samples.tolist(), strict=True
        ):
            sequence = self.stepper.scheduler._slots.tenant(slot, generation)
            self._num_drawn[sequence] += samples
            assert self._num_drawn[sequence] <= sequence.request.max_new_tokens, "draws too many"

    def check_pages_of_flying_steps(self) -> None:
        """No page is free that a step in flight reads or writes."""
        references = self.stepper.ledger._pools[0].ref_count
        for pending in self.stepper.loop.inflight:
            step = self.device.steps[pending.plan.step_id]
            for page in step.read | step.read_out:
                assert references(page), f"page {page} is free, and a step in flight reads it"

    def after_step(self, _: int) -> None:
        """Pages in flight are kept, and nothing that was recorded is forgotten or changed."""
        self.check_pages_of_flying_steps()
        if self.stepper.scheduler.epoch != self._epoch:
            self._epoch = self.stepper.scheduler.epoch
            for seen in self._columns.values():
                if not seen.get("token_ids"):
                    seen.pop("prompt_scores", None)  # of old weights, and nothing came of them
        for sequence in self.stepper.scheduler._open.sequences():
            if self.stepper.num_steps % self._look_every == 0:
                check_append_only(sequence, self._columns[sequence])
            if sequence.finish is not None:
                decided = self.decided.setdefault(sequence, sequence.finish)
                assert sequence.finish is decided, "it ended twice"


def check_victims(before: list[Sequence]) -> None:
    """Of those that ran before a plan, the last in line lost their memory, if any did."""
    kept = [s.rank for s in before if s.state is SequenceState.RUNNING]
    lost = [s.rank for s in before if s.state is not SequenceState.RUNNING]
    assert not kept or not lost or max(kept) < min(lost), "memory was not taken from the last"


def is_short_of_payload(plan: StepPlan, slot: int) -> bool:
    """True if a row of this slot may have found no room for its scores."""
    return bool(plan.readouts) or (bool(plan.scores) and slot in plan.slot_writes.slot)


def check_append_only(sequence: Sequence, seen: dict[str, list]) -> None:
    """Every column of the record begins with what it had before, and all have one length."""
    record = sequence.record
    columns = {name: getattr(record, name) for name in record.__slots__}
    assert {len(column) for column in columns.values()} == {len(record)}
    columns |= {"known_ids": sequence.known_ids, "prompt_scores": sequence.prompt_scores}
    for name, column in columns.items():
        before = seen.setdefault(name, [])
        same = len(column) >= len(before) and all(
            new is old or new == old for new, old in zip(column, before, strict=False)
        )
        assert same, f"column {name} was rewritten"
        before[:] = column


def most_steps(workload: Workload) -> int:
    """Turns within which everybody ends, if the first in line always gets on."""
    latency = workload.config["depth"] + 2
    lengths = sum(
        job.sampling.get("n", 1) * (len(job.prompt) + job.sampling["max_new_tokens"])
        for job in workload.jobs
    )
    num_sequences = sum(job.sampling.get("n", 1) for job in workload.jobs)
    restarts = (1 + len(workload.retract_at) + len(workload.refit_at)) * lengths
    return 12 + latency * (restarts + 4 * num_sequences)


@mock.patch.multiple(sequence_module, EARLY_ROWS=3, LATE_ROWS=2)
def run_workload(workload: Workload) -> Referee:
    """Run to the end and check every rule. Some rows are read ahead, short as sequences are."""
    referee = Referee(workload)
    stepper = referee.stepper
    todo = sorted(workload.jobs, key=lambda job: job.arrives_at)
    started: list[tuple[Job, int]] = []
    turn = 0
    while todo or stepper.is_busy:
        while todo and todo[0].arrives_at <= turn:
            job = todo.pop(0)
            started.append((job, start_job(stepper, job)))
        for job, request_id in started:
            if job.aborted_after is not None and turn == job.arrives_at + job.aborted_after:
                stepper.abort(request_id)
        for when, label in sorted(workload.group_aborts):
            if when == turn:
                stepper.abort_group(label)
        if stepper.is_busy:  # an idle loop would wait for a message
            if turn in workload.retract_at:
                stepper.scheduler.retract_last()
            if turn in workload.refit_at:
                stepper.inbox.put(Refit(lambda: None, None))
            stepper.step()
        turn += 1
        assert turn <= most_steps(workload), "somebody starves"
    stepper.check_idle()
    check_nothing_kept(stepper.scheduler)
    assert not stepper.outbox._streams and not stepper.outbox._num_open
    for sequence, decided in referee.decided.items():
        request_id, index = sequence.request.request_id, sequence.sample_index
        assert stepper.samples[request_id][index].finish is decided
    for job, request_id in started:
        for sample_index, output in enumerate(stepper.samples[request_id]):
            want = answer_of(job, sample_index, workload.status)
            check_output(job, output, want, workload.config, may_be_aborted=workload.aborts(job))
    stepper.ledger.flush()
    stepper.ledger.check()
    assert stepper.ledger.stats().free == referee.config.num_pages
    return referee


def start_job(stepper: Stepper, job: Job) -> int:
    """Add a job's request."""
    return stepper.add(
        job.prompt,
        capture=job.capture,
        logprobs=job.logprobs,
        group=job.group,
        priority=job.priority,
        is_streamed=job.is_streamed,
        **job.sampling,
    )


def check_nothing_kept(scheduler: Scheduler) -> None:
    """An idle scheduler holds nothing of the requests that it has had."""
    for name in ("_waiting", "_running", "_leaving", "_open"):
        assert len(getattr(scheduler, name)) == 0, name
    assert not scheduler._open._groups
    assert not scheduler._holds._leaders
    assert scheduler._slots.num_free == len(scheduler._slots._tenants)
    assert not any(scheduler._slots._tenants)
