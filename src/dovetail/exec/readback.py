"""What comes back from a step: one result block, and one payload block if asked for.

Owns the layout of both and the rule that a ``StepResult`` holds copies only: nothing
in it is a view of a ring or of engine state.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.config.capture import ColumnSpec
from dovetail.config.payload import MASK_HEAD_WORDS, PAYLOAD_ALIGN
from dovetail.errors import InvariantError
from dovetail.sched.plan import Readout, ReadRows, Score, StepPlan, StepResult, TokenScores

RESULT_WORDS = 3
"""Words a row of the result block: token id, logprob bits, status. Behind those of all rows stands
one more, the packet's number."""

BROKEN_ROW = -1
"""What a device writes as the status of a row that breaks a rule, where it cannot raise."""

Bytes = NDArray[np.uint8]

COPY_COLUMNS = ("column", "slot", "start", "count", "first")
"""One column of one read-out: rows of the positions ``[start, start + count)`` of the sequence in a
slot go to the rows from ``first`` on of the column's array in the payload block. ``column`` is its
number among all columns."""

KV_SLOTS = ColumnSpec(np.dtype(np.int64), (), -1)
"""What a snapshot holds beside its columns: where each token's state is kept."""


def num_result_words(max_rows: int) -> int:
    """Return the words of a result block."""
    return RESULT_WORDS * max_rows + 1


