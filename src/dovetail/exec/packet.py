"""The one packet that carries a plan to the device.

Owns its layout: a static schema of named int32-wide fields, each at a 16-byte
aligned offset, and a header that holds scalars and each field's offset and length: 0 and 0 of a
field that has nothing.
Only the used prefix is sent. Written in place with numpy; no tensors here.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.sched.plan import MAX_BIASES, Rows, SlotWrites, StepPlan, TokenWrites

Words = NDArray[np.int32]

SCALARS = ("num_rows", "num_tokens", "rows_unchanged")
_ALIGN_WORDS = 4
_ROW_FIELDS = ("slot", "generation", "start", "width", "bound", "samples")
_PAGE_FIELDS = ("group", "slot", "index", "page", "is_fresh")
_SLOT_FIELDS = tuple(field.name for field in dataclasses.fields(SlotWrites) if field.name != "seed")
_TOKEN_FIELDS = tuple(field.name for field in dataclasses.fields(TokenWrites))


@dataclass(frozen=True, slots=True)
class Field:
    """One array of the packet: its name and most words."""

    name: str
    max_words: int


@dataclass(frozen=True, slots=True)
class PacketSchema:
    """Which fields there are, in order."""

    fields: tuple[Field, ...]

    @property
    def header_words(self) -> int:
        """Words of the header: the scalars, then (offset, length) a field."""
        return _aligned(len(SCALARS) + 2 * len(self.fields))

    @property
    def num_bytes(self) -> int:
        """Bytes of the largest packet."""
        return 4 * (self.header_words + sum(_aligned(field.max_words) for field in self.fields))


def packet_schema(config: EngineConfig) -> PacketSchema:
    """Return the schema that holds any plan of this configuration."""
    rows, pages = config.max_running, config.max_pages_per_sequence + config.max_running
    return PacketSchema(
        (
            *(Field(f"rows.{name}", rows) for name in _ROW_FIELDS),
            Field("token_ids", config.max_step_tokens),
            *(Field(f"pages.{name}", pages) for name in _PAGE_FIELDS),
            *(Field(f"slots.{name}", rows) for name in _SLOT_FIELDS),
            Field("slots.seed", 2 * rows),
            *(Field(f"tokens.{name}", 2 * MAX_BIASES) for name in _TOKEN_FIELDS),
            Field("targets", config.max_step_tokens),
        )
    )


class PacketWriter:
    """Writes plans. Remembers the last rows: a steady decode step sends a header alone."""

    def __init__(self, schema: PacketSchema) -> None:
        self._schema = schema
        self._last_rows: Rows | None = None
        names = [field.name for field in schema.fields]
        self._places = {name: index for index, name in enumerate(names)}
        self._empty = np.zeros(len(SCALARS) + 2 * len(names), dtype=np.int32)

    def write(self, plan: StepPlan, words: Words) -> int:
        """Write ``plan`` into ``words`` and return the number of words used.

        Raises:
            InvariantError: the plan is larger than the configuration allows.
        """
        rows_unchanged = _same_rows(plan.rows, self._last_rows)
        self._last_rows = plan.rows
        values: dict[str, Words] = {"token_ids": plan.token_ids}
        if not rows_unchanged:
            values |= {f"rows.{name}": getattr(plan.rows, name) for name in _ROW_FIELDS}
        if len(plan.page_writes):
            values |= {f"pages.{name}": getattr(plan.page_writes, name) for name in _PAGE_FIELDS}
        if len(plan.slot_writes):
            values |= {
                f"slots.{name}": getattr(plan.slot_writes, name).view(np.int32)
                for name in (*_SLOT_FIELDS, "seed")
            }
        if len(plan.token_writes):
            values |= {
                f"tokens.{name}": getattr(plan.token_writes, name).view(np.int32)
                for name in _TOKEN_FIELDS
            }
        if len(plan.targets):
            values["targets"] = plan.targets
        words[: len(self._empty)] = self._empty
        words[: len(SCALARS)] = len(plan.rows), plan.num_tokens, rows_unchanged
        end = self._schema.header_words
        for name, array in values.items():
            length, place = len(array), self._places[name]
            if length == 0:
                continue
            if length > (most := self._schema.fields[place].max_words):
                raise InvariantError(f"a plan has {length} words of {name}; at most {most} fit")
            head = len(SCALARS) + 2 * place
            words[head : head + 2] = end, length
            words[end : end + length] = array
            end += _aligned(length)
        return end


@dataclass(frozen=True, slots=True)
class PacketView:
    """A packet as the device reads it.

    Attributes:
        num_rows, num_tokens: of the step.
        rows_unchanged: the rows are those of the step before; no row field is sent.
        fields: name -> int32 view of the block.
    """

    num_rows: int
    num_tokens: int
    rows_unchanged: bool
    fields: dict[str, Words]


def read_packet(schema: PacketSchema, words: Words) -> PacketView:
    """Return views of the packet that lies in ``words``."""
    num_fields = len(schema.fields)
    header = words[: len(SCALARS) + 2 * num_fields].tolist()
    fields: dict[str, Words] = {}
    for index, field in enumerate(schema.fields):
        offset, length = header[len(SCALARS) + 2 * index : len(SCALARS) + 2 * index + 2]
        fields[field.name] = words[offset : offset + length]
    return PacketView(header[0], header[1], bool(header[2]), fields)


def _same_rows(rows: Rows, last: Rows | None) -> bool:
    """True for decode rows that repeat the last step's; prefill rows move, so they never do."""
    # Bytes: of a few hundred integers, numpy's own comparison is mostly overhead.
    return last is not None and all(
        getattr(rows, name).tobytes() == getattr(last, name).tobytes() for name in _ROW_FIELDS
    )


def _aligned(num_words: int) -> int:
    return -(-num_words // _ALIGN_WORDS) * _ALIGN_WORDS
