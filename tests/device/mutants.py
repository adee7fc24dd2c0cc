"""Engines on a GPU with one protection switched off, for ``races``.

What does not depend on the device is in ``tests.explore.mutants``; here are lanes, events, rings
and copies of a real one.
"""

import weakref
from typing import Any

import numpy as np
import torch
from pytest import MonkeyPatch
from torch import Tensor

from dovetail.exec.cuda.device import CudaLane
from dovetail.exec.cuda.runner import CudaRunner
from dovetail.exec.cuda.tenants import Tenants
from dovetail.exec.device import TransferBlock
from dovetail.exec.executor import Executor
from dovetail.exec.ring import BlockRing
from tests.device.sleepy import SleepyLane
from tests.explore import mutants
from tests.explore.mutants import after, before


class _Past:
    """An event for which nobody waits."""

    def wait(self) -> None:
        return


def copy_does_not_wait(patch: MonkeyPatch) -> None:
    """The copy lane does not wait for the step whose result it fetches."""
    patch.setattr(CudaLane, "wait", lambda self, event: None)


def result_is_read_at_once(patch: MonkeyPatch) -> None:
    """The host reads a result without waiting for its copy."""
    collect = Executor._collect

    def collect_at_once(self: Executor, plan: Any, number: int, copied: Any, *args: Any) -> Any:
        return collect(self, plan, number, _Past(), *args)

    patch.setattr(Executor, "_collect", collect_at_once)


def retired_too_early(patch: MonkeyPatch) -> None:
    """The event that says that a step has retired is recorded before its forward."""
    record = SleepyLane.record

    def record_early(self: SleepyLane) -> Any:
        return self.before_last if self._lane.name == "compute" else record(self)

    patch.setattr(SleepyLane, "record", record_early)


def staging_has_no_fence(patch: MonkeyPatch) -> None:
    """One staging block, handed out again before the packet in it was taken; no junk in it."""
    patch.setattr("tests.device.sleepy.POISON_BYTE", 0)  # an empty packet: nobody is led astray
    mutants.staging_has_no_fence(patch)


def one_result_block_unchecked(patch: MonkeyPatch) -> None:
    """A ring of one result block that gives it away while it is in use."""
    mutants.one_result_block(patch)

    def take_back(ring: BlockRing) -> None:
        ring._blocks[ring._next].in_use = False

    before(patch, BlockRing, "acquire", take_back)


def result_block_released_at_submit(patch: MonkeyPatch) -> None:
    """A result block goes back to a ring of one when its copy is queued, not when it was read."""
    mutants.one_result_block(patch)

    def give_back(_: Any, self: Executor, *args: Any) -> None:
        self._results.release(self._results._blocks[0])

    after(patch, Executor, "submit", give_back)


def copy_lane_reads_state(patch: MonkeyPatch) -> None:
    """The copy lane takes the tokens from engine state, which the next step changes."""
    sampled: weakref.WeakKeyDictionary[TransferBlock, Any] = weakref.WeakKeyDictionary()

    def remember(
        _: None, self: Executor, plan: Any, layout: Any, result: TransferBlock, *args: Any
    ) -> None:
        rows = np.flatnonzero(plan.rows.samples)
        sampled[result] = (self._runner._slots.last_token, plan.rows.slot[rows].tolist(), rows)

    def fetch(block: TransferBlock) -> None:
        if block in sampled:
            last_token, slots, rows = sampled.pop(block)
            host = block.host.view(torch.int32)
            for slot, row in zip(slots, rows.tolist(), strict=True):
                host[row : row + 1].copy_(last_token[slot : slot + 1], non_blocking=True)

    def fetch_too(_: None, self: Executor, block: TransferBlock, *span: int) -> None:
        self._device.copy.submit(fetch, block)

    after(patch, Executor, "_run", remember)
    after(patch, Executor, "_download", fetch_too)


def stale_handle_accepted(patch: MonkeyPatch) -> None:
    """A sequence gives up its slot in flight, and the device looks at no generation."""
    patch.setattr(Tenants, "check", lambda *args: None)
    mutants.stale_handle_accepted(patch)


def snapshot_skipped(patch: MonkeyPatch) -> None:
    """The copy lane fetches a step's rows from the pages and inputs of whatever runs by then."""
    waiting: dict[int, Any] = {}

    def remember(self: CudaRunner, plan: Any, layout: Any, payload: Tensor) -> None:
        waiting[payload.data_ptr()] = self, plan.num_tokens, layout

    def fetch(block: TransferBlock, begin: int) -> None:
        address = block.device.data_ptr()
        if address in waiting and waiting[address][2].readout_bytes == begin:
            runner, num_tokens, layout = waiting.pop(address)
            slots_T = runner._inputs.kv_slots_T[:num_tokens]
            runner._copies.snapshot(slots_T, layout.snapshot, block.device)

    def fetch_first(self: Executor, block: TransferBlock, begin: int, end: int) -> None:
        self._device.copy.submit(fetch, block, begin)

    patch.setattr(CudaRunner, "_pack_snapshot", remember)
    before(patch, Executor, "_download", fetch_first)
