"""Engines with one rule switched off, for ``test_mutants``.

Each function here patches the engine and says which rule it breaks.
"""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pytest import MonkeyPatch
from torch import Tensor

from dovetail.attention.paged import DecodeGroup
from dovetail.cache.ledger import Holding, KVLedger
from dovetail.exec import batch, blocks, executor, runner
from dovetail.exec.device import Device, Event, Lane, TransferBlock, download
from dovetail.exec.executor import Executor
from dovetail.exec.packet import read_packet
from dovetail.exec.readback import RESULT_WORDS, PayloadLayout
from dovetail.exec.ring import BlockRing, paired_blocks
from dovetail.exec.runner import StepRunner
from dovetail.exec.sim import SimLane
from dovetail.sched import plan as plan_module
from dovetail.sched.builder import PlanBuilder
from dovetail.sched.plan import ReadRows, StepPlan, StepResult
from dovetail.sched.reading import ReadingList
from dovetail.sched.scheduler import Scheduler
from dovetail.sched.sequence import Sequence, SequenceState
from dovetail.sched.slots import SlotTable
from dovetail.wire.result import TokenEvent

Mutation = Callable[[MonkeyPatch], None]


def after(patch: MonkeyPatch, owner: Any, name: str, then: Callable[..., None]) -> None:
    """Call ``then`` with the method's result and its arguments whenever it returns."""
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(result, *args, **kwargs)
        return result

    patch.setattr(owner, name, patched)


def before(patch: MonkeyPatch, owner: Any, name: str, first: Callable[..., None]) -> None:
    """Call ``first`` with the method's arguments before it runs."""
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return original(*args, **kwargs)

    patch.setattr(owner, name, patched)


# -- aliases -----------------------------------------------------------------------------


def result_is_a_view(patch: MonkeyPatch) -> None:
    """A StepResult holds the ring's memory instead of copies."""
    original = executor.read_result

    def read_result(
        plan: StepPlan, result_words: np.ndarray, *args: Any, number: int, max_rows: int
    ) -> StepResult:
        result = original(plan, result_words, *args, number=number, max_rows=max_rows)
        words = result_words[: RESULT_WORDS * max_rows].reshape(RESULT_WORDS, max_rows)
        words = words[:, : len(plan.rows)]
        return dataclasses.replace(
            result,
            token_ids=words[0][:, None],
            logprobs=words[1].view(np.float32)[:, None],
            status=words[2] * 0,  # a broken status would be found before the broken token
        )

    patch.setattr(executor, "read_result", read_result)


def readout_is_a_view(patch: MonkeyPatch) -> None:
    """A read-out is the payload ring's memory instead of a copy."""
    original = executor.read_rows

    def read_rows(plan: StepPlan, payload: Any, layout: PayloadLayout) -> ReadRows:
        result = original(plan, payload, layout)
        at = dict.fromkeys(layout.readouts, 0)
        views = []
        for rows in result.rows:
            ends = {name: at[name] + len(values) for name, values in rows.items()}
            views.append(
                {name: layout.readouts[name].view(payload)[at[name] : ends[name]] for name in rows}
            )
            at |= ends
        return dataclasses.replace(result, rows=tuple(views))

    patch.setattr(executor, "read_rows", read_rows)


def result_is_an_unseen_view(patch: MonkeyPatch) -> None:
    """``result_is_a_view``, and a result takes whatever it is given."""
    patch.setattr(plan_module, "_expect_own_memory", lambda *arrays: None)
    result_is_a_view(patch)


def rows_are_read_at_once(patch: MonkeyPatch) -> None:
    """The host reads the rows of read-outs without waiting for their copy."""
    read = Executor._read

    def read_at_once(self: Executor, plan: Any, event: Any, *args: Any) -> ReadRows:
        return read(self, plan, None, *args)

    patch.setattr(Executor, "_read", read_at_once)


