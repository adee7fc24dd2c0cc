"""What plans in flight may touch, checked from the plans and the ledger alone.

One in-order compute lane forgives much: a page that is given away too early is still written in the
right order there. Other lanes and other devices will not forgive, so the rule itself is checked.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from dovetail.cache.ledger import KVLedger
from dovetail.errors import InvariantError
from dovetail.exec.executor import Executor
from dovetail.exec.kv import KVStore
from dovetail.exec.pending import PendingStep, StepExecutor
from dovetail.sched.plan import FROM_DEVICE, ReadRows, StepPlan, StepResult


def published_pages(ledger: KVLedger) -> set[int]:
    """Return the pages that the prefix tree shares."""
    return {node.pages[0] for node in ledger._tree.nodes()}


@dataclass(slots=True)
class _Tenant:
    """A slot as plans describe it: the device's state after the last plan submitted."""

    generation: int
    pages: dict[int, int] = field(default_factory=dict)
    kv_len: int = 0


@dataclass(slots=True)
class _Touched:
    """Pages of one plan in flight; ``read`` by its read-outs, until their rows have been taken."""

    read: set[int] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)


class PlanAudit:
    """An executor around another one that checks every plan.

    Invariants: a page that a plan in flight names is not free, unless to be read alone and its rows
    have been taken; one that it writes is not shared; no two rows of a plan write one page; every
    handle is that of the slot's tenant; a row goes on where the one before ended, and stays within
    its pages.
    """

    def __init__(self, executor: StepExecutor, ledger: KVLedger) -> None:
        self._executor = executor
        self._ledger = ledger
        self._tenants: dict[int, _Tenant] = {}
        self._inflight: dict[int, _Touched] = {}

    def submit(self, plan: StepPlan) -> PendingStep:
        """Check the plan and pass it on."""
        self._inflight[plan.step_id] = self._follow(plan)
        self.check()
        pending = self._executor.submit(plan)

        def collect() -> StepResult:
            result = pending.result()
            del self._inflight[plan.step_id]
            return result

        def read() -> ReadRows:
            rows = pending.readouts()
            self._inflight[plan.step_id].read.clear()
            return rows

        return PendingStep(plan, collect, read)

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()

    def check(self) -> None:
        """Raise InvariantError if a plan in flight touches a page that it may not touch."""
        (pool,) = self._ledger._pools
        published = published_pages(self._ledger)
        for step_id, touched in self._inflight.items():
            free = [page for page in touched.read | touched.named if not pool.ref_count(page)]
            if free:
                raise InvariantError(f"audit: step {step_id} is in flight, its pages {free} free")
            if touched.written & published:
                raise InvariantError(
                    f"audit: step {step_id} in flight writes shared {touched.written & published}"
                )

    def _follow(self, plan: StepPlan) -> _Touched:
        touched = _Touched()
        for readout in plan.readouts:
            tenant = self._tenant(readout.slot, readout.generation)
            if readout.end > tenant.kv_len:
                raise InvariantError(f"audit: {readout} of {tenant.kv_len} tokens")
            touched.read |= self._pages(tenant, readout.start, readout.end)
        for slot, generation in _columns(plan.slot_writes, "slot", "generation"):
            self._tenants[slot] = _Tenant(generation)
        for _, slot, index, page, _ in plan.page_writes.columns.T.tolist():
            self._tenants[slot].pages[index] = page
        for row in _columns(plan.rows, "slot", "generation", "start", "width"):
            self._follow_row(touched, *row)
        return touched

    def _follow_row(
        self, touched: _Touched, slot: int, generation: int, start: int, width: int
    ) -> None:
        tenant = self._tenant(slot, generation)
        is_cached = tenant.kv_len == 0  # the first row begins behind a prefix hit
        begin = tenant.kv_len if start == FROM_DEVICE else start
        if begin != tenant.kv_len and not is_cached:
            raise InvariantError(f"audit: slot {slot} goes on at {begin}, not {tenant.kv_len}")
        tenant.kv_len = begin + width
        if tenant.kv_len > len(tenant.pages) * self._ledger.page_size:
            raise InvariantError(f"audit: slot {slot} has {tenant.kv_len} tokens, {tenant.pages}")
        written = self._pages(tenant, begin, tenant.kv_len)
        if written & touched.written:
            raise InvariantError(f"audit: pages {written & touched.written} have two writers")
        touched.written |= written
        touched.named |= self._pages(tenant, 0, tenant.kv_len)

    def _tenant(self, slot: int, generation: int) -> _Tenant:
        tenant = self._tenants.get(slot)
        if tenant is None or tenant.generation != generation:
            raise InvariantError(f"audit: slot {slot} generation {generation} is not {tenant}")
        return tenant

    def _pages(self, tenant: _Tenant, start: int, end: int) -> set[int]:
        size = self._ledger.page_size
        return {tenant.pages[index] for index in range(start // size, -(-end // size))}


class PoisonedPages:
    """An executor around another one that spoils the keys and values of pages that change hands.

    So memory that nobody wrote, and memory of a stranger, is NaN. Side data the engine itself
    poisons.
    """

    def __init__(self, executor: Executor, ledger: KVLedger) -> None:
        self._executor = executor
        self._ledger = ledger
        executor._device.compute.submit(_spoil, executor._runner._kv, None)

    def submit(self, plan: StepPlan) -> PendingStep:
        """Spoil the plan's new pages, but those of a prefix hit, and pass it on."""
        pages = set(plan.page_writes.column("page").tolist()) - published_pages(self._ledger)
        if pages:
            size = self._ledger.page_size
            slots = [page * size + offset for page in sorted(pages) for offset in range(size)]
            self._executor._device.compute.submit(_spoil, self._executor._runner._kv, slots)
        return self._executor.submit(plan)

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()


@torch.inference_mode()
def _spoil(store: KVStore, slots: list[int] | None) -> None:
    index = slice(None) if slots is None else torch.tensor(slots)
    store.k_LCKD[:, index] = math.nan
    store.v_LCKD[:, index] = math.nan


def _columns(arrays: object, *names: str) -> Iterable[tuple[int, ...]]:
    return zip(*(getattr(arrays, name).tolist() for name in names), strict=True)
