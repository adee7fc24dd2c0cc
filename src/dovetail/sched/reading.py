"""Whose captured rows are to be read, and how far.

Owns the list of running sequences with rows that are due, and the planning of read-outs in pieces
where a step's payload is short. Must not know why rows are due: a sequence says so itself
(``Sequence.read_at``), and one that leaves has all of its rows read.
"""

from collections.abc import Iterable

from dovetail.sched.builder import PlanBuilder
from dovetail.sched.sequence import Sequence, SequenceState


class ReadingList:
    """Rows that are due. Owned by the ``Scheduler``, on the loop thread.

    Invariant: whoever is on the list is RUNNING; rows before its end have been forwarded, or are
    by plans that come before the read-out.
    """

    def __init__(self) -> None:
        self._ends: dict[Sequence, int] = {}

    def note_computed(self, sequence: Sequence) -> None:
        """Take note that a running sequence has come to its ``read_at``: its rows are due."""
        self._ends[sequence] = max(sequence.computed_len, self._ends.get(sequence, 0))

    def note_last_row(self, sequence: Sequence) -> None:
        """Take note that no further row of a sequence will be planned.

        Its rows can be read behind those in flight, before anybody knows how they came out: if it
        turns out to have ended earlier, those behind its end are dropped at the commit.
        """
        if sequence.captured is not None and sequence.state is SequenceState.RUNNING:
            self._ends[sequence] = sequence.planned_len

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence that does not run any more."""
        self._ends.pop(sequence, None)

    def plan(self, builder: PlanBuilder, leaving: Iterable[Sequence]) -> None:
        """Plan read-outs of what is due and of those that leave, as far as there is room."""
        for sequence, end in list(self._ends.items()):
            if self._read(builder, sequence, end):
                del self._ends[sequence]
        for sequence in leaving:
            if not sequence.needs_readout:
                continue
            end = sequence.computed_len
            if sequence.state is SequenceState.RETRACTING and sequence.planned_len > end:
                continue  # what is in flight will be recorded, too
            self._read(builder, sequence, end)

    def _read(self, builder: PlanBuilder, sequence: Sequence, end: int) -> bool:
        """Plan to read a sequence up to ``end``; False if the payload has no room for all."""
        captured = sequence.captured
        if captured is None:
            return True
        start = captured.planned
        stop = min(end, start + builder.max_read(captured.specs.values()))
        if start < stop:
            builder.add_readout(sequence, start=start, end=stop)
            sequence.read_until(stop)
            sequence.num_inflight += 1
        return captured.planned >= end
