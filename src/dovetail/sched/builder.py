"""Collects the rows of one plan and freezes them into arrays."""

import numpy as np

from dovetail.sched.plan import FROM_DEVICE, PageWrites, Readout, Rows, SlotWrites, StepPlan
from dovetail.sched.sequence import Sequence


class PlanBuilder:
    """A plan being written. Used once, by ``Scheduler.plan``."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._token_ids: list[int] = []
        self._page_writes: list[tuple[int, int, int, int]] = []
        self._tenants: list[Sequence] = []
        self._readouts: list[Readout] = []

    @property
    def is_empty(self) -> bool:
        """True while there is nothing to submit."""
        return not self._rows and not self._readouts

    @property
    def num_page_writes(self) -> int:
        """Page-table entries the plan changes so far."""
        return len(self._page_writes)

    def add_tenant(self, sequence: Sequence) -> None:
        """Tell the device who lives in the sequence's slot and how it samples."""
        self._tenants.append(sequence)

    def add_pages(self, sequence: Sequence) -> None:
        """Tell the device the table entries it has not been told yet."""
        assert sequence.holding is not None
        for group, table in enumerate(sequence.holding.tables):
            sent = sequence.num_pages_sent[group]
            for index in range(sent, len(table)):
                self._page_writes.append((group, sequence.slot, index, table[index]))
            sequence.num_pages_sent[group] = len(table)

    def add_decode(self, sequence: Sequence, *, bound: int) -> None:
        """Forward the token that the device sampled last, and sample the next."""
        self._rows.append((sequence.slot, sequence.generation, FROM_DEVICE, 1, bound, 1))

    def add_prefill(self, sequence: Sequence, *, width: int, bound: int, samples: int) -> None:
        """Forward the next ``width`` known tokens."""
        start = sequence.planned_len
        self._rows.append((sequence.slot, sequence.generation, start, width, bound, samples))
        self._token_ids.extend(sequence.known_ids[start : start + width])

    def add_readout(self, sequence: Sequence, *, start: int, end: int) -> None:
        """Read back the sequence's captured columns of positions ``[start, end)``."""
        self._readouts.append(
            Readout(sequence.slot, sequence.generation, start, end, sequence.request.capture)
        )

    def build(self, *, step_id: int, epoch: int) -> StepPlan:
        """Return the finished plan."""
        rows = np.array(self._rows, dtype=np.int32).reshape(-1, 6).T.copy()
        pages = np.array(self._page_writes, dtype=np.int32).reshape(-1, 4).T.copy()
        return StepPlan(
            step_id=step_id,
            epoch=epoch,
            rows=Rows(
                slot=rows[0],
                generation=rows[1],
                start=rows[2],
                width=rows[3],
                bound=rows[4],
                samples=rows[5],
            ),
            token_ids=np.array(self._token_ids, dtype=np.int32),
            page_writes=PageWrites(group=pages[0], slot=pages[1], index=pages[2], page=pages[3]),
            slot_writes=_slot_writes(self._tenants),
            readouts=tuple(self._readouts),
        )


def _slot_writes(tenants: list[Sequence]) -> SlotWrites:
    params = [tenant.request.sampling for tenant in tenants]
    return SlotWrites(
        slot=np.array([tenant.slot for tenant in tenants], dtype=np.int32),
        generation=np.array([tenant.generation for tenant in tenants], dtype=np.int32),
        temperature=np.array([item.temperature for item in params], dtype=np.float32),
        top_k=np.array([max(item.top_k, 0) for item in params], dtype=np.int32),
        top_p=np.array([item.top_p for item in params], dtype=np.float32),
        min_p=np.array([item.min_p for item in params], dtype=np.float32),
        seed=np.array([tenant.request.seed for tenant in tenants], dtype=np.uint64),
        sample_index=np.zeros(len(tenants), dtype=np.int32),
    )
