"""The one packet that carries a plan to the device.

Owns its layout: a static schema of tables of int32-wide columns, each table at a 16-byte aligned
offset and its columns one after the other, and a header that holds scalars and each table's offset
and length: 0 and 0 of a table that has nothing. Each column of the rows is a table of its own, left
out if it is that of the step before. Only the used prefix is sent. Written in place with
numpy, in as few calls as there are tables: once a step, each finds its code and data gone from the
processor's caches. No tensors here.
"""

import dataclasses
from dataclasses import dataclass
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.exec.readback import COPY_COLUMNS
from dovetail.sched.plan import MAX_BIASES, Rows, SlotWrites, StepPlan, TokenWrites

Words = NDArray[np.int32]
Tables = list[tuple[str, tuple[Words, ...]]]
"""Names of tables, and their columns."""

SCALARS = ("num_rows", "num_tokens", "result")
_ALIGN_WORDS = 4
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
        self._tables = {table.name: table for table in schema.tables}
        self._heads = schema.heads
        self._empty = [0] * (2 * len(schema.tables))
        self._header = Struct(f"{len(SCALARS) + len(self._empty)}i")
        self._last_rows: Rows | None = None
        self._last_header: list[int] = []  # of a packet that has the last rows and no tables

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
        if plan.rows is self._last_rows and plan.is_rows_alone:
            self._last_header[2] = result
            self._header.pack_into(words.data, 0, *self._last_header)
            return self._begin
        header = [len(plan.rows), plan.num_tokens, result, *self._empty]
        begin = self._begin
        for name, columns in (*self._changed_rows(plan.rows), *_changes(plan, copies)):
            length, most = len(columns[0]), self._tables[name].max_len
            if length > most:
                raise InvariantError(f"a plan has {length} words of {name}; at most {most} fit")
            end = begin + len(columns) * length
            if len(columns) == 1:
                words[begin:end] = columns[0]
            else:
                np.concatenate(columns, out=words[begin:end])
            head = self._heads[name]
            header[head], header[head + 1] = begin, length
            begin = _aligned(end)
        self._header.pack_into(words.data, 0, *header)
        return begin

    def _changed_rows(self, rows: Rows) -> Tables:
        """Return the columns that the device does not have from the step before."""
        last = self._last_rows
        if rows is last or not len(rows):  # read-outs alone leave what the device has
            return []
        self._last_rows = rows
        self._last_header = [len(rows), len(rows), 0, *self._empty]
        return [
            (table, (column,))
            for table, name in _ROW_TABLES
            if (column := getattr(rows, name)) is not getattr(last, name, None)
        ]


def _changes(plan: StepPlan, copies: Words) -> Tables:
    """Return the tables that a plan has something of, rows apart."""
    tables: Tables = []
    if len(plan.token_ids):
        tables.append(("token_ids", (plan.token_ids,)))
    if len(plan.page_writes):
        tables.append(("pages", _page_columns(plan)))
    if len(plan.slot_writes):
        tables.append(("slots", _slot_columns(plan)))
        tables.append(("seeds", (plan.slot_writes.seed.view(np.int32),)))
    if len(plan.token_writes):
        tables.append(("tokens", _token_columns(plan)))
    if len(plan.targets):
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
