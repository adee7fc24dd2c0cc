"""Decides what each step forwards, and learns from what came back.

Owns every sequence from admission to its last event. Must not know how a forward
is done: it speaks in plans and results, and plain integers. Loop thread only.

A step is one ragged plan: a decode row for every sequence that can take one, then
prompt chunks up to a token budget, then new admissions (Sarathi-Serve, arXiv
2403.02310, the same idea of stall-free mixed batches). Memory is taken from the last
in line, so the first always gets on and everybody ends.
"""

from collections.abc import Callable

import numpy as np

from dovetail.cache.ledger import KVLedger
from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.sched.admission import Backoff, LengthEstimate, PrefixHolds
from dovetail.sched.arrivals import Arrivals
from dovetail.sched.builder import PlanBuilder
from dovetail.sched.captured import ColumnRows
from dovetail.sched.events import last_event_of, news_of, news_of_step
from dovetail.sched.finish import LENGTH, aborted, failure_of, finish_after
from dovetail.sched.open import OpenRequests
from dovetail.sched.order import CommitOrder
from dovetail.sched.plan import ReadRows, RowStatus, StepPlan, StepResult, TokenScores
from dovetail.sched.policy import WINDOW, ordered
from dovetail.sched.progress import Mask, Slots
from dovetail.sched.queues import RankedQueue
from dovetail.sched.reading import ReadingList
from dovetail.sched.running import RunningSequences
from dovetail.sched.sequence import Sequence, SequenceState
from dovetail.sched.slots import SlotTable
from dovetail.wire.request import Request
from dovetail.wire.result import FinishReason, TokenEvent

_OK = int(RowStatus.OK)  # comparing with a plain int is faster, and every row does it
_RUNNING = SequenceState.RUNNING


