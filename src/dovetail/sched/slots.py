"""Rows of device state and their tenants."""

from dovetail.errors import InvariantError
from dovetail.sched.sequence import Sequence


class SlotTable:
    """Which sequence lives in which slot.

    Owns the generation number of each slot: it grows with every new tenant, so a
    handle ``(slot, generation)`` names one tenancy for ever, and a stale one is an
    error instead of somebody else's token.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._generations = [0] * num_slots
        self._tenants: list[Sequence | None] = [None] * num_slots

    @property
    def num_free(self) -> int:
        """Slots without a tenant."""
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        """Give ``sequence`` a slot and its generation."""
        slot = self._free.pop()
        self._generations[slot] += 1
        self._tenants[slot] = sequence
        sequence.slot, sequence.generation = slot, self._generations[slot]

    def release(self, sequence: Sequence) -> None:
        """Take the slot back from its tenant."""
        assert self.tenant(sequence.slot, sequence.generation) is sequence
        self._tenants[sequence.slot] = None
        self._free.append(sequence.slot)

    def tenant(self, slot: int, generation: int) -> Sequence:
        """Return the sequence that a handle names.

        Raises:
            InvariantError: the tenancy has ended.
        """
        sequence = self._tenants[slot]
        if sequence is None or self._generations[slot] != generation:
            raise InvariantError(
                f"slot {slot} generation {generation} is stale; it is now generation "
                f"{self._generations[slot]}"
            )
        return sequence
