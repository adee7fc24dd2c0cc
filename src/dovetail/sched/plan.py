"""The plan of one forward, and what comes back from it.

Owns ``StepPlan`` and ``StepResult``: plain integers and numpy arrays, no
tensors and no references to live sequences. Both are frozen when handed over.

Shape legend: R rows, T forwarded tokens, U uploaded (prefill) tokens.
"""

from dataclasses import dataclass, field, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import InvariantError

FROM_DEVICE = -1
"""``start`` of a row whose position and input token the device alone knows."""


class RowStatus(IntEnum):
    """How the sampling of one row went."""

    OK = 0
    NON_FINITE = 1  # the logits hold NaN or only infinities
    EMPTY_SUPPORT = 2  # no token was left to draw from
    LARGE_SUPPORT = 3  # more tokens were left than the sampling mask that was asked for can hold


class LogprobKindId(IntEnum):
    """``wire.request.LogprobKind`` as a number."""

    SCALED = 0
    RAW = 1
    TRUNCATED = 2


class TokenTable(IntEnum):
    """The tables of tokens that each slot has on the device."""

    BIAS = 0  # ids whose logits change
    REPORT = 1  # ids whose logprobs are reported


MAX_BIASES = 1024
"""Most entries of a slot's bias table: logit biases, and ids held back by min_new_tokens."""

MAX_REPORTED_IDS = 128
"""Most entries of a slot's report table."""


def _no_ids() -> NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


def _no_logprobs() -> NDArray[np.float32]:
    return np.zeros(0, dtype=np.float32)