class Scheduler:
    """Plans steps and commits results.

    Invariants: a sequence is in ``_waiting`` or ``_running`` or is leaving
    (RETRACTING, FINISHING), never in two; pages and slot are given up once, when
    nothing of the sequence is in flight; every generation of an added request gets
    exactly one event with a finish reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        ledger: KVLedger,
        *,
        token_bytes: Callable[[int], bytes],
        special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._arrivals = Arrivals(config, token_bytes, special_ids)
        self._slots = SlotTable(config.max_running)
        self._progress = self._slots.progress
        self._waiting = RankedQueue()
        self._running = RunningSequences(self._progress)
        self._leaving: dict[Sequence, None] = {}
        self._reading = ReadingList()
        self._open = OpenRequests()
        self._holds = PrefixHolds(config)
        self._lengths = LengthEstimate()
        self._backoff = Backoff()
        self._num_steps = 0
        self._order = CommitOrder()
        self.epoch = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without memory."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that may be planned."""
        return len(self._running)

    @property
    def num_open(self) -> int:
        """Requests that have not had their last event."""
        return len(self._open)

    # -- requests come and go ------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a validated request: one sequence for each of its ``n`` generations."""
        sequences = self._arrivals.sequences(request)
        for sequence in sequences:
            self._waiting.add(sequence)
        self._open.add(request, sequences)
        self._backoff.end()  # the newcomer may be smaller, or first in line

    def abort(self, request_id: int) -> list[TokenEvent]:
        """End a request now, wherever it is. Unknown and ended ids are no news."""
        return self._finish_open(self._open.of_request(request_id))

    def abort_group(self, group: str) -> list[TokenEvent]:
        """End all open requests with this group label."""
        return self._finish_open(self._open.of_group(group))

    def abort_all(self) -> list[TokenEvent]:
        """End every request that is open."""
        return self._finish_open(self._open.sequences())

    def _finish_open(self, sequences: list[Sequence]) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        for sequence in sequences:
            if sequence.finish is None:
                events += self._decide_finish(sequence, aborted(sequence))
        return events

    # -- planning ------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if nothing can be forwarded now."""
        builder = PlanBuilder(self._config)
        self._plan_decodes(builder)
        self._reading.plan(builder, self._leaving)  # also of those that a decode row has retracted
        budget = self._plan_chunks(builder, self._config.chunk_size)
        self._admit(builder, budget)
        return self._built(builder)

    def plan_leaving(self) -> StepPlan | None:
        """Return a step that forwards nothing: what is to be read before memory goes, or None."""
        builder = PlanBuilder(self._config)
        self._reading.plan(builder, self._leaving)
        return self._built(builder)

    def _built(self, builder: PlanBuilder) -> StepPlan | None:
        if builder.is_empty:
            return None
        plan = builder.build(step_id=self._num_steps, epoch=self.epoch)
        self._num_steps += 1
        return plan

    def _plan_decodes(self, builder: PlanBuilder) -> None:
        """Plan a row for each sequence that can decode."""
        growing: list[Sequence] = []
        for sequence in self._running.to_look_at():
            if sequence.samples_left:
                growing.append(sequence)
            else:
                self._running.end_decoding(sequence)
                self._reading.note_last_row(sequence)
        without_pages = self._grow(growing)
        for sequence in growing:
            if sequence.state is _RUNNING and sequence not in without_pages:
                builder.add_pages(sequence)
                sequence.look_when_planned()
        decode = self._running.decode_rows(without=without_pages)
        builder.set_decodes(decode.rows, decode.scores)
        self._progress.plan_one(decode.slots)

    def _plan_chunks(self, builder: PlanBuilder, budget: int) -> int:
        """Plan chunks of running prefills; return what is left of the token budget."""
        for sequence in self._running.prefilling:
            if budget == 0:
                break
            budget -= self._plan_chunk(builder, sequence, budget)
        return budget

    def _plan_chunk(self, builder: PlanBuilder, sequence: Sequence, budget: int) -> int:
        width = min(budget, sequence.prefill_len - sequence.planned_len)
        if sequence.score_targets(sequence.planned_len, width):
            width = min(width, builder.max_scored(sequence))
        if width == 0:
            return 0
        is_last = sequence.planned_len + width == sequence.prefill_len
        samples = int(is_last and sequence.samples_left > 0)
        builder.add_prefill(sequence, width=width, samples=samples)
        sequence.planned_len += width
        sequence.num_inflight += 1
        if is_last:
            self._running.end_prefill(sequence)
            if not sequence.samples_left:
                self._reading.note_last_row(sequence)
        return width

    def _admit(self, builder: PlanBuilder, budget: int) -> None:
        if budget == 0 or self._backoff.is_on(self._num_steps) or not len(self._waiting):
            return
        if not self._slots.num_free:
            return  # before anybody's prefix is looked up
        window = self._waiting.first(WINDOW)
        for sequence in ordered(self._config.policy, window, self._match_len):
            if budget == 0 or not self._slots.num_free:
                return
            if self._holds.is_held(sequence, self._ledger):
                continue
            if not self._start(sequence, builder):
                return
            budget -= self._plan_chunk(builder, sequence, budget)
            self._count_passes(sequence)

    def _count_passes(self, admitted: Sequence) -> None:
        for sequence in self._waiting.first(WINDOW):
            if sequence.rank > admitted.rank:
                return
            sequence.num_passes += 1

    def _match_len(self, sequence: Sequence) -> int:
        return self._ledger.match_len(
            sequence.request.namespace, sequence.known_ids, max_cached=sequence.max_cached_len
        )

    def _start(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Give a waiting sequence its slot and the pages of all its known tokens, or nothing."""
        namespace, known_ids = sequence.request.namespace, sequence.known_ids
        max_cached = sequence.max_cached_len if self._config.prefix_cache else 0
        num_pages = -(-sequence.known_len // self._config.page_size)
        if not builder.has_room_for_tenant(sequence, num_pages=num_pages):
            return False
        if not self._ledger.can_open(
            namespace,
            known_ids,
            max_cached=max_cached,
            num_tokens=sequence.known_len + self._expected_growth(sequence),
        ):
            self._backoff.begin(self._num_steps)
            return False
        holding = self._ledger.open(namespace, known_ids, max_cached=max_cached)
        if not self._ledger.extend(holding, sequence.known_len):
            raise InvariantError("the ledger promised pages that it does not have")
        self._slots.take(sequence)
        sequence.start(holding, self.epoch)
        self._waiting.remove(sequence)
        self._running.add(sequence)
        self._holds.add(sequence)
        builder.add_tenant(sequence)
        builder.add_pages(sequence)
        return True

    def _expected_growth(self, sequence: Sequence) -> int:
        """Return by how much those that run, and ``sequence``, are expected to grow at most.

        With nothing else running it starts whatever it may need: the pool holds any one request.
        """
        if not len(self._running):
            return 0
        return self._lengths.growth([*self._running, sequence], self._config.page_size)

    # -- memory --------------------------------------------------------------------------

    def _grow(self, sequences: list[Sequence]) -> list[Sequence]:
        """Make room for the next token of each, in line; return those that sit this step out."""
        if self._ledger.extend_all([sequence.held for sequence in sequences]):
            return []
        return [
            sequence
            for sequence in sequences
            if sequence.state is _RUNNING  # no earlier one has taken its memory
            and not self._extend(sequence, sequence.planned_len + 1)
            and sequence.state is _RUNNING
        ]

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for ``num_tokens``, taking memory from the last in line if needed.

        False if the sequence has to sit this step out: it was retracted itself, or
        pages are on their way from sequences that leave.
        """
        while not self._ledger.extend(sequence.held, num_tokens):
            if self._leaving or self.retract_last() is sequence:
                return False
        return True

    def retract_last(self) -> Sequence | None:
        """Take the memory of the last in line; its record stays and it goes on later."""
        sequence = self._running.last
        if sequence is None:
            return None
        self._lengths.observe_retraction()
        self._retract(sequence)
        return sequence

    def retract_all(self) -> None:
        """Take everybody's memory; whoever waits for a read-out keeps it until that is done."""
        for sequence in list(self._running):
            self._retract(sequence)

    def _retract(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._reading.drop(sequence)
        self._holds.remove(sequence)
        sequence.leave(SequenceState.RETRACTING)
        sequence.num_retractions += 1
        if sequence.num_inflight == 0 and not sequence.needs_readout:
            self._requeue(sequence)
        else:
            self._leaving[sequence] = None

    def begin_epoch(self, epoch: int) -> None:
        """Serve under new weights, which nothing that was computed before is of."""
        if self._leaving or len(self._running):
            raise InvariantError("weights change while sequences have memory")
        self._ledger.flush()
        self.epoch = epoch
        for sequence in self._open.sequences():
            sequence.begin_again()
        self._backoff.end()

    def _requeue(self, sequence: Sequence) -> None:
        self._give_up_memory(sequence)
        sequence.state = SequenceState.WAITING
        self._waiting.add(sequence)

    def _give_up_memory(self, sequence: Sequence) -> None:
        assert sequence.num_inflight == 0
        if sequence.finish is None or sequence.finish.type != "error":
            self._publish(sequence)
        self._ledger.release(sequence.held)
        self._slots.release(sequence)
        sequence.forget_memory()
        self._backoff.end()

    # -- committing ----------------------------------------------------------------------

    def commit_readouts(self, plan: StepPlan, read: ReadRows) -> list[TokenEvent]:
        """Learn what a step read before its forward; return the news of those that leave.

        Whoever goes on gets rows with the step's tokens: a stream has one piece of news a step.
        """
        self._order.take_rows(plan, read)
        events: list[TokenEvent] = []
        for readout, rows in zip(plan.readouts, read.rows, strict=True):
            sequence = self._slots.tenant(readout.slot, readout.generation)
            sequence.num_inflight -= 1
            events += self._commit_readout(sequence, readout.start, rows)
        return events

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Learn what a step produced; return the news, one sequence's in order.

        What it read is committed before.
        """
        self._order.take_result(plan, result)
        sampled_scores = self._commit_prompt_scores(plan, result)
        rows, slots = plan.rows, plan.rows.slot.astype(np.intp)
        self._slots.expect_tenants(slots, rows.generation)
        looks = self._progress.needs_look(slots, rows.width, result.token_ids[:, 0])
        looks |= result.status != _OK
        events = self._commit_tokens(slots, result, plan.epoch, ~looks)
        for row in np.flatnonzero(looks).tolist():
            events += self._look_at_row(plan, result, row, sampled_scores.get(row))
        for readout in plan.readouts:
            sequence = self._slots.present(readout.slot, readout.generation)
            if sequence is not None and sequence.has_rows_to_stream:
                events.append(news_of(sequence))
        return events

    def _commit_tokens(
        self, slots: Slots, result: StepResult, epoch: int, chosen: Mask
    ) -> list[TokenEvent]:
        """Commit the chosen decode rows, whose sequences go on; return what is news at once."""
        token_ids, logprobs = result.token_ids[:, 0], result.logprobs[:, 0]
        if not chosen.all():
            slots, token_ids, logprobs = slots[chosen], token_ids[chosen], logprobs[chosen]
        due = self._progress.commit_one(slots, token_ids, logprobs, epoch)
        if due.any():
            for sequence in self._slots.tenants(slots[due]):
                self._keep_up(sequence)
        heard = self._progress.is_streamed.take(slots)
        sequences = self._slots.tenants(slots[heard])
        return news_of_step(sequences, token_ids[heard], logprobs[heard], epoch)

    def _look_at_row(
        self, plan: StepPlan, result: StepResult, row: int, scores: TokenScores | None
    ) -> list[TokenEvent]:
        """Commit a row whose sequence may have more to learn than its token; return the news."""
        rows = plan.rows
        sequence = self._slots.tenant(rows.slot.item(row), rows.generation.item(row))
        sequence.num_inflight -= 1
        samples, status = rows.samples.item(row), result.status.item(row)
        if status == RowStatus.NON_FINITE:  # its pages may be why, also if it has ended
            self._ledger.forget(sequence.held)
        if sequence.finish is None:
            token_id = result.token_ids.item(row, 0)
            sequence.catch_up()
            if samples and status == _OK:
                sequence.append(token_id, result.logprobs.item(row, 0), plan.epoch, scores)
            reason = self._commit_row(
                sequence, rows.width.item(row), samples, token_id, status, plan.epoch
            )
            if reason is not None:
                return self._decide_finish(sequence, reason)
        if sequence.state is not _RUNNING:
            return self._settle(sequence)
        return [news_of(sequence)] if samples and sequence.request.is_streamed else []

    def _commit_readout(self, sequence: Sequence, start: int, rows: ColumnRows) -> list[TokenEvent]:
        """Record rows. One that nobody wrote ends its request, however well that has gone."""
        if sequence.captured is None:
            return self._settle(sequence)
        sequence.catch_up()
        try:
            sequence.captured.append(start, rows, end=sequence.computed_len)
        except InvariantError as error:
            sequence.captured = None
            reason = FinishReason(type="error", message=str(error))
            if sequence.finish is None:
                return self._decide_finish(sequence, reason)
            sequence.finish = reason  # nobody has been told the old one
        return [] if sequence.state is _RUNNING else self._settle(sequence)

    def _commit_prompt_scores(self, plan: StepPlan, result: StepResult) -> dict[int, TokenScores]:
        """Commit the scores of prompt tokens; return those of sampled ones, by row."""
        sampled: dict[int, TokenScores] = {}
        for score, values in zip(plan.scores, result.scores, strict=True):
            if not score.is_prompt:
                sampled[score.row] = values
                continue
            slot, generation = plan.rows.slot[score.row], plan.rows.generation[score.row]
            sequence = self._slots.tenant(int(slot), int(generation))
            if sequence.finish is None:
                sequence.append_prompt_scores(values)
        return sampled

    def _commit_row(
        self,
        sequence: Sequence,
        width: int,
        samples: int,
        token_id: int,
        status: int,
        epoch: int,
    ) -> FinishReason | None:
        """Learn that a row was forwarded; return why its sequence ends, or None."""
        sequence.computed_len += width
        if sequence.captured is not None:
            sequence.captured.forwarded(sequence.computed_len, epoch)
        if status != _OK:  # whatever made it so is not shared
            return failure_of(RowStatus(status))
        if sequence.state is _RUNNING and sequence.computed_len >= sequence.upkeep_at:
            self._keep_up(sequence)
        if sequence.computed_len == sequence.prefill_len:
            self._holds.remove(sequence)
        if samples:
            return finish_after(sequence, token_id)
        is_done = sequence.computed_len == sequence.known_len
        return LENGTH if is_done and sequence.request.max_new_tokens == 0 else None

    def _keep_up(self, sequence: Sequence) -> None:
        """Do for a sequence that goes on what is due once in a while."""
        sequence.catch_up()
        self._publish(sequence)
        if sequence.computed_len >= sequence.read_at:
            self._reading.note_computed(sequence)
        sequence.look_when_committed()

    def _publish(self, sequence: Sequence) -> None:
        """Share the pages that are full."""
        if self._config.prefix_cache:
            self._ledger.publish(sequence.held, sequence.known_ids, sequence.computed_len)

    def _decide_finish(self, sequence: Sequence, reason: FinishReason) -> list[TokenEvent]:
        """The one terminal transition. The last event follows when nothing is in flight."""
        assert sequence.finish is None
        sequence.finish = reason
        if reason.type in ("stop", "length"):
            self._lengths.observe(sequence)
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
            self._holds.remove(sequence)
            self._backoff.end()  # those behind it may be smaller
            return [self._end(sequence)]
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            self._reading.drop(sequence)
            self._holds.remove(sequence)
        sequence.leave(SequenceState.FINISHING)
        self._leaving[sequence] = None
        return self._settle(sequence)

    def _settle(self, sequence: Sequence) -> list[TokenEvent]:
        """Return a leaving sequence's news; let go of its memory if nothing of it is in flight."""
        if sequence.num_inflight == 0 and not sequence.needs_readout:
            del self._leaving[sequence]
            if sequence.state is SequenceState.FINISHING:
                sequence.expect_rows()
                self._give_up_memory(sequence)
                return [self._end(sequence)]
            self._requeue(sequence)
        return [news_of(sequence)] if sequence.has_news else []

    def _end(self, sequence: Sequence) -> TokenEvent:
        sequence.state = SequenceState.FINISHED
        self._open.remove(sequence)
        return last_event_of(sequence)
