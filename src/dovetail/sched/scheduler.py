"""Decides what each step forwards, and learns from what came back.

Owns every sequence from admission to its last event. Must not know how a forward
is done: it speaks in plans and results, and plain integers. Loop thread only.

A step is one ragged plan: a decode row for every sequence that can take one, then
prompt chunks up to a token budget, then new admissions (Sarathi-Serve, arXiv
2403.02310, the same idea of stall-free mixed batches). First come, first served:
memory is taken from the youngest sequence, so the oldest always gets on and
everybody ends.
"""

from collections.abc import Callable

from dovetail.cache.ledger import KVLedger
from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.sched.admission import admission_len
from dovetail.sched.builder import PlanBuilder
from dovetail.sched.finish import ABORTED, LENGTH, finish_after
from dovetail.sched.plan import RowStatus, StepPlan, StepResult
from dovetail.sched.queues import ArrivalQueue
from dovetail.sched.sequence import Sequence, SequenceState
from dovetail.sched.slots import SlotTable
from dovetail.sched.stop import StopMatcher
from dovetail.wire.request import Request
from dovetail.wire.result import FinishReason, TokenEvent
from dovetail.wire.tensor import TensorEnvelope

_STATUS_MESSAGES = {
    RowStatus.NON_FINITE: "the model produced logits that are not finite",
    RowStatus.EMPTY_SUPPORT: "no token was left to sample from",
}


