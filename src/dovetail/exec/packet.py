"""The one packet that carries a plan to the device.

Owns its layout: a static schema of tables of int32-wide columns, each table at a 16-byte aligned
offset and its columns one after the other, and a header that holds scalars and each table's offset
and length: 0 and 0 of a table that has nothing. Each column of the rows is a table of its own, left
out if it is that of the step before. Only the used prefix is sent. Written in place with
numpy, in as few calls as there are tables: once a step, each finds its code and data gone from the
processor's caches. No tensors here.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.sched.plan import MAX_BIASES, Rows, SlotWrites, StepPlan, TokenWrites

Words = NDArray[np.int32]

SCALARS = ("num_rows", "num_tokens", "result")
_ALIGN_WORDS = 4
ROW_COLUMNS = ("slot", "generation", "start", "width", "bound", "samples")
_PAGE_COLUMNS = ("group", "slot", "index", "page", "is_fresh")
_SLOT_COLUMNS = tuple(item.name for item in dataclasses.fields(SlotWrites) if item.name != "seed")
_TOKEN_COLUMNS = tuple(item.name for item in dataclasses.fields(TokenWrites))


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
            *(Table(f"rows.{name}", (), rows) for name in ROW_COLUMNS),
            Table("token_ids", (), config.max_step_tokens),
            Table("pages", _PAGE_COLUMNS, pages),
            Table("slots", _SLOT_COLUMNS, rows),
            Table("seeds", (), 2 * rows),
            Table("tokens", _TOKEN_COLUMNS, 2 * MAX_BIASES),
            Table("targets", (), config.max_step_tokens),
        )
    )


class PacketWriter:
    """Writes plans. Remembers the last rows: a steady decode step sends a header alone.

    Arrays of a plan are frozen, so those that are the last step's have the last step's values.
    """

    def __init__(self, schema: PacketSchema) -> None:
        self._tables = schema.tables
        self._begin = schema.header_words
        self._last_rows: Rows | None = None
        self._header = Struct(f"{len(SCALARS) + 2 * len(schema.tables)}i")

    def write(self, plan: StepPlan, words: Words, *, result: int) -> int:
        """Write ``plan`` into ``words`` and return the number of words used.

        Args:
            plan: what the device is to do.
            words: host memory of a staging block.
            result: index of the block in which the step leaves its result.

        Raises:
            InvariantError: the plan is larger than the configuration allows.
        """
        header, end = [len(plan.rows), plan.num_tokens, result], self._begin
        for columns in (
            *self._changed_rows(plan.rows),
            (plan.token_ids,),
            _page_columns(plan) if len(plan.page_writes) else (),
            _slot_columns(plan) if len(plan.slot_writes) else (),
            (plan.slot_writes.seed.view(np.int32),) if len(plan.slot_writes) else (),
            _token_columns(plan) if len(plan.token_writes) else (),
            (plan.targets,),
        ):
            end = self._put(words, end, columns, header)
        self._header.pack_into(words.data, 0, *header)
        return end

    def _changed_rows(self, rows: Rows) -> Iterator[tuple[Words, ...]]:
        """Yield each column of the rows, or nothing in its place if the device has it."""
        last = self._last_rows
        for name in ROW_COLUMNS:
            column = getattr(rows, name)
            yield () if last is not None and getattr(last, name) is column else (column,)
        if len(rows):  # read-outs alone leave what the device has
            self._last_rows = rows

    def _put(self, words: Words, begin: int, columns: tuple[Words, ...], header: list[int]) -> int:
        """Write the next table at ``begin``, note it in the header, and return where it ends."""
        length = len(columns[0]) if columns else 0
        if not length:
            header += (0, 0)
            return begin
        table = self._tables[(len(header) - len(SCALARS)) // 2]
        if length > table.max_len:
            raise InvariantError(
                f"a plan has {length} words of {table.name}; at most {table.max_len} fit"
            )
        header += (begin, length)
        end = begin + len(columns) * length
        if len(columns) == 1:
            words[begin:end] = columns[0]
        else:
            np.concatenate(columns, out=words[begin:end])
        return _aligned(end)


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
    for table in schema.tables:
        head = schema.heads[table.name]
        offset, length = header[head : head + 2]
        for column in table.columns:
            fields[f"{table.name}.{column}"] = words[offset : offset + length]
            offset += length
        if not table.columns:
            fields[table.name] = words[offset : offset + length]
    num_rows, num_tokens, result = header[: len(SCALARS)]
    return PacketView(num_rows, num_tokens, result, fields)


def _aligned(num_words: int) -> int:
    return -(-num_words // _ALIGN_WORDS) * _ALIGN_WORDS
