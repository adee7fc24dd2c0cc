"""The captured rows of one sequence, and where they come from.

Owns the rows: appended once, never rewritten, whatever happens to the memory that they were read
from. Must not know pages or plans.

A sequence that lost its memory is forwarded again, and its columns are read again. What had been
recorded stays, for tokens were sampled from those very forwards; the second reading only tells how
many rows it did not reproduce.

Shape legend: N rows.
"""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dovetail.config.capture import ColumnSpec
from dovetail.errors import InvariantError
from dovetail.wire.capture import CapturedRows, CaptureSpan
from dovetail.wire.tensor import TensorEnvelope

ROOM_BYTES = 2**22
"""Room that a column is given with its first rows, if there can be so many."""

ColumnRows = Mapping[str, NDArray[np.generic]]


class CapturedColumns:
    """What a sequence has captured. Append-only; written by the ``Scheduler``, on the loop thread.

    Args:
        specs: the columns that the request asks for.
        start: position of the first row that it asks for.
        max_rows: rows that there can be.

    Attributes:
        recorded: rows of positions before this one are recorded.
        planned: rows of positions before this one have been read, or a read-out is in flight,
            since the sequence got its memory.
    """

    def __init__(self, specs: Mapping[str, ColumnSpec], *, start: int, max_rows: int) -> None:
        self.specs = specs
        self.start = start
        self.max_rows = max_rows
        self.recorded = self.planned = start
        # With room for more. Each row is written once, so views of those that are there can leave.
        self._rows = {
            name: np.empty((0, *spec.shape), dtype=spec.dtype) for name, spec in specs.items()
        }
        self._differs: dict[str, set[int]] = {name: set() for name in specs}
        self._epochs: list[tuple[int, int]] = []  # (end, epoch), of the recorded rows
        self._computed: list[tuple[int, int]] = []  # the same of those in memory now
        self._again: list[tuple[int, int]] = []  # ranges forwarded again after they were recorded
        self._emitted = start  # rows of positions before this one have left
        self._cached_len = 0  # positions that the cache filled when the memory was got
        self._known = start  # rows that were recorded by then

    # -- what happens in memory ----------------------------------------------------------

    def begin(self, cached_len: int, epoch: int) -> None:
        """The sequence has memory, of which the cache has filled ``cached_len`` positions."""
        self._computed = [(cached_len, epoch)] if cached_len else []
        self._cached_len, self._known = cached_len, self.recorded
        self.planned = self.start

    def forwarded(self, computed_len: int, epoch: int) -> None:
        """The positions before ``computed_len`` have been forwarded, the newest under ``epoch``."""
        if self._computed and self._computed[-1][1] == epoch:
            self._computed[-1] = (computed_len, epoch)
        else:
            self._computed.append((computed_len, epoch))

    def forget_memory(self) -> None:
        """The memory is gone; what was recorded stays."""
        self._again += self._recomputed()
        self._computed = []
        self.planned = self.start

    def _recomputed(self) -> list[tuple[int, int]]:
        """Return the range that was forwarded in the present memory though it was recorded."""
        computed_len = self._computed[-1][0] if self._computed else 0
        start, end = max(self._cached_len, self.start), min(computed_len, self._known)
        return [(start, end)] if start < end else []

    # -- what is read --------------------------------------------------------------------

    def append(self, start: int, rows: ColumnRows, *, end: int) -> None:
        """Take the rows of a read-out that began at ``start``, those of positions before ``end``.

        Raises:
            InvariantError: a row was never written, or there is a gap before the first.
        """
        num_rows = min(len(next(iter(rows.values()))), end - start)
        if num_rows <= 0:
            return  # read ahead, behind an end that nobody knew of
        if start > self.recorded:
            raise InvariantError(f"rows from position {start}, but {self.recorded} are recorded")
        known = min(max(self.recorded - start, 0), num_rows)
        for name, values in rows.items():
            _expect_written(name, values[:num_rows], self.specs[name], start)
            if known:
                self._compare(name, start, values[:known])
            if known < num_rows:
                self._store(name, values[known:num_rows])
        end = start + num_rows
        if end <= self.recorded:
            return
        for border, epoch in self._computed:
            if border > self.recorded:
                self._note_epoch(min(border, end), epoch)
        self.recorded = end

    def _store(self, name: str, values: NDArray[np.generic]) -> None:
        """Put rows behind the recorded ones, in memory that has room for more or is made to."""
        rows, num_recorded = self._rows[name], self.recorded - self.start
        num_needed = num_recorded + len(values)
        if num_needed > len(rows):
            room = 2 * len(rows) or ROOM_BYTES // self.specs[name].row_bytes
            shape = (max(min(room, self.max_rows), num_needed), *rows.shape[1:])
            larger = np.empty(shape, dtype=rows.dtype)
            larger[:num_recorded] = rows[:num_recorded]
            rows = self._rows[name] = larger
        rows[num_recorded:num_needed] = values

    def _note_epoch(self, end: int, epoch: int) -> None:
        begin = self._epochs[-1][0] if self._epochs else self.start
        if end <= begin:
            return
        if self._epochs and self._epochs[-1][1] == epoch:
            self._epochs.pop()
        self._epochs.append((end, epoch))

    def _compare(self, name: str, start: int, rows_N: NDArray[np.generic]) -> None:
        known_N = self._recorded(name, start, start + len(rows_N))
        # By bytes: what is compared is whether they are the same, not how near.
        is_same = (_as_bytes(known_N) == _as_bytes(rows_N)).all(axis=1)
        self._differs[name].update((start + np.flatnonzero(~is_same)).tolist())

    # -- what is told --------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """True if rows have been recorded that no event has had."""
        return self._emitted < self.recorded

    @property
    def has_left(self) -> bool:
        """True once an event has had rows."""
        return self._emitted > self.start

    def news(self, *, is_last: bool) -> dict[str, CapturedRows]:
        """Return the rows recorded since the last call; with the last ones, all spans."""
        first, self._emitted = self._emitted, self.recorded
        return {
            name: CapturedRows(
                start=first,
                rows=TensorEnvelope.pack(self._leaving(name, first, self.recorded)),
                spans=self._spans(name) if is_last else (),
            )
            for name in self.specs
        }

    def _recorded(self, name: str, start: int, end: int) -> NDArray[np.generic]:
        """Return the recorded rows of positions ``[start, end)``, as a view."""
        return self._rows[name][start - self.start : end - self.start]

    def _leaving(self, name: str, start: int, end: int) -> NDArray[np.generic]:
        """Return recorded rows for somebody who may keep them, and with them what they lie in."""
        rows = self._recorded(name, start, end)
        return rows.copy() if 2 * len(rows) < len(self._rows[name]) else rows

    def _spans(self, name: str) -> tuple[CaptureSpan, ...]:
        again = self._again + self._recomputed()
        borders = {self.start, self.recorded, *(end for end, _ in self._epochs)}
        borders |= {border for span in again for border in span}
        return tuple(
            CaptureSpan(
                start=start,
                end=end,
                epoch=next(epoch for border, epoch in self._epochs if start < border),
                num_recomputed=sum(a <= start and end <= b for a, b in again),
                num_differing=sum(start <= position < end for position in self._differs[name]),
            )
            for start, end in pairwise(sorted(borders))
        )


def _expect_written(name: str, rows: NDArray[np.generic], spec: ColumnSpec, start: int) -> None:
    # Poison is the largest of unsigned ids and less than any token, and NaN is contagious: one
    # number tells of all rows.
    extreme = rows.min() if spec.poison < 0 else rows.max()
    if extreme == spec.poison or extreme != extreme:
        is_poison = (rows == spec.poison) | (rows != rows)
        position = start + int(np.argwhere(is_poison)[0][0])
        raise InvariantError(f"column {name} has no row for position {position}")


def _as_bytes(rows_N: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(rows_N).view(np.uint8).reshape(len(rows_N), -1)
