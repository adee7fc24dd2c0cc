"""The plan of one forward, and what comes back from it.

Owns ``StepPlan`` and ``StepResult``: plain integers and numpy arrays, no
tensors and no references to live sequences. Both are frozen when handed over.

Shape legend: R rows, T forwarded tokens, U uploaded (prefill) tokens.
"""

from dataclasses import dataclass, field, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

FROM_DEVICE = -1
"""``start`` of a row whose position and input token the device alone knows."""


class RowStatus(IntEnum):
    """How the sampling of one row went."""

    OK = 0
    NON_FINITE = 1  # the logits hold NaN or only infinities
    EMPTY_SUPPORT = 2  # no token was left to draw from


def _freeze(value: object) -> None:
    for item in fields(value):  # type: ignore[arg-type]
        array = getattr(value, item.name)
        if isinstance(array, np.ndarray):
            array.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The ragged rows of a step, one per sequence, decode rows first.

    Attributes:
        slot: int32 [R], the sequence's row in device state.
        generation: int32 [R], which tenant of the slot is meant.
        start: int32 [R], absolute position of the row's first token, or
            ``FROM_DEVICE`` for a decode row.
        width: int32 [R], tokens forwarded by the row.
        bound: int32 [R], tokens the row's pages can hold: the KV length after
            this step never exceeds it.
        samples: int32 [R], tokens sampled by the row: 0 for a prefill chunk that
            is not the last one, else 1.
    """

    slot: NDArray[np.int32]
    generation: NDArray[np.int32]
    start: NDArray[np.int32]
    width: NDArray[np.int32]
    bound: NDArray[np.int32]
    samples: NDArray[np.int32]

    def __post_init__(self) -> None:
        _freeze(self)

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWrites:
    """Changes of the device's page tables, applied before the forward.

    Attributes:
        group: int32 [N], index of the KV group.
        slot: int32 [N], whose table.
        index: int32 [N], position in the table.
        page: int32 [N], the page id to write there.
    """

    group: NDArray[np.int32]
    slot: NDArray[np.int32]
    index: NDArray[np.int32]
    page: NDArray[np.int32]

    def __post_init__(self) -> None:
        _freeze(self)

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotWrites:
    """New tenants of slots and how they sample, applied before the forward.

    Attributes:
        slot: int32 [N].
        generation: int32 [N].
        temperature: float32 [N]; 0 is greedy.
        top_k: int32 [N]; 0 keeps all.
        top_p: float32 [N].
        min_p: float32 [N].
        seed: uint64 [N].
        sample_index: int32 [N]; counter word 2 of the noise.
    """

    slot: NDArray[np.int32]
    generation: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    sample_index: NDArray[np.int32]

    def __post_init__(self) -> None:
        _freeze(self)

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True)
class Readout:
    """Per-token state to be read back: positions ``[start, end)`` of a sequence.

    Runs before the plan's forward, so pages that the plan gives away are read first.
    """

    slot: int
    generation: int
    start: int
    end: int
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward, decided on the host.

    Attributes:
        step_id: counts the plans of a scheduler, from 0.
        epoch: weights epoch the step runs under.
        rows: see ``Rows``.
        token_ids: int32 [U], input tokens of the prefill rows, in row order.
        page_writes, slot_writes: state changes applied first.
        readouts: read-backs; a plan may hold read-outs alone.
    """

    step_id: int
    epoch: int
    rows: Rows
    token_ids: NDArray[np.int32]
    page_writes: PageWrites
    slot_writes: SlotWrites
    readouts: tuple[Readout, ...] = ()

    def __post_init__(self) -> None:
        self.token_ids.setflags(write=False)

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded by the step (T)."""
        return int(self.rows.width.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one forward produced, indexed by the plan's rows.

    Attributes:
        step_id: of the plan.
        token_ids: int32 [R, W], sampled ids; only the first ``counts[r]`` are real.
        counts: int32 [R], sampled tokens of the row.
        logprobs: float32 [R, W].
        status: int32 [R], a ``RowStatus`` each.
        readouts: one mapping column -> array per ``plan.readouts``.
    """

    step_id: int
    token_ids: NDArray[np.int32]
    counts: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    status: NDArray[np.int32]
    readouts: tuple[dict[str, NDArray[np.generic]], ...] = field(default=())

    def __post_init__(self) -> None:
        _freeze(self)