def copy_lane_reads_state(patch: MonkeyPatch) -> None:
    """The copy lane takes the tokens from engine state, which the next step changes."""
    drawn: weakref.WeakKeyDictionary[StepRunner, Any] = weakref.WeakKeyDictionary()
    sampled: weakref.WeakKeyDictionary[TransferBlock, Any] = weakref.WeakKeyDictionary()

    def remember_rows(_: Any, self: StepRunner, rows: Any, *args: Any) -> None:
        at = np.flatnonzero(rows.rows.samples)
        drawn[self] = (self._state, rows.rows.slot[at].copy(), at)

    def remember_block(
        _: None, self: Executor, plan: Any, layout: Any, result: TransferBlock, *args: Any
    ) -> None:
        if self._runner in drawn:
            sampled[result] = drawn.pop(self._runner)

    def fetch(block: TransferBlock) -> None:
        if block in sampled:
            state, slots, at = sampled.pop(block)
            block.host.numpy().view(np.int32)[at] = state.last_token[slots]

    def fetch_too(_: None, self: Executor, block: TransferBlock, *span: int) -> None:
        self._device.copy.submit(fetch, block)

    after(patch, StepRunner, "_draw", remember_rows)
    after(patch, Executor, "_run", remember_block)
    after(patch, Executor, "_download", fetch_too)


def copy_lane_declares_state(patch: MonkeyPatch) -> None:
    """The same, by work that says what it reads."""

    class DeclaringLane:
        def __init__(self, lane: Lane, state: Tensor) -> None:
            self._lane, self._state = lane, state

        def submit(self, fn: Any, *args: Any, reads: tuple = (), writes: tuple = ()) -> None:
            self._lane.submit(fn, *args, reads=(*reads, self._state), writes=writes)

        def download(self, block: TransferBlock, begin: int, end: int) -> None:
            self.submit(download, block, begin, end, reads=(block.device,), writes=(block.host,))

        def record(self) -> Event:
            return self._lane.record()

        def wait(self, event: Event) -> None:
            self._lane.wait(event)

    def declare(_: None, self: Executor, *args: Any) -> None:
        self._device.copy = DeclaringLane(self._device.copy, self._runner._state.last_token_tensor)

    after(patch, Executor, "__init__", declare)


# -- order -------------------------------------------------------------------------------


def staged_late(patch: MonkeyPatch) -> None:
    """The packet is changed after it was written."""
    staged: weakref.WeakKeyDictionary[Executor, TransferBlock] = weakref.WeakKeyDictionary()

    def remember(block: TransferBlock, self: Executor, *args: Any) -> None:
        staged[self] = block

    def write_late(_: object, self: Executor, plan: StepPlan) -> None:
        read_packet(self._schema, staged[self].words).fields["token_ids"][:] = 7

    after(patch, Executor, "_stage", remember)
    after(patch, Executor, "submit", write_late)


def staged_late_unfrozen(patch: MonkeyPatch) -> None:
    """The same, and nothing freezes the packet."""
    patch.setattr(TransferBlock, "freeze", lambda self: None)
    staged_late(patch)


def copy_does_not_wait(patch: MonkeyPatch) -> None:
    """The copy lane does not wait for the step whose result it fetches."""
    patch.setattr(SimLane, "wait", lambda self, event: None)


def retired_too_early(patch: MonkeyPatch) -> None:
    """The event that says that a step has retired is recorded before its forward."""

    def swap(_: Event, lane: SimLane) -> None:
        if lane.name == "compute" and len(lane._items) > 1:
            lane._items[-1], lane._items[-2] = lane._items[-2], lane._items[-1]

    after(patch, SimLane, "record", swap)


def one_staging_block(patch: MonkeyPatch) -> None:
    """No mutant: with a single block the staging ring has to wait for its fence in earnest."""

    original = blocks.readable_blocks

    def shrunk(device: Device, num_bytes: int, *, num_blocks: int) -> list[TransferBlock]:
        return original(device, num_bytes, num_blocks=1)

    patch.setattr(blocks, "readable_blocks", shrunk)


def staging_has_no_fence(patch: MonkeyPatch) -> None:
    """A ring hands out a block that its last user has not read yet."""

    def forget_fence(ring: BlockRing) -> None:
        ring._blocks[ring._next].fence = None

    one_staging_block(patch)
    before(patch, BlockRing, "acquire", forget_fence)