def _freeze(*arrays: NDArray[np.generic]) -> None:
    for array in arrays:
        array.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The ragged rows of a step, one per sequence, decode rows first.

    Attributes:
        slot: int32 [R], the sequence's row in device state.
        generation: int32 [R], which tenant of the slot is meant.
        start: int32 [R], absolute position of the row's first token, or
            ``FROM_DEVICE`` for a decode row.
        width: int32 [R], tokens forwarded by the row. The device has been told pages for all of
            them, or is by this plan.
        samples: int32 [R], tokens sampled by the row: 0 for a prefill chunk that
            is not the last one, else 1.
    """

    slot: NDArray[np.int32]
    generation: NDArray[np.int32]
    start: NDArray[np.int32]
    width: NDArray[np.int32]
    samples: NDArray[np.int32]

    def __post_init__(self) -> None:
        _freeze(*(getattr(self, name) for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.slot)


ROW_FIELDS = tuple(field.name for field in fields(Rows))


PAGE_COLUMNS = ("group", "slot", "index", "page", "is_fresh")
"""What is said of a change of a page table, see ``PageWrites``."""


@dataclass(frozen=True, slots=True)
class PageWrites:
    """Changes of the device's page tables, applied before the forward.

    Most steps of many rows have some, so they are one array: that is copied in one go.

    Attributes:
        columns: int32 [5, N], those of ``PAGE_COLUMNS``. Index of the KV group; the slot, whose
            table it is; position in the table; the page id to write there; 1 for a page from the
            free list, whose side data is a stranger's and is forgotten, 0 for one that a prefix
            hit shares.
    """

    columns: NDArray[np.int32]

    def __post_init__(self) -> None:
        _freeze(self.columns)

    def __len__(self) -> int:
        return self.columns.shape[1]

    def column(self, name: str) -> NDArray[np.int32]:
        """Return one of ``PAGE_COLUMNS``, int32 [N]."""
        return self.columns[PAGE_COLUMNS.index(name)]


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
        repetition_penalty: float32 [N]; 1 does nothing.
        frequency_penalty, presence_penalty: float32 [N]; 0 does nothing.
        logprob_kind: int32 [N], a ``LogprobKindId``.
        prompt_len: int32 [N]; tokens from here on count as generated.
        num_biases: int32 [N], entries of the slot in the bias table.
    """

    slot: NDArray[np.int32]
    generation: NDArray[np.int32]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    sample_index: NDArray[np.int32]
    repetition_penalty: NDArray[np.float32]
    frequency_penalty: NDArray[np.float32]
    presence_penalty: NDArray[np.float32]
    logprob_kind: NDArray[np.int32]
    prompt_len: NDArray[np.int32]
    num_biases: NDArray[np.int32]

    def __post_init__(self) -> None:
        _freeze(*(getattr(self, name) for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWrites:
    """New entries of the slots' token tables, applied with the slot writes.

    Attributes:
        table: int32 [N], a ``TokenTable``.
        slot: int32 [N].
        index: int32 [N], position in the slot's table.
        token_id: int32 [N].
        value: float32 [N], added to the token's logit; bias table only.
        until: int32 [N], the bias holds for draws at positions before this.
    """

    table: NDArray[np.int32]
    slot: NDArray[np.int32]
    index: NDArray[np.int32]
    token_id: NDArray[np.int32]
    value: NDArray[np.float32]
    until: NDArray[np.int32]

    def __post_init__(self) -> None:
        _freeze(*(getattr(self, name) for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True)
class Score:
    """Probabilities that a step reports beside the chosen tokens' own logprobs.

    Of a row's tokens ``[first, first + count)``: each token's hidden state gives the
    distribution of the token after it.

    Attributes:
        row: index in the plan's rows.
        first, count: which of the row's tokens.
        num_top: likeliest ids to report.
        num_ids: ids of the slot's report table to report.
        is_prompt: the next tokens are known (``StepPlan.targets``) and their logprobs are
            reported; else the next token is sampled, and ``count`` is 1.
        max_mask: most ids of the draw's support to report; 0 reports none. Not for prompts.
    """

    row: int
    first: int
    count: int
    num_top: int
    num_ids: int
    is_prompt: bool
    max_mask: int = 0


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What a ``Score`` asked for. P positions, K top ids, J asked ids.

    Attributes:
        logprobs: float32 [P] of the known next tokens; empty for a sampled one.
        top_ids: int32 [P, K], likeliest first.
        top_logprobs: float32 [P, K].
        id_logprobs: float32 [P, J].
        mask_ids: int32, the support of the draw; empty if nothing was cut off, or not asked for.
        mask_logprobs: float32 [1] of the drawn token within it; empty if not asked for.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    id_logprobs: NDArray[np.float32]
    mask_ids: NDArray[np.int32] = field(default_factory=_no_ids)
    mask_logprobs: NDArray[np.float32] = field(default_factory=_no_logprobs)


# Most plans change nothing. These are frozen, so plans share them, and whoever asks whether a plan
# changes something asks whether it has another.
NO_IDS, _NO_FLOATS = _no_ids(), _no_logprobs()
NO_PAGES = PageWrites(np.zeros((len(PAGE_COLUMNS), 0), dtype=np.int32))
NO_SLOTS = SlotWrites(
    slot=NO_IDS,
    generation=NO_IDS,
    temperature=_NO_FLOATS,
    top_k=NO_IDS,
    top_p=_NO_FLOATS,
    min_p=_NO_FLOATS,
    seed=np.zeros(0, dtype=np.uint64),
    sample_index=NO_IDS,
    repetition_penalty=_NO_FLOATS,
    frequency_penalty=_NO_FLOATS,
    presence_penalty=_NO_FLOATS,
    logprob_kind=NO_IDS,
    prompt_len=NO_IDS,
    num_biases=NO_IDS,
)
NO_TOKENS = TokenWrites(
    table=NO_IDS, slot=NO_IDS, index=NO_IDS, token_id=NO_IDS, value=_NO_FLOATS, until=NO_IDS
)


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
        page_writes, slot_writes, token_writes: state changes applied first.
        scores: see ``Score``; in row order, a row's prompt before its sampled token.
        targets: int32, for each prompt score in order, the known next tokens.
        readouts: read-backs; a plan may hold read-outs alone.
        snapshot: columns whose rows of the tokens that this step forwards leave with its result.
    """

    step_id: int
    epoch: int
    rows: Rows
    token_ids: NDArray[np.int32]
    page_writes: PageWrites
    slot_writes: SlotWrites
    token_writes: TokenWrites
    scores: tuple[Score, ...] = ()
    targets: NDArray[np.int32] = field(default_factory=lambda: NO_IDS)
    readouts: tuple[Readout, ...] = ()
    snapshot: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.token_ids.setflags(write=False)
        self.targets.setflags(write=False)

    @property
    def num_tokens(self) -> int:
        """Tokens forwarded by the step (T); decode rows forward one each."""
        if not len(self.token_ids):
            return len(self.rows)
        return int(self.rows.width.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRows:
    """What a plan's read-outs brought. They are done before its forward, and known before it is.

    Attributes:
        step_id: of the plan.
        rows: one mapping column -> array for each of ``plan.readouts``.

    Holds memory of its own only, as a ``StepResult`` does.

    Raises:
        InvariantError: an array lies in memory that numpy does not own.
    """

    step_id: int
    rows: tuple[dict[str, NDArray[np.generic]], ...] = ()

    def __post_init__(self) -> None:
        if __debug__:
            for columns in self.rows:
                _expect_own_memory(*columns.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one forward produced, indexed by the plan's rows.

    Attributes:
        step_id: of the plan.
        token_ids: int32 [R, W], sampled ids; only the first ``counts[r]`` are real.
        counts: int32 [R], sampled tokens of the row.
        logprobs: float32 [R, W].
        status: int32 [R], a ``RowStatus`` each.
        scores: one for each of ``plan.scores``.
        snapshot: column -> [T, ...] for ``plan.snapshot``, and under ``kv_slots`` int64 [T], where
            each token's state is kept.

    Holds memory of its own only: a view of a transfer block or of engine state would change
    while the step is being committed.

    Raises:
        InvariantError: an array lies in memory that numpy does not own.
    """

    step_id: int
    token_ids: NDArray[np.int32]
    counts: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    status: NDArray[np.int32]
    scores: tuple[TokenScores, ...] = ()
    snapshot: dict[str, NDArray[np.generic]] = field(default_factory=dict[str, NDArray[np.generic]])

    def __post_init__(self) -> None:
        _freeze(self.token_ids, self.counts, self.logprobs, self.status)
        if __debug__:
            _expect_own_memory(self.token_ids, self.counts, self.logprobs, self.status)
            for scores in self.scores:
                _expect_own_memory(*(getattr(scores, item.name) for item in fields(scores)))
            _expect_own_memory(*self.snapshot.values())


def _expect_own_memory(*arrays: NDArray[np.generic]) -> None:
    for array in arrays:
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if root.base is not None:
            raise InvariantError(
                f"a step result holds a view of foreign memory: {type(root.base).__name__}"
            )
