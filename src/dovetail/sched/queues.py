"""The sequences that wait and the sequences that run, each in arrival order."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from dovetail.sched.sequence import Sequence


class ArrivalQueue:
    """Sequences sorted by arrival. A retracted one goes back to where it came from."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Insert at the sequence's place; the end, for a new arrival."""
        insort(self._sequences, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be there."""
        index = bisect_left(self._sequences, sequence.arrival, key=_arrival)
        assert self._sequences[index] is sequence
        del self._sequences[index]

    def pop_oldest(self) -> Sequence:
        """Take the oldest out."""
        return self._sequences.pop(0)

    @property
    def oldest(self) -> Sequence | None:
        """The first in line."""
        return self._sequences[0] if self._sequences else None

    @property
    def youngest(self) -> Sequence | None:
        """The last in line."""
        return self._sequences[-1] if self._sequences else None

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
