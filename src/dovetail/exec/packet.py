"""The one packet that carries a plan to the device.

Owns its layout: a static schema of tables of int32-wide columns, each table at a 16-byte aligned
offset and its columns one after the other, and a header that holds scalars and each table's offset
and length: 0 and 0 of a table that has nothing. Rows are left out if they are those of the step
before. Nobody looks behind the used prefix. No tensors here.

Written once a step, with most code and data gone from the processor's caches: what counts is how
many places of memory the writer touches.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.exec.readback import COPY_COLUMNS
from dovetail.sched.plan import (
    MAX_BIASES,
    NO_IDS,
    NO_PAGES,
    NO_SLOTS,
    NO_TOKENS,
    PAGE_COLUMNS,
    ROW_FIELDS,
    Rows,
    SlotWrites,
    StepPlan,
    TokenWrites,
)

Words = NDArray[np.int32]

SCALARS = ("num_rows", "num_tokens", "result", "number", "num_words")
"""The words that a packet begins with, in order; the last says how many words are used in all."""
NUMBER, NUM_WORDS = SCALARS.index("number"), SCALARS.index("num_words")
_ALIGN_WORDS = 4
_SLOT_COLUMNS = tuple(item.name for item in dataclasses.fields(SlotWrites) if item.name != "seed")
_TOKEN_COLUMNS = tuple(item.name for item in dataclasses.fields(TokenWrites))

_NO_COPIES = np.zeros((len(COPY_COLUMNS), 0), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of the same length.

    Attributes:
        name: of the table.
        columns: their names; empty for a table that is one column and has no other name.
        max_len: most words of a column.
    """

    name: str
    columns: tuple[str, ...]
    max_len: int

    @property
    def num_columns(self) -> int:
        """How many there are."""
        return max(1, len(self.columns))

    @property
    def max_words(self) -> int:
        """Most words of the table."""
        return self.num_columns * self.max_len


@dataclass(frozen=True, slots=True)
class PacketSchema:
    """Which tables there are, in order."""

    tables: tuple[Table, ...]

    @property
    def header_words(self) -> int:
        """Words of the header: the scalars, then (offset, length) a table."""
        return _aligned(len(SCALARS) + 2 * len(self.tables))

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest packet."""
        return 4 * (self.header_words + sum(_aligned(table.max_words) for table in self.tables))

    @property
    def heads(self) -> dict[str, int]:
        """Each table's word of the header that says where it begins; the next is its length."""
        return {table.name: len(SCALARS) + 2 * i for i, table in enumerate(self.tables)}


def packet_schema(config: EngineConfig) -> PacketSchema:
    """Return the schema that holds any plan of this configuration."""
    rows = config.max_running
    return PacketSchema(
        (
            Table("rows", ROW_FIELDS, rows),
            Table("token_ids", (), config.max_step_tokens),
            Table("pages", PAGE_COLUMNS, config.max_page_writes),
            Table("slots", _SLOT_COLUMNS, rows),
            Table("seeds", (), 2 * rows),
            Table("tokens", _TOKEN_COLUMNS, 2 * MAX_BIASES),
            Table("targets", (), config.max_step_tokens),
            Table("copies", COPY_COLUMNS, rows * len(config.columns)),
        )
    )