@dataclass(frozen=True, slots=True)
class PayloadSlice:
    """An array in the payload block."""

    offset: int
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * math.prod(self.shape)

    def view(self, block: Bytes) -> NDArray[np.generic]:
        """Return the array as a view of its place in ``block``."""
        data = block[self.offset : self.offset + self.num_bytes]
        return data.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class ScoreSlices:
    """Where the arrays of one ``Score`` lie; see ``TokenScores``.

    ``mask`` holds the number of ids, the logprob's bits, and room for the ids.
    """

    score: Score
    logprobs: PayloadSlice
    top_ids: PayloadSlice
    top_logprobs: PayloadSlice
    id_logprobs: PayloadSlice
    mask: PayloadSlice


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Where everything a plan asks for lies in the payload block.

    Attributes:
        readouts: column name -> the rows of all read-outs that ask for it, one behind the other.
        copies: int32 [5, N], see ``COPY_COLUMNS``; read-out by read-out, column by column.
        readout_bytes: what read-outs take, from the beginning on.
        scores: per score.
        snapshot: column name -> slice, with ``kv_slots``; empty if the plan asks for none.
        num_bytes: all together; 0 if the plan asks for nothing.
    """

    readouts: dict[str, PayloadSlice]
    copies: NDArray[np.int32]
    readout_bytes: int
    scores: tuple[ScoreSlices, ...]
    snapshot: dict[str, PayloadSlice]
    num_bytes: int


def payload_layout(plan: StepPlan, columns: dict[str, ColumnSpec]) -> PayloadLayout:
    """Return the payload layout of a plan."""
    if not (plan.readouts or plan.scores or plan.snapshot):
        return _TOKENS_ALONE
    end = 0

    def place(dtype: np.dtype[np.generic], *shape: int) -> PayloadSlice:
        nonlocal end
        item = PayloadSlice(end, dtype, shape)
        end += -(-item.num_bytes // PAYLOAD_ALIGN) * PAYLOAD_ALIGN
        return item

    def place_rows(spec: ColumnSpec, num_rows: int) -> PayloadSlice:
        return place(spec.dtype, num_rows, *spec.shape)

    def place_score(score: Score) -> ScoreSlices:
        return ScoreSlices(
            score,
            logprobs=place(np.dtype(np.float32), score.count if score.is_prompt else 0),
            top_ids=place(np.dtype(np.int32), score.count, score.num_top),
            top_logprobs=place(np.dtype(np.float32), score.count, score.num_top),
            id_logprobs=place(np.dtype(np.float32), score.count, score.num_ids),
            mask=place(np.dtype(np.int32), MASK_HEAD_WORDS + score.max_mask)
            if score.max_mask
            else place(np.dtype(np.int32), 0),
        )

    num_rows, copies = row_copies(plan.readouts, tuple(columns))
    readouts = {name: place_rows(columns[name], num) for name, num in num_rows.items()}
    readout_end = end
    scores = tuple(place_score(score) for score in plan.scores)
    leaving = {column: columns[column] for column in plan.snapshot}
    if leaving:
        leaving["kv_slots"] = KV_SLOTS
    snapshot = {column: place_rows(spec, plan.num_tokens) for column, spec in leaving.items()}
    return PayloadLayout(readouts, copies, readout_end, scores, snapshot, end)


def row_copies(
    readouts: tuple[Readout, ...], columns: tuple[str, ...]
) -> tuple[dict[str, int], NDArray[np.int32]]:
    """Return how many rows each asked-for column has, and the copies that bring them there.

    Args:
        readouts: of one plan.
        columns: all there are, in order.

    Returns:
        Column name -> rows of all read-outs; and int32 [5, N], see ``COPY_COLUMNS``.
    """
    number = {name: index for index, name in enumerate(columns)}
    num_rows: dict[str, int] = {}
    words: list[int] = []
    for readout in readouts:
        count = readout.end - readout.start
        for name in readout.columns:
            first = num_rows.get(name, 0)
            words += (number[name], readout.slot, readout.start, count, first)
            num_rows[name] = first + count
    copies = np.array(words, dtype=np.int32).reshape(-1, len(COPY_COLUMNS)).T.copy()
    return num_rows, copies


_TOKENS_ALONE = PayloadLayout({}, row_copies((), ())[1], 0, (), {}, 0)


def read_result(
    plan: StepPlan,
    result_words: NDArray[np.int32],
    block: Bytes,
    layout: PayloadLayout,
    *,
    number: int,
    max_rows: int,
) -> StepResult:
    """Return the step's result as copies of what lies in its host blocks.

    Args:
        plan: the step's.
        result_words, block: its result block and its payload block.
        layout: of the latter.
        number: of the step's packet.
        max_rows: see ``RESULT_WORDS``.

    Raises:
        InvariantError: the step ran on another packet, or the device found that a row breaks a
            rule.
    """
    if len(plan.rows) and result_words[RESULT_WORDS * max_rows] != number:
        found = result_words[RESULT_WORDS * max_rows]
        raise InvariantError(f"the step of packet {number} ran on packet {found}")
    table = result_words[: RESULT_WORDS * max_rows].reshape(RESULT_WORDS, max_rows)
    words = table[:, : len(plan.rows)].copy()
    broken = np.flatnonzero(words[2] == BROKEN_ROW)
    if len(broken):
        slots = plan.rows.slot[broken].tolist()
        raise InvariantError(f"rows of slots {slots} write past the pages reserved for them")
    return StepResult(
        step_id=plan.step_id,
        token_ids=words[0][:, None],
        counts=plan.rows.samples,
        logprobs=words[1].view(np.float32)[:, None],
        status=words[2],
        scores=tuple(_read_scores(slices, block) for slices in layout.scores),
        snapshot={column: item.view(block).copy() for column, item in layout.snapshot.items()},
    )


def read_rows(plan: StepPlan, payload: Bytes, layout: PayloadLayout) -> ReadRows:
    """Return the rows of each read-out: parts of one copy a column, which is made in one go."""
    copied = {name: item.view(payload).copy() for name, item in layout.readouts.items()}
    at = dict.fromkeys(copied, 0)
    rows: list[dict[str, NDArray[np.generic]]] = []
    for readout in plan.readouts:
        count = readout.end - readout.start
        rows.append({name: copied[name][at[name] : at[name] + count] for name in readout.columns})
        for name in readout.columns:
            at[name] += count
    return ReadRows(step_id=plan.step_id, rows=tuple(rows))


def _read_scores(slices: ScoreSlices, block: Bytes) -> TokenScores:
    mask = slices.mask.view(block).astype(np.int32)
    num_ids = int(mask[0]) if len(mask) else 0
    return TokenScores(
        logprobs=slices.logprobs.view(block).astype(np.float32),
        top_ids=slices.top_ids.view(block).astype(np.int32),
        top_logprobs=slices.top_logprobs.view(block).astype(np.float32),
        id_logprobs=slices.id_logprobs.view(block).astype(np.float32),
        mask_ids=mask[MASK_HEAD_WORDS : MASK_HEAD_WORDS + num_ids],
        mask_logprobs=mask[1:MASK_HEAD_WORDS].view(np.float32),
    )