def one_result_block(patch: MonkeyPatch) -> None:
    """The ring of results is shorter than the steps in flight."""

    def shrink(_: None, self: Executor, *args: Any) -> None:
        results = self._runner.blocks.results[:1]
        self._results = BlockRing(self._device, paired_blocks(self._device, results))

    after(patch, Executor, "__init__", shrink)


def one_payload_block(patch: MonkeyPatch) -> None:
    """The ring of payloads is shorter than the steps in flight."""

    def shrink(_: None, self: Executor, *args: Any) -> None:
        payloads = [block.device for block in self._payloads._blocks[:1]]
        self._payloads = BlockRing(self._device, paired_blocks(self._device, payloads))

    after(patch, Executor, "__init__", shrink)


def payload_block_released_at_submit(patch: MonkeyPatch) -> None:
    """A payload block goes back to a ring of one when its copy is queued, not when it was read."""
    one_payload_block(patch)

    def give_back(_: Any, self: Executor, *args: Any) -> None:
        [block] = self._payloads._blocks
        if block.in_use:
            self._payloads.release(block)

    after(patch, Executor, "submit", give_back)


# -- memory given up too early -----------------------------------------------------------


def released_in_flight(patch: MonkeyPatch) -> None:
    """A sequence that ends gives up slot and pages though a step of it is in flight."""

    def forget_inflight(self: Scheduler, sequence: Sequence) -> None:
        captured = sequence.captured
        has_rows = captured is None or captured.recorded >= sequence.computed_len
        if sequence.state is SequenceState.FINISHING and has_rows:
            sequence.num_inflight = 0

    before(patch, Scheduler, "_settle", forget_inflight)


def ended_before_its_rows(patch: MonkeyPatch) -> None:
    """A sequence ends though a read-out of it is in flight."""

    def forget_inflight(self: Scheduler, sequence: Sequence) -> None:
        captured = sequence.captured
        is_read = captured is not None and captured.planned >= sequence.computed_len
        if sequence.state is SequenceState.FINISHING and is_read:
            sequence.num_inflight = 0

    before(patch, Scheduler, "_settle", forget_inflight)


def read_before_the_last_row(patch: MonkeyPatch) -> None:
    """Rows are read up to where a sequence is planned, in the very plan that forwards the last."""
    plan = ReadingList.plan

    def plan_too_far(self: ReadingList, builder: PlanBuilder, leaving: Any) -> None:
        for sequence in scheduler_of[self]._running:
            if sequence.samples_left == 0:
                self.note_last_row(sequence)
        plan(self, builder, leaving)

    scheduler_of: weakref.WeakKeyDictionary[ReadingList, Scheduler] = weakref.WeakKeyDictionary()

    def remember(_: None, self: Scheduler, *args: Any, **kwargs: Any) -> None:
        scheduler_of[self._reading] = self

    after(patch, Scheduler, "__init__", remember)
    patch.setattr(ReadingList, "plan", plan_too_far)


def stale_handle_accepted(patch: MonkeyPatch) -> None:
    """The same, and nobody looks at generations: a late token goes to the slot's next tenant."""
    last: weakref.WeakKeyDictionary[SlotTable, dict[int, Sequence]] = weakref.WeakKeyDictionary()

    def remember(self: SlotTable, sequence: Sequence) -> None:
        last.setdefault(self, {})[sequence.slot] = sequence

    def any_tenant(self: SlotTable, slot: int, generation: int) -> Sequence:
        return self._tenants[slot] or last[self][slot]

    inflight = Sequence.num_inflight
    count = inflight.__get__

    def count_if_there(self: Sequence, number: int) -> None:
        if self.slot >= 0:
            inflight.__set__(self, number)

    before(patch, SlotTable, "release", remember)
    patch.setattr(SlotTable, "tenant", any_tenant)
    patch.setattr(Sequence, "num_inflight", property(count, count_if_there))
    patch.setattr(batch, "check_handles", lambda *args: None)
    patch.setattr(runner, "check_handles", lambda *args: None)
    released_in_flight(patch)
    settle = Scheduler._settle

    def settle_once(self: Scheduler, sequence: Sequence) -> list[TokenEvent]:
        return settle(self, sequence) if sequence in self._leaving else []

    patch.setattr(Scheduler, "_settle", settle_once)