class PacketWriter:
    """Writes plans. Remembers the last rows: a steady decode step sends a header alone, and pages.

    Rows are frozen, so the same ones as in the last step have the last step's values.
    """

    def __init__(self, schema: PacketSchema) -> None:
        self._begin = schema.header_words
        places = {
            table.name: _Place(
                table.name, schema.heads[table.name], table.num_columns, table.max_len
            )
            for table in schema.tables
        }
        self._rows, self._token_ids = places["rows"], places["token_ids"]
        self._targets, self._pages = places["targets"], places["pages"]
        self._copies = places["copies"]
        self._slots, self._seeds, self._tokens = places["slots"], places["seeds"], places["tokens"]
        self._last_rows: Rows | None = None

    def write(
        self, plan: StepPlan, words: Words, *, number: int, result: int, copies: Words = _NO_COPIES
    ) -> int:
        """Write ``plan`` into ``words`` and return the number of words used.

        Args:
            plan: what the device is to do.
            words: host memory of the block of the packet.
            number: of the packet, from 1 on; the step leaves it in its result.
            result: index of the block in which the step leaves its result.
            copies: those of the plan's read-outs, see ``exec.readback.COPY_COLUMNS``.

        Raises:
            InvariantError: the plan is larger than the configuration allows, or has columns of
                different lengths or of other words than 32 bits.
        """
        end = self._begin
        words[:end] = 0
        num_rows = len(plan.rows)
        # In the order of ``SCALARS``.
        words[0], words[1], words[2], words[3] = num_rows, plan.num_tokens, result, number
        # A plan without rows (read-outs) leaves those that are there.
        if num_rows and plan.rows is not self._last_rows:
            end = _put(words, end, self._rows, num_rows, _joined(plan.rows, ROW_FIELDS))
            self._last_rows = plan.rows
        if plan.token_ids is not NO_IDS:
            end = _put(words, end, self._token_ids, len(plan.token_ids), plan.token_ids)
        if plan.page_writes is not NO_PAGES:
            writes = plan.page_writes
            end = _put(words, end, self._pages, len(writes), writes.columns.reshape(-1))
        if plan.slot_writes is not NO_SLOTS:
            writes = plan.slot_writes
            end = _put(words, end, self._slots, len(writes), _joined(writes, _SLOT_COLUMNS))
            end = _put(words, end, self._seeds, 2 * len(writes), writes.seed.view(np.int32))
        if plan.token_writes is not NO_TOKENS:
            writes = plan.token_writes
            end = _put(words, end, self._tokens, len(writes), _joined(writes, _TOKEN_COLUMNS))
        if plan.targets is not NO_IDS:
            end = _put(words, end, self._targets, len(plan.targets), plan.targets)
        if copies.size:
            end = _put(words, end, self._copies, copies.shape[1], copies.reshape(-1))
        words[NUM_WORDS] = end
        return end


class _Place(NamedTuple):
    """What a writer must know of a table: its word of the header, and what fits into it."""

    name: str
    head: int
    num_columns: int
    max_len: int


def _put(words: Words, begin: int, place: _Place, length: int, values: Words) -> int:
    """Write a table, all columns in a row, and return where the next one may begin."""
    name, head, num_columns, max_len = place
    if length > max_len:
        raise InvariantError(f"a plan has {length} words of {name}; at most {max_len} fit")
    if len(values) != num_columns * length:
        raise InvariantError(f"{len(values)} words of {name} are not {num_columns} x {length}")
    end = begin + len(values)
    words[head], words[head + 1] = begin, length
    words[begin:end] = values
    return _aligned(end)


def _joined(table: Rows | SlotWrites | TokenWrites, columns: tuple[str, ...]) -> Words:
    return np.concatenate([getattr(table, name).view(np.int32) for name in columns])


@dataclass(frozen=True, slots=True)
class PacketView:
    """A packet as the device reads it.

    Attributes:
        num_rows, num_tokens: of the step.
        result: index of the block in which the step leaves its result.
        number: of the packet.
        fields: ``table.column`` or ``table`` -> int32 view of the block; if those of the rows are
            empty, the rows are those of the step before.
    """

    num_rows: int
    num_tokens: int
    result: int
    number: int
    fields: dict[str, Words]


def read_packet(schema: PacketSchema, words: Words) -> PacketView:
    """Return views of the packet that lies in ``words``."""
    header = words[: len(SCALARS) + 2 * len(schema.tables)].tolist()
    fields: dict[str, Words] = {}
    spans = zip(header[len(SCALARS) :: 2], header[len(SCALARS) + 1 :: 2], strict=True)
    for table, (offset, length) in zip(schema.tables, spans, strict=True):
        for column in table.columns:
            fields[f"{table.name}.{column}"] = words[offset : offset + length]
            offset += length
        if not table.columns:
            fields[table.name] = words[offset : offset + length]
    num_rows, num_tokens, result, number, _ = header[: len(SCALARS)]
    return PacketView(num_rows, num_tokens, result, number, fields)


def _aligned(num_words: int) -> int:
    return -(-num_words // _ALIGN_WORDS) * _ALIGN_WORDS
