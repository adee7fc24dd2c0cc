"""The sequences that may be planned: who is in line, who prefills, who decodes.

Owns the decode rows that a step has as long as nothing changes: they are made when somebody comes
or goes, and are the same object until then.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from dovetail.sched.plan import FROM_DEVICE, Rows, Score
from dovetail.sched.progress import Progress, Slots
from dovetail.sched.queues import RankedQueue
from dovetail.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A decode row of each of some sequences.

    Attributes:
        rows: as the plan has them.
        scores: what the rows report beside their tokens' logprobs.
        slots: ``rows.slot`` as numpy likes it for an index.
        sequences: theirs.
    """

    rows: Rows
    scores: tuple[Score, ...]
    slots: Slots
    sequences: tuple[Sequence, ...]


class RunningSequences:
    """All that run, in line. Each prefills, decodes, or waits for its last token.

    Loop thread only.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._all = RankedQueue()
        self._prefilling = RankedQueue()
        self._decoding = RankedQueue()
        self._decode_rows: DecodeRows | None = None  # of all that decode

    def add(self, sequence: Sequence) -> None:
        """Take in a sequence whose prefill is to be planned."""
        self._all.add(sequence)
        self._prefilling.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go; it must be there."""
        self._all.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        elif sequence in self._decoding:
            self.end_decoding(sequence)

    def end_prefill(self, sequence: Sequence) -> None:
        """Its last chunk is planned: from now on it decodes, if it samples any more."""
        self._prefilling.remove(sequence)
        if sequence.samples_left:
            sequence.look_when_planned()
            self._decoding.add(sequence)
            self._decode_rows = None

    def end_decoding(self, sequence: Sequence) -> None:
        """All its tokens are planned."""
        self._decoding.remove(sequence)
        self._decode_rows = None

    # -- who is there --------------------------------------------------------------------

    @property
    def prefilling(self) -> list[Sequence]:
        """Those still in their prompt, in line."""
        return list(self._prefilling)

    @property
    def last(self) -> Sequence | None:
        """The last in line."""
        return self._all.last

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    # -- decode rows ---------------------------------------------------------------------

    def to_look_at(self) -> list[Sequence]:
        """Return those, in line, whose decode row needs more than a row: pages, or its end."""
        decode, progress = self._current_rows(), self._progress
        planned_len = progress.planned_len.take(decode.slots)
        looks = planned_len >= progress.plan_look_at.take(decode.slots)
        return [decode.sequences[row] for row in np.flatnonzero(looks).tolist()]

    def decode_rows(self, *, without: Collection[Sequence] = ()) -> DecodeRows:
        """Return the rows of all that decode, in line; some may sit this step out."""
        if without:
            kept = tuple(sequence for sequence in self._decoding if sequence not in without)
            return _decode_rows(kept)
        return self._current_rows()

    def _current_rows(self) -> DecodeRows:
        if self._decode_rows is None:
            self._decode_rows = _decode_rows(tuple(self._decoding))
        return self._decode_rows


def _decode_rows(sequences: tuple[Sequence, ...]) -> DecodeRows:
    slots = np.array([sequence.slot for sequence in sequences], dtype=np.intp)
    ones = np.ones(len(slots), dtype=np.int32)
    rows = Rows(
        slot=slots.astype(np.int32),
        generation=np.array([sequence.generation for sequence in sequences], dtype=np.int32),
        start=np.full(len(slots), FROM_DEVICE, dtype=np.int32),
        width=ones,
        samples=ones,
    )
    scores = tuple(
        sequence.score(row, first=0, count=1, is_prompt=False)
        for row, sequence in enumerate(sequences)
        if sequence.wants_scores
    )
    return DecodeRows(rows, scores, slots, sequences)
