"""Sequences in the order in which they are served."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from dovetail.sched.sequence import Sequence


class RankedQueue:
    """Sequences sorted by rank. A retracted one goes back to where it came from."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Insert at the sequence's place."""
        insort(self._sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be there."""
        index = bisect_left(self._sequences, sequence.rank, key=_rank)
        assert self._sequences[index] is sequence
        del self._sequences[index]

    def __contains__(self, sequence: Sequence) -> bool:
        index = bisect_left(self._sequences, sequence.rank, key=_rank)
        return index < len(self._sequences) and self._sequences[index] is sequence

    def first(self, count: int) -> list[Sequence]:
        """Return the first ``count`` in line."""
        return list(islice(self._sequences, count))

    @property
    def last(self) -> Sequence | None:
        """The last in line."""
        return self._sequences[-1] if self._sequences else None

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
