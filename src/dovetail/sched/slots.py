"""Rows of device state and their tenants."""

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InvariantError
from dovetail.sched.progress import Progress, Slots
from dovetail.sched.sequence import Sequence

_VACANT = -1


class SlotTable:
    """Which sequence lives in which slot.

    Owns the generation number of each slot: it grows with every new tenant, so a
    handle ``(slot, generation)`` names one tenancy for ever, and a stale one is an
    error instead of somebody else's token.

    Attributes:
        progress: how far the tenants have got.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._generations = [0] * num_slots
        self._tenancies = np.full(num_slots, _VACANT, dtype=np.int32)  # generation of the tenant
        self._tenants: list[Sequence | None] = [None] * num_slots
        self.progress = Progress(num_slots)

    @property
    def num_free(self) -> int:
        """Slots without a tenant."""
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        """Give ``sequence`` a slot and its generation."""
        slot = self._free.pop()
        self._generations[slot] += 1
        self._tenancies[slot] = self._generations[slot]
        self._tenants[slot] = sequence
        sequence.enter(slot, self._generations[slot], self.progress)

    def release(self, sequence: Sequence) -> None:
        """Take the slot back from its tenant."""
        assert self.tenant(sequence.slot, sequence.generation) is sequence
        self._tenants[sequence.slot] = None
        self._tenancies[sequence.slot] = _VACANT
        self._free.append(sequence.slot)

    def tenant(self, slot: int, generation: int) -> Sequence:
        """Return the sequence that a handle names.

        Raises:
            InvariantError: the tenancy has ended.
        """
        sequence = self._tenants[slot]
        if sequence is None or self._generations[slot] != generation:
            now = "empty" if sequence is None else f"generation {self._generations[slot]}"
            raise InvariantError(f"slot {slot} generation {generation} is stale; it is now {now}")
        return sequence

    def present(self, slot: int, generation: int) -> Sequence | None:
        """Return the sequence that a handle names, or None if its tenancy has ended."""
        return self._tenants[slot] if self._generations[slot] == generation else None

    def tenants(self, slots: Slots) -> list[Sequence]:
        """Return who lives in these slots, each of which has a tenant."""
        tenants = self._tenants
        return [tenants[slot] for slot in slots.tolist()]  # pyright: ignore[reportReturnType]

    def expect_tenants(self, slots: Slots, generations: NDArray[np.int32]) -> None:
        """Raise an InvariantError unless all handles name tenants."""
        is_stale = self._tenancies.take(slots) != generations
        if is_stale.any():
            for row in np.flatnonzero(is_stale).tolist():
                self.tenant(int(slots[row]), int(generations[row]))
