"""Collects the rows of one plan and freezes them into arrays."""

from array import array
from collections.abc import Collection
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from dovetail.config.capture import ColumnSpec
from dovetail.config.payload import (
    readout_bytes,
    readout_rows,
    sample_score_bytes,
    score_bytes,
)
from dovetail.config.schema import EngineConfig
from dovetail.sched.plan import (
    MAX_BIASES,
    NO_IDS,
    NO_PAGES,
    NO_SLOTS,
    NO_TOKENS,
    ROW_FIELDS,
    LogprobKindId,
    PageWrites,
    Readout,
    Rows,
    Score,
    SlotWrites,
    StepPlan,
    TokenTable,
    TokenWrites,
)
from dovetail.sched.sequence import Sequence


class PlanBuilder:
    """A plan being written, within the budgets of a configuration. Used once, by the ``Scheduler``.

    Scores of sampled tokens have their own part of the payload: a row that runs must not wait for a
    place in it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._page_size = config.page_size
        self._decode_rows: Rows = _NO_ROWS
        self._decode_scores: tuple[Score, ...] = ()
        self._num_rows = 0
        self._row_values: list[int] = []
        self._token_ids: list[int] = []
        self._page_writes: list[tuple[int, int, int, int, int]] = []
        self._token_writes: list[tuple[int, int, int, int, float, int]] = []
        self._tenants: list[Sequence] = []
        self._scores: list[Score] = []
        self._targets: list[int] = []
        self._readouts: list[Readout] = []
        self._page_writes_left = config.max_page_writes
        self._token_writes_left = 2 * MAX_BIASES
        self._payload_bytes_left = config.max_payload_bytes - sample_score_bytes(config.max_running)

    @property
    def is_empty(self) -> bool:
        """True while there is nothing to submit."""
        return self._num_rows == 0 and not self._readouts

    def has_room_for_tenant(self, sequence: Sequence, *, num_pages: int) -> bool:
        """True if the sequence's tables fit into this plan."""
        num_entries = len(sequence.biases) + len(sequence.request.logprobs.token_ids_logprob)
        return num_pages <= self._page_writes_left and num_entries <= self._token_writes_left

    def max_read(self, columns: Collection[ColumnSpec]) -> int:
        """Return how many rows of these columns the payload has room for."""
        return readout_rows(self._payload_bytes_left, columns)

    def max_scored(self, sequence: Sequence) -> int:
        """Return how many prompt positions of the sequence the payload has room for."""
        logprobs = sequence.request.logprobs
        return self._payload_bytes_left // score_bytes(
            1, num_top=logprobs.top_logprobs_num, num_ids=len(logprobs.token_ids_logprob)
        )

    def add_tenant(self, sequence: Sequence) -> None:
        """Tell the device who lives in the sequence's slot and how it samples."""
        self._tenants.append(sequence)
        slot = sequence.slot
        entries = [
            (TokenTable.BIAS, slot, index, token_id, value, until)
            for index, (token_id, value, until) in enumerate(sequence.biases)
        ] + [
            (TokenTable.REPORT, slot, index, token_id, 0.0, 0)
            for index, token_id in enumerate(sequence.request.logprobs.token_ids_logprob)
        ]
        self._token_writes += entries
        self._token_writes_left -= len(entries)

    def add_pages(self, sequence: Sequence) -> None:
        """Tell the device the table entries it has not been told yet."""
        holding = sequence.held
        for group, table in enumerate(holding.tables):
            sent = sequence.num_pages_sent[group]
            if sent == len(table):
                continue
            num_shared = holding.cached_len // self._page_size
            for index in range(sent, len(table)):
                is_fresh = int(index >= num_shared)
                self._page_writes.append((group, sequence.slot, index, table[index], is_fresh))
            self._page_writes_left -= len(table) - sent
            sequence.num_pages_sent[group] = len(table)

    def set_decodes(self, rows: Rows, scores: tuple[Score, ...]) -> None:
        """Forward the tokens that the device sampled last, and sample the next; before all else."""
        assert self._num_rows == 0, "decode rows come first"
        self._decode_rows, self._decode_scores = rows, scores
        self._num_rows = len(rows)

    def add_prefill(self, sequence: Sequence, *, width: int, samples: int) -> None:
        """Forward the next ``width`` known tokens."""
        start = sequence.planned_len
        self._row_values += (sequence.slot, sequence.generation, start, width, samples)
        self._num_rows += 1
        self._token_ids.extend(sequence.known_ids[start : start + width])
        targets = sequence.score_targets(start, width)
        if targets:
            self._add_score(
                sequence, first=targets.start - 1 - start, count=len(targets), is_prompt=True
            )
            self._targets.extend(sequence.known_ids[targets.start : targets.stop])
            sequence.planned_score = targets.stop
        if samples and sequence.wants_scores:
            self._add_score(sequence, first=width - 1, count=1, is_prompt=False)

    def _add_score(self, sequence: Sequence, *, first: int, count: int, is_prompt: bool) -> None:
        score = sequence.score(self._num_rows - 1, first=first, count=count, is_prompt=is_prompt)
        self._scores.append(score)
        if is_prompt:
            self._payload_bytes_left -= score_bytes(
                count, num_top=score.num_top, num_ids=score.num_ids
            )

    def add_readout(self, sequence: Sequence, *, start: int, end: int) -> None:
        """Read back the sequence's captured columns of positions ``[start, end)``."""
        assert sequence.captured is not None
        specs = sequence.captured.specs
        self._readouts.append(Readout(sequence.slot, sequence.generation, start, end, tuple(specs)))
        self._payload_bytes_left -= readout_bytes(end - start, specs.values())

    def build(self, *, step_id: int, epoch: int) -> StepPlan:
        """Return the finished plan."""
        return StepPlan(
            step_id=step_id,
            epoch=epoch,
            rows=self._rows(),
            token_ids=_ids(self._token_ids),
            page_writes=_page_writes(self._page_writes) if self._page_writes else NO_PAGES,
            slot_writes=_slot_writes(self._tenants) if self._tenants else NO_SLOTS,
            token_writes=_token_writes(self._token_writes) if self._token_writes else NO_TOKENS,
            scores=(*self._decode_scores, *self._scores),
            targets=_ids(self._targets),
            readouts=tuple(self._readouts),
        )

    def _rows(self) -> Rows:
        if not self._row_values:
            return self._decode_rows
        prefills = np.array(self._row_values, dtype=np.int32).reshape(-1, len(ROW_FIELDS)).T
        return Rows(
            **{
                name: np.concatenate([getattr(self._decode_rows, name), values])
                for name, values in zip(ROW_FIELDS, prefills, strict=True)
            }
        )