def tenant_not_sent(patch: MonkeyPatch) -> None:
    """The device is not told of a slot's new tenant."""
    patch.setattr(PlanBuilder, "add_tenant", lambda self, sequence: None)


def retracted_in_flight(patch: MonkeyPatch) -> None:
    """A retracted sequence gives up slot and pages though a step of it is in flight."""
    original = Scheduler.retract_last

    def retract(self: Scheduler) -> Sequence | None:
        sequence = self._running.last
        if sequence is not None:
            sequence.num_inflight = 0
        return original(self)

    patch.setattr(Scheduler, "retract_last", retract)


def pages_released_in_flight(patch: MonkeyPatch) -> None:
    """A sequence that ends keeps its slot, but not its pages, until nothing is in flight."""
    release = KVLedger.release

    def release_pages(_: object, self: Scheduler, sequence: Sequence, reason: Any) -> None:
        holding = sequence.holding
        if holding is not None and sequence.num_inflight and not sequence.needs_readout:
            release(self._ledger, holding)

    after(patch, Scheduler, "_decide_finish", release_pages)
    _let_go_once(patch)


def _let_go_once(patch: MonkeyPatch) -> None:
    """Let the ledger pass over what is said of a holding that it has released."""
    release, publish = KVLedger.release, KVLedger.publish

    def release_held(self: KVLedger, holding: Holding) -> None:
        if holding.tables:
            release(self, holding)

    def publish_held(self: KVLedger, holding: Holding, *args: Any) -> None:
        if holding.tables:
            publish(self, holding, *args)

    patch.setattr(KVLedger, "release", release_held)
    patch.setattr(KVLedger, "publish", publish_held)


def pages_released_before_the_gather(patch: MonkeyPatch) -> None:
    """A sequence that ends gives up its pages at once; its rows are read after that."""
    release = KVLedger.release

    def release_pages(_: object, self: Scheduler, sequence: Sequence, reason: Any) -> None:
        if sequence.holding is not None and sequence.needs_readout:
            release(self._ledger, sequence.holding)

    after(patch, Scheduler, "_decide_finish", release_pages)
    _let_go_once(patch)


# -- what is shared ----------------------------------------------------------------------


def published_when_planned(patch: MonkeyPatch) -> None:
    """A page is shared once its forward is planned, before it is known to have been computed."""

    def publish(_: object, self: Scheduler, builder: Any, sequence: Sequence, budget: int) -> None:
        if sequence.holding is not None and self._config.prefix_cache:
            self._ledger.publish(sequence.holding, sequence.known_ids, sequence.planned_len)

    after(patch, Scheduler, "_plan_chunk", publish)


def published_with_last_token(patch: MonkeyPatch) -> None:
    """A page is shared when its last token is sampled: its KV is computed one step later."""

    def publish(_: object, self: Scheduler, sequence: Sequence, *args: Any) -> None:
        holding = sequence.holding
        if holding is not None and self._config.prefix_cache:
            num_tokens = min(sequence.computed_len + 1, sequence.known_len, holding.capacity)
            self._ledger.publish(holding, sequence.known_ids, num_tokens)

    after(patch, Scheduler, "_commit_row", publish)


# -- what is read ------------------------------------------------------------------------


def padding_reads_strangers(patch: MonkeyPatch) -> None:
    """Padded columns of a decode row read the tail of its last page, or anybody's memory."""

    def decode_group(
        tokens_G: np.ndarray, slot_G: np.ndarray, end_G: np.ndarray, state: Any, page_size: int
    ) -> DecodeGroup:
        longest = int(end_G.max())
        pages_GP = state.page_table[slot_G, : -(-longest // page_size)]
        slots_GS = (pages_GP[:, :, None] * page_size + np.arange(page_size)).reshape(
            len(slot_G), -1
        )
        slots_GS = np.maximum(slots_GS[:, :longest], 0)
        return DecodeGroup(
            torch.from_numpy(tokens_G), torch.from_numpy(slots_GS), torch.from_numpy(end_G)
        )

    patch.setattr(batch, "_decode_group", decode_group)
