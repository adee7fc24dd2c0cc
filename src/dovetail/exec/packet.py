"""The one packet that carries a plan to the device.

Owns its layout: a static schema of tables of int32-wide columns, each table at a 16-byte aligned
offset and its columns one after the other, and a header that holds scalars and each table's offset
and length: 0 and 0 of a table that has nothing. Each column of the rows is a table of its own, left
out if it is that of the step before. Only the used prefix is sent. Joined as bytes and written in
one go: once a step, each call finds its code and data gone from the processor's caches, and one of
numpy has much of both. No tensors here.
"""

import dataclasses
from dataclasses import dataclass
from struct import Struct
from typing import Any

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
    Rows,
    SlotWrites,
    StepPlan,
    TokenWrites,
)

Words = NDArray[np.int32]
Tables = list[tuple[str, tuple[Words, ...]]]
"""Names of tables, and their columns."""

SCALARS = ("num_rows", "num_tokens", "result")
_ALIGN_WORDS = 4
_PADDING = tuple(bytes(4 * num_words) for num_words in range(_ALIGN_WORDS))
ROW_COLUMNS = ("slot", "generation", "start", "width", "bound", "samples")
_ROW_TABLES = tuple((f"rows.{name}", name) for name in ROW_COLUMNS)
_PAGE_COLUMNS = ("group", "slot", "index", "page", "is_fresh")
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
    def max_words(self) -> int:
        """Most words of the table."""
        return max(1, len(self.columns)) * self.max_len


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
    rows, pages = config.max_running, config.max_pages_per_sequence + config.max_running
    return PacketSchema(
        (
            *(Table(table, (), rows) for table, _ in _ROW_TABLES),
            Table("token_ids", (), config.max_step_tokens),
            Table("pages", _PAGE_COLUMNS, pages),
            Table("slots", _SLOT_COLUMNS, rows),
            Table("seeds", (), 2 * rows),
            Table("tokens", _TOKEN_COLUMNS, 2 * MAX_BIASES),
            Table("targets", (), config.max_step_tokens),
            Table("copies", COPY_COLUMNS, rows * len(config.columns)),
        )
    )


class PacketWriter:
    """Writes plans. Remembers the last rows: a steady decode step sends a header alone.

    Arrays of a plan are frozen, so those that are the last step's have the last step's values.
    """

    def __init__(self, schema: PacketSchema) -> None:
        self._begin = schema.header_words
        heads = schema.heads
        self._heads = {table.name: (heads[table.name], table.max_len) for table in schema.tables}
        self._empty = [0] * (2 * len(schema.tables))
        num_used = len(SCALARS) + len(self._empty)
        self._header = Struct(f"{num_used}i{4 * (self._begin - num_used)}x")
        self._last_rows: Rows | None = None

    def write(
        self, plan: StepPlan, words: Words, *, result: int, copies: Words = _NO_COPIES
    ) -> int:
        """Write ``plan`` into ``words`` and return the number of words used.

        Args:
            plan: what the device is to do.
            words: host memory of a staging block.
            result: index of the block in which the step leaves its result.
            copies: those of the plan's read-outs, see ``exec.readback.COPY_COLUMNS``.

        Raises:
            InvariantError: the plan is larger than the configuration allows.
        """
        header = [len(plan.rows.slot), plan.num_tokens, result, *self._empty]
        begin = self._begin
        parts: list[Any] = [b""]  # bytes, and arrays as they lie
        for name, columns in self._tables_of(plan, copies):
            head, most = self._heads[name]
            length = len(columns[0])
            if length > most:
                raise InvariantError(f"a plan has {length} words of {name}; at most {most} fit")
            header[head], header[head + 1] = begin, length
            end = begin + len(columns) * length
            num_padding = -end % _ALIGN_WORDS
            parts += columns
            parts.append(_PADDING[num_padding])
            begin = end + num_padding
        parts[0] = self._header.pack(*header)
        words.data.cast("B")[: 4 * begin] = b"".join(parts)
        return begin

    def _tables_of(self, plan: StepPlan, copies: Words) -> Tables:
        """Return what a plan has, and the device has not from the step before."""
        tables: Tables = []
        rows, last = plan.rows, self._last_rows
        if rows is not last and len(rows.slot):  # read-outs alone leave what the device has
            self._last_rows = rows
            for table, name in _ROW_TABLES:
                column = getattr(rows, name)
                if last is None or column is not getattr(last, name):
                    tables.append((table, (column,)))
        return tables + _changes(plan, copies)


def _changes(plan: StepPlan, copies: Words) -> Tables:
    """Return the tables that a plan has something of, rows apart."""
    tables: Tables = []
    if plan.token_ids is not NO_IDS:
        tables.append(("token_ids", (plan.token_ids,)))
    if plan.page_writes is not NO_PAGES:
        tables.append(("pages", _page_columns(plan)))
    if plan.slot_writes is not NO_SLOTS:
        tables.append(("slots", _slot_columns(plan)))
        tables.append(("seeds", (plan.slot_writes.seed.view(np.int32),)))
    if plan.token_writes is not NO_TOKENS:
        tables.append(("tokens", _token_columns(plan)))
    if plan.targets is not NO_IDS:
        tables.append(("targets", (plan.targets,)))
    if copies.size:
        tables.append(("copies", tuple(copies)))
    return tables


def _page_columns(plan: StepPlan) -> tuple[Words, ...]:
    writes = plan.page_writes
    return (writes.group, writes.slot, writes.index, writes.page, writes.is_fresh)


def _slot_columns(plan: StepPlan) -> tuple[Words, ...]:
    return tuple(getattr(plan.slot_writes, name).view(np.int32) for name in _SLOT_COLUMNS)


def _token_columns(plan: StepPlan) -> tuple[Words, ...]:
    return tuple(getattr(plan.token_writes, name).view(np.int32) for name in _TOKEN_COLUMNS)


@dataclass(frozen=True, slots=True)
class PacketView:
    """A packet as the device reads it.

    Attributes:
        num_rows, num_tokens: of the step.
        result: index of the block in which the step leaves its result.
        fields: ``table.column`` or ``table`` -> int32 view of the block; a column of rows that is
            empty is that of the step before.
    """

    num_rows: int
    num_tokens: int
    result: int
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
    num_rows, num_tokens, result = header[: len(SCALARS)]
    return PacketView(num_rows, num_tokens, result, fields)


def _aligned(num_words: int) -> int:
    return -(-num_words // _ALIGN_WORDS) * _ALIGN_WORDS
