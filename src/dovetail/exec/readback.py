"""What comes back from a step: one result block, and one payload block if asked for.

Owns the layout of both and the rule that a ``StepResult`` holds copies only: nothing
in it is a view of a ring or of engine state.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.sched.plan import Readout, StepPlan, StepResult

RESULT_WORDS = 3
"""Words a row of the result block: token id, logprob bits, status."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One sidecar as it is read back: what a token takes.

    Attributes:
        dtype: of an element.
        shape: of a token's value.
    """

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's value."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class PayloadSlice:
    """Where one column of one read-out lies in the payload block."""

    readout: Readout
    column: str
    offset: int
    num_bytes: int


def payload_layout(
    plan: StepPlan, specs: dict[str, ColumnSpec]
) -> tuple[tuple[PayloadSlice, ...], int]:
    """Return the slices of a plan's read-outs and the bytes they take together."""
    slices: list[PayloadSlice] = []
    end = 0
    for readout in plan.readouts:
        for column in readout.columns:
            num_bytes = (readout.end - readout.start) * specs[column].token_bytes
            slices.append(PayloadSlice(readout, column, end, num_bytes))
            end += -(-num_bytes // 16) * 16
    return tuple(slices), end


def read_result(
    plan: StepPlan,
    result_words: NDArray[np.int32],
    *,
    max_rows: int,
    readouts: tuple[dict[str, NDArray[np.generic]], ...],
) -> StepResult:
    """Return the step's result as copies of what lies in its host block."""
    num_rows = len(plan.rows)
    table = result_words[: RESULT_WORDS * max_rows].reshape(RESULT_WORDS, max_rows)
    words = table[:, :num_rows].copy()
    return StepResult(
        step_id=plan.step_id,
        token_ids=words[0][:, None],
        counts=plan.rows.samples,
        logprobs=words[1].view(np.float32)[:, None],
        status=words[2],
        readouts=readouts,
    )


def read_payload(
    plan: StepPlan,
    payload_words: NDArray[np.int32],
    slices: tuple[PayloadSlice, ...],
    specs: dict[str, ColumnSpec],
) -> tuple[dict[str, NDArray[np.generic]], ...]:
    """Return the read-outs of a plan as copies of what lies in its payload block."""
    payload_bytes = payload_words.view(np.uint8)
    columns: dict[Readout, dict[str, NDArray[np.generic]]] = {r: {} for r in plan.readouts}
    for item in slices:
        spec = specs[item.column]
        data = payload_bytes[item.offset : item.offset + item.num_bytes].copy()
        columns[item.readout][item.column] = data.view(spec.dtype).reshape(-1, *spec.shape)
    return tuple(columns.values())