class Scheduler:
    """Plans steps and commits results.

    Invariants: a sequence is in ``_waiting`` or ``_running`` or is leaving
    (RETRACTING, FINISHING), never in two; pages and slot are given up once, when
    nothing of the sequence is in flight; every added request gets exactly one
    event with a finish reason.
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
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._eos_token_ids = frozenset(config.model.eos_token_ids)
        self._slots = SlotTable(config.max_running)
        self._waiting = ArrivalQueue()
        self._running = ArrivalQueue()
        self._sequences: dict[int, Sequence] = {}
        self._leaving: dict[int, Sequence] = {}
        self._num_arrivals = 0
        self._num_steps = 0
        self._max_page_writes = config.max_pages_per_sequence + config.max_running
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
        return len(self._sequences)

    # -- requests come and go ------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a validated request."""
        if request.request_id in self._sequences:
            raise InvariantError(f"request id {request.request_id} is used twice")
        sequence = Sequence(
            request, arrival=self._num_arrivals, stop_matcher=self._stop_matcher(request)
        )
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self._waiting.add(sequence)

    def abort(self, request_id: int) -> list[TokenEvent]:
        """End a request now, wherever it is. Unknown and ended ids are no news."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.finish is not None:
            return []
        return self._decide_finish(sequence, ABORTED)

    def abort_all(self, reason: FinishReason = ABORTED) -> list[TokenEvent]:
        """End every request that is open."""
        events: list[TokenEvent] = []
        for sequence in list(self._sequences.values()):
            if sequence.finish is None:
                events += self._decide_finish(sequence, reason)
        return events

    def _stop_matcher(self, request: Request) -> StopMatcher | None:
        stops = request.sampling.stop_strings
        if not stops:
            return None
        hidden = self._special_ids if request.sampling.skip_special_tokens else frozenset[int]()
        return StopMatcher(lambda i: b"" if i in hidden else self._token_bytes(i), stops)

    # -- planning ------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Return the next step, or None if nothing can be forwarded now."""
        builder = PlanBuilder()
        self._plan_readouts(builder)
        self._plan_decodes(builder)
        budget = self._plan_chunks(builder, self._config.chunk_size)
        self._admit(builder, budget)
        if builder.is_empty:
            return None
        plan = builder.build(step_id=self._num_steps, epoch=self.epoch)
        self._num_steps += 1
        return plan

    def _plan_readouts(self, builder: PlanBuilder) -> None:
        budget = self._config.context_len
        for sequence in self._leaving.values():
            if self._needs_readout(sequence) and sequence.computed_len <= budget:
                budget -= sequence.computed_len
                builder.add_readout(sequence, start=0, end=sequence.computed_len)
                sequence.readout_planned = True
                sequence.num_inflight += 1

    def _plan_decodes(self, builder: PlanBuilder) -> None:
        for sequence in list(self._running):
            if sequence.state is not SequenceState.RUNNING or sequence.is_prefilling:
                continue  # an older row of this very plan may have retracted it
            if not sequence.may_sample or not self._extend(sequence, sequence.planned_len + 1):
                continue
            builder.add_pages(sequence)
            sequence.planned_len += 1
            sequence.pending_samples += 1
            sequence.num_inflight += 1
            builder.add_decode(sequence, bound=self._bound(sequence))

    def _plan_chunks(self, builder: PlanBuilder, budget: int) -> int:
        for sequence in self._running:
            if budget == 0:
                break
            if sequence.is_prefilling:
                budget -= self._plan_chunk(builder, sequence, budget)
        return budget

    def _plan_chunk(self, builder: PlanBuilder, sequence: Sequence, budget: int) -> int:
        width = min(budget, sequence.prefill_len - sequence.planned_len)
        is_last = sequence.planned_len + width == sequence.prefill_len
        samples = int(is_last and sequence.may_sample)
        builder.add_prefill(sequence, width=width, bound=self._bound(sequence), samples=samples)
        sequence.planned_len += width
        sequence.pending_samples += samples
        sequence.num_inflight += 1
        return width

    def _admit(self, builder: PlanBuilder, budget: int) -> None:
        while budget > 0 and self._slots.num_free:
            sequence = self._waiting.oldest
            if sequence is None or not self._open(sequence, builder):
                return
            self._waiting.pop_oldest()
            self._running.add(sequence)
            sequence.state = SequenceState.RUNNING
            builder.add_tenant(sequence)
            builder.add_pages(sequence)
            budget -= self._plan_chunk(builder, sequence, budget)

    def _open(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Give a waiting sequence its slot and the pages of all its known tokens, or nothing."""
        namespace, known_ids = sequence.request.namespace, sequence.known_ids
        max_cached = sequence.known_len - 1 if self._config.prefix_cache else 0
        pages = -(-sequence.known_len // self._config.page_size)
        if builder.num_page_writes + pages > self._max_page_writes:
            return False
        if not self._ledger.can_open(
            namespace,
            known_ids,
            max_cached=max_cached,
            num_tokens=admission_len(sequence, self._config, num_running=len(self._running)),
        ):
            return False
        holding = self._ledger.open(namespace, known_ids, max_cached=max_cached)
        if not self._ledger.extend(holding, sequence.known_len):
            raise InvariantError("the ledger promised pages that it does not have")
        self._slots.take(sequence)
        sequence.holding = holding
        sequence.num_pages_sent = [0] * len(holding.tables)
        sequence.prefill_len = sequence.known_len
        sequence.planned_len = sequence.computed_len = holding.cached_len
        if sequence.num_retractions == 0:
            sequence.cached_len = holding.cached_len
        return True

    def _bound(self, sequence: Sequence) -> int:
        assert sequence.holding is not None
        return len(sequence.holding.tables[0]) * self._config.page_size

    # -- memory --------------------------------------------------------------------------

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for ``num_tokens``, taking memory from younger sequences if needed.

        False if the sequence has to sit this step out: it was retracted itself, or
        pages are on their way from sequences that leave.
        """
        assert sequence.holding is not None
        while not self._ledger.extend(sequence.holding, num_tokens):
            if self._leaving or self.retract_youngest() is sequence:
                return False
        return True

    def retract_youngest(self) -> Sequence | None:
        """Take the youngest running sequence's memory; its record stays and it goes on later."""
        sequence = self._running.youngest
        if sequence is None:
            return None
        self._running.remove(sequence)
        sequence.state = SequenceState.RETRACTING
        sequence.num_retractions += 1
        if sequence.num_inflight == 0:
            self._requeue(sequence)
        else:
            self._leaving[sequence.request.request_id] = sequence
        return sequence

    def _requeue(self, sequence: Sequence) -> None:
        self._give_up_memory(sequence)
        sequence.state = SequenceState.WAITING
        self._waiting.add(sequence)

    def _give_up_memory(self, sequence: Sequence) -> None:
        assert sequence.num_inflight == 0 and sequence.holding is not None
        self._ledger.release(sequence.holding)
        self._slots.release(sequence)
        sequence.forget_memory()

    # -- committing ----------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Learn what a step produced; return the news, oldest plan first."""
        assert plan.step_id == result.step_id
        events: list[TokenEvent] = []
        rows = plan.rows
        columns = zip(
            rows.slot.tolist(),
            rows.generation.tolist(),
            rows.width.tolist(),
            rows.samples.tolist(),
            result.status.tolist(),
            result.token_ids[:, 0].tolist(),
            result.logprobs[:, 0].tolist(),
            strict=True,
        )
        for slot, generation, width, samples, status, token_id, logprob in columns:
            sequence = self._slots.tenant(slot, generation)
            sequence.num_inflight -= 1
            sequence.pending_samples -= samples
            if sequence.finish is None:
                sequence.computed_len += width
                if status != RowStatus.OK:  # and nobody else may read its pages
                    message = _STATUS_MESSAGES[RowStatus(status)]
                    events += self._decide_finish(
                        sequence, FinishReason(type="error", message=message)
                    )
                    continue
                self._publish(sequence)
                if samples:
                    sequence.append(token_id, logprob, plan.epoch)
                    reason = finish_after(sequence, token_id, self._eos_token_ids)
                else:
                    reason = self._finish_without_output(sequence)
                if reason is not None:
                    events += self._decide_finish(sequence, reason)
                    continue
            events += self._settle(sequence)
        for readout, captured in zip(plan.readouts, result.readouts, strict=True):
            sequence = self._slots.tenant(readout.slot, readout.generation)
            sequence.num_inflight -= 1
            sequence.captured = captured
            events += self._settle(sequence)
        return events

    def _publish(self, sequence: Sequence) -> None:
        if self._config.prefix_cache:
            assert sequence.holding is not None
            self._ledger.publish(sequence.holding, sequence.known_ids, sequence.computed_len)

    def _finish_without_output(self, sequence: Sequence) -> FinishReason | None:
        is_done = sequence.computed_len == sequence.known_len
        return LENGTH if is_done and sequence.request.max_new_tokens == 0 else None

    def _decide_finish(self, sequence: Sequence, reason: FinishReason) -> list[TokenEvent]:
        """The one terminal transition. The last event follows when nothing is in flight."""
        assert sequence.finish is None
        sequence.finish = reason
        if sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
            return [self._last_event(sequence)]
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        sequence.state = SequenceState.FINISHING
        self._leaving[sequence.request.request_id] = sequence
        return self._settle(sequence)

    def _settle(self, sequence: Sequence) -> list[TokenEvent]:
        """Return the sequence's news; let go of its memory if it leaves with nothing in flight."""
        if sequence.state is not SequenceState.RUNNING and sequence.num_inflight == 0:
            if sequence.state is SequenceState.RETRACTING:
                del self._leaving[sequence.request.request_id]
                self._requeue(sequence)
            elif not self._needs_readout(sequence):
                del self._leaving[sequence.request.request_id]
                self._give_up_memory(sequence)
                return [self._last_event(sequence)]
        if sequence.num_emitted == len(sequence.record):
            return []
        return [self._event(sequence)]

    def _needs_readout(self, sequence: Sequence) -> bool:
        return (
            sequence.state is SequenceState.FINISHING
            and bool(sequence.request.capture)
            and sequence.computed_len > 0
            and not sequence.readout_planned
        )

    # -- events --------------------------------------------------------------------------

    def _event(self, sequence: Sequence, *, is_last: bool = False) -> TokenEvent:
        record, start = sequence.record, sequence.num_emitted
        sequence.num_emitted = len(record)
        captured = sequence.captured if is_last else None
        return TokenEvent(
            request_id=sequence.request.request_id,
            token_ids=tuple(record.token_ids[start:]),
            logprobs=tuple(record.logprobs[start:]),
            epochs=tuple(record.epochs[start:]),
            finish=sequence.finish if is_last else None,
            usage=sequence.usage if is_last else None,
            captured=None
            if captured is None
            else {name: TensorEnvelope.pack(array) for name, array in captured.items()},
        )

    def _last_event(self, sequence: Sequence) -> TokenEvent:
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.request.request_id]
        return self._event(sequence, is_last=True)