def _ids(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32) if values else NO_IDS


def _page_writes(entries: list[tuple[int, int, int, int, int]]) -> PageWrites:
    # By way of array: numpy takes three times as long to read a list of ints.
    values = np.array(array("i", chain.from_iterable(entries)), dtype=np.int32)
    return PageWrites(values.reshape(len(entries), -1).T.copy())


def _slot_writes(tenants: list[Sequence]) -> SlotWrites:
    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    def floats(name: str) -> np.ndarray:
        return np.array([getattr(t.request.sampling, name) for t in tenants], dtype=np.float32)

    return SlotWrites(
        slot=ints([t.slot for t in tenants]),
        generation=ints([t.generation for t in tenants]),
        temperature=floats("temperature"),
        top_k=ints([max(t.request.sampling.top_k, 0) for t in tenants]),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        seed=np.array([t.request.seed for t in tenants], dtype=np.uint64),
        sample_index=ints([t.sample_index for t in tenants]),
        repetition_penalty=floats("repetition_penalty"),
        frequency_penalty=floats("frequency_penalty"),
        presence_penalty=floats("presence_penalty"),
        logprob_kind=ints([LogprobKindId[t.request.logprobs.kind.upper()] for t in tenants]),
        prompt_len=ints([t.prompt_len for t in tenants]),
        num_biases=ints([len(t.biases) for t in tenants]),
    )


def _token_writes(entries: list[tuple[int, int, int, int, float, int]]) -> TokenWrites:
    columns = list(zip(*entries, strict=True)) or [()] * 6
    table, slot, index, token_id, value, until = columns
    return TokenWrites(
        table=np.array(table, dtype=np.int32),
        slot=np.array(slot, dtype=np.int32),
        index=np.array(index, dtype=np.int32),
        token_id=np.array(token_id, dtype=np.int32),
        value=np.array(value, dtype=np.float32),
        until=np.array(until, dtype=np.int32),
    )


_NO_ROWS = Rows(**dict.fromkeys(ROW_FIELDS, NO_IDS))
