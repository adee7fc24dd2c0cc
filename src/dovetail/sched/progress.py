"""How far the tenants of all slots have got, in arrays over the slots.

Owns the two clocks of every sequence that has memory, and its newest tokens until its record takes
them. So a step of steady decode is a few operations on arrays, however many rows it has, and only
those sequences are looked at for which more is to be done than to count. Must not know what that
is: it is told at which length to look.

Shape legend: S slots, R rows of a step (no slot is there twice), N newest tokens.
"""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.intp]
Mask = NDArray[np.bool_]

NEVER = 2**31 - 1
MOST_NEW = 64
"""Tokens of a sequence that may wait for its record to take them (N)."""
_NO_ID = -1
MOST_END_IDS = 4
"""Ids of a sequence that are compared for all rows at once. One with more is always looked at."""


class Progress:
    """Clocks and newest tokens of the tenants. Written by the ``Scheduler`` alone, on its thread.

    Attributes:
        planned_len, computed_len, num_inflight: int64 [S]; see ``Sequence``.
        plan_look_at: int64 [S], ``planned_len`` from which a decode row needs more than a row.
        commit_look_at: int64 [S], ``computed_len`` from which a commit looks at the tenant, which
            may end; 0 for one that is looked at each time.
        upkeep_at: int64 [S], ``computed_len`` at which a tenant that goes on has something due.
        is_streamed: bool [S], each of its tokens is news at once.
    """

    def __init__(self, num_slots: int) -> None:
        self.planned_len = np.zeros(num_slots, dtype=np.int64)
        self.computed_len = np.zeros(num_slots, dtype=np.int64)
        self.num_inflight = np.zeros(num_slots, dtype=np.int64)
        self.plan_look_at = np.zeros(num_slots, dtype=np.int64)
        self.commit_look_at = np.zeros(num_slots, dtype=np.int64)
        self.upkeep_at = np.zeros(num_slots, dtype=np.int64)
        self.is_streamed = np.zeros(num_slots, dtype=np.bool_)
        # A slot's ids are in its column; only the first rows are in use.
        self._end_ids = np.full((MOST_END_IDS, num_slots), _NO_ID, dtype=np.int32)
        self._num_end_rows = 0
        self._num_new = np.zeros(num_slots, dtype=np.int64)
        self._token_ids = np.zeros((num_slots, MOST_NEW), dtype=np.int32)
        self._logprobs = np.zeros((num_slots, MOST_NEW), dtype=np.float32)
        self._epochs = np.zeros((num_slots, MOST_NEW), dtype=np.int64)

    def enter(self, slot: int, end_ids: Collection[int], *, is_streamed: bool) -> None:
        """Begin with a new tenant, of which nothing is planned."""
        for array in (self.planned_len, self.computed_len, self.num_inflight, self._num_new):
            array[slot] = 0
        self.commit_look_at[slot] = self.upkeep_at[slot] = 0
        self.is_streamed[slot] = is_streamed
        self._end_ids[:, slot] = _NO_ID
        if len(end_ids) <= MOST_END_IDS:
            self._end_ids[: len(end_ids), slot] = sorted(end_ids)
            self._num_end_rows = max(self._num_end_rows, len(end_ids))

    # -- all rows of a step at once ------------------------------------------------------

    def plan_one(self, slots: Slots) -> None:
        """Plan a decode row of each slot."""
        self.planned_len[slots] += 1
        self.num_inflight[slots] += 1

    def needs_look(
        self, slots: Slots, widths: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> Mask:
        """Return which rows [R] to be committed need a look at their sequences.

        Of any other, the sequence decodes, goes on, and is to be told of its token alone.
        """
        computed_len = self.computed_len.take(slots) + widths
        looks = computed_len >= self.commit_look_at.take(slots)
        for end_ids in self._end_ids[: self._num_end_rows]:
            looks |= end_ids.take(slots) == token_ids
        return looks

    def commit_one(
        self,
        slots: Slots,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        epoch: int,
    ) -> Mask:
        """Commit a decode row of each slot; return which [R] have something due."""
        computed_len = self.computed_len.take(slots) + 1
        self.computed_len[slots] = computed_len
        self.num_inflight[slots] -= 1
        num_new = self._num_new.take(slots)
        self._num_new[slots] = num_new + 1
        places = slots * self.most_new + num_new  # as if all slots were one row: half the time
        self._token_ids.reshape(-1)[places] = token_ids
        self._logprobs.reshape(-1)[places] = logprobs
        self._epochs.reshape(-1)[places] = epoch
        return computed_len >= self.upkeep_at.take(slots)

    # -- one tenant ----------------------------------------------------------------------

    @property
    def most_new(self) -> int:
        """Tokens of a tenant that may wait for its record."""
        return self._token_ids.shape[1]

    def num_new(self, slot: int) -> int:
        """Return how many tokens wait for the record."""
        return self._num_new.item(slot)

    def take_new(self, slot: int) -> tuple[list[int], list[float], list[int]]:
        """Hand over ids, logprobs and epochs of the tokens that wait for the record."""
        num_new = self._num_new.item(slot)
        self._num_new[slot] = 0
        return (
            self._token_ids[slot, :num_new].tolist(),
            self._logprobs[slot, :num_new].tolist(),
            self._epochs[slot, :num_new].tolist(),
        )
