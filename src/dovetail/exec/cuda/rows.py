"""Rows of side data into the payload block: all read-outs of a step in one launch, a snapshot too.

Owns how rows are found on the device, by page table or by cache slot: the packet says which, so
nothing is worked out tensor by tensor. Rows are copied as bits, in the widest unit that divides
them. Must not know what a row means.

Shape legend: C cache slots, T tokens, N copies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from dovetail.capture.sidecar import Sidecar
from dovetail.exec.cuda.step import SlotTensors
from dovetail.exec.packet import PacketSchema
from dovetail.exec.readback import PayloadLayout, PayloadSlice
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import ceil_div

_UNITS = 512
"""Units that a program copies at a time."""

_MAX_PROGRAMS = 64
"""Programs of one copy; they share a long one."""

MAX_COLUMNS = 3
"""Columns that the kernels have arguments for."""

_UNIT_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@jit
def _copy_pages(
    rows_ptr, out_ptr, pages_ptr, start, count, first, UNITS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's share of one copy: rows of positions, found by a page table."""
    step = tl.num_programs(1) * BLOCK
    for begin in range(tl.program_id(1) * BLOCK, count * UNITS, step):
        unit = begin + tl.arange(0, BLOCK)
        is_real = unit < count * UNITS
        position = start + unit // UNITS
        page = tl.load(pages_ptr + position // PAGE, mask=is_real, other=0).to(tl.int64)
        source = (page * PAGE + position % PAGE) * UNITS + unit % UNITS
        value = tl.load(rows_ptr + source, mask=is_real)
        tl.store(out_ptr + first.to(tl.int64) * UNITS + unit, value, mask=is_real)


@jit(do_not_specialize=["table_stride"])
def _readout_kernel(
    packet_ptr, table_ptr, rows_1_ptr, rows_2_ptr, rows_3_ptr, out_1_ptr, out_2_ptr, out_3_ptr,
    table_stride, COPIES: tl.constexpr, UNITS_1: tl.constexpr, UNITS_2: tl.constexpr,
    UNITS_3: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One copy of the packet's table, whose columns are ``exec.readback.COPY_COLUMNS``."""
    length = tl.load(packet_ptr + COPIES + 1)
    entry = packet_ptr + tl.load(packet_ptr + COPIES) + tl.program_id(0)
    column, slot = tl.load(entry), tl.load(entry + length).to(tl.int64)
    start, count = tl.load(entry + 2 * length), tl.load(entry + 3 * length)
    first = tl.load(entry + 4 * length)
    pages_ptr = table_ptr + slot * table_stride
    if column == 0:
        _copy_pages(rows_1_ptr, out_1_ptr, pages_ptr, start, count, first, UNITS_1, PAGE, BLOCK)
    # What is known when this is compiled stands before what is not, in a condition of its own.
    if rows_2_ptr is not None:  # noqa: SIM102
        if column == 1:
            _copy_pages(rows_2_ptr, out_2_ptr, pages_ptr, start, count, first, UNITS_2, PAGE, BLOCK)
    if rows_3_ptr is not None:  # noqa: SIM102
        if column == 2:
            _copy_pages(rows_3_ptr, out_3_ptr, pages_ptr, start, count, first, UNITS_3, PAGE, BLOCK)


@jit
def _copy_slots(
    rows_ptr, out_ptr, slots_ptr, num_tokens, UNITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = unit < num_tokens * UNITS
    slot = tl.load(slots_ptr + unit // UNITS, mask=is_real, other=0)
    value = tl.load(rows_ptr + slot * UNITS + unit % UNITS, mask=is_real)
    tl.store(out_ptr + unit, value, mask=is_real)


@jit(do_not_specialize=["num_tokens"])
def _snapshot_kernel(
    slots_ptr, slots_out_ptr, rows_1_ptr, rows_2_ptr, rows_3_ptr, out_1_ptr, out_2_ptr, out_3_ptr,
    num_tokens, UNITS_1: tl.constexpr, UNITS_2: tl.constexpr, UNITS_3: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of each column's units, and of the slots. An output that is None is not asked for."""
    if out_1_ptr is not None:
        _copy_slots(rows_1_ptr, out_1_ptr, slots_ptr, num_tokens, UNITS_1, BLOCK)
    if out_2_ptr is not None:
        _copy_slots(rows_2_ptr, out_2_ptr, slots_ptr, num_tokens, UNITS_2, BLOCK)
    if out_3_ptr is not None:
        _copy_slots(rows_3_ptr, out_3_ptr, slots_ptr, num_tokens, UNITS_3, BLOCK)
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = token < num_tokens
    tl.store(slots_out_ptr + token, tl.load(slots_ptr + token, mask=is_real), mask=is_real)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column as the kernels see it: a row is ``num_units`` of a dtype of 1 to 8 bytes."""

    rows: Tensor
    num_units: int

    @classmethod
    def of(cls, sidecar: Sidecar) -> "_Column":
        row_bytes = sidecar.spec.row_bytes
        unit_bytes = math.gcd(row_bytes, 8)
        units = sidecar.rows.view(-1).view(torch.uint8).view(_UNIT_DTYPES[unit_bytes])
        return cls(units, row_bytes // unit_bytes)

    def place(self, payload: Tensor, item: PayloadSlice) -> Tensor:
        """Return the array of the payload block in this column's units."""
        return payload[item.offset : item.offset + item.num_bytes].view(self.rows.dtype)


class RowCopies:
    """Copies rows of the sidecars; launches alone, so as work of the compute lane.

    Args:
        packet: int32, the one that was fetched last.
        schema: of packets.
        slots: whose page tables say where a sequence's rows are.
        sidecars: all columns, in the order of ``COPY_COLUMNS``' numbers.
        page_size: tokens of a page.
    """

    def __init__(
        self,
        packet: Tensor,
        schema: PacketSchema,
        slots: SlotTensors,
        sidecars: Mapping[str, Sidecar],
        *,
        page_size: int,
    ) -> None:
        self._packet = packet
        self._head = schema.heads["copies"]
        self._table = slots.page_table_SB
        self._columns = {name: _Column.of(sidecar) for name, sidecar in sidecars.items()}
        self._absent = [None] * (MAX_COLUMNS - len(self._columns))
        self._rows = [*(column.rows for column in self._columns.values()), *self._absent]
        num_units = [column.num_units for column in self._columns.values()]
        self._num_units = np.array(num_units)
        num_units += [0] * len(self._absent)
        self._units = {f"UNITS_{number}": num for number, num in enumerate(num_units, start=1)}
        self._page_size = page_size

    def read_out(self, layout: PayloadLayout, payload: Tensor) -> None:
        """Copy what the packet's table names into the payload block."""
        numbers, counts = layout.copies[0], layout.copies[3]
        longest = ceil_div(int((counts * self._num_units[numbers]).max()), _UNITS)
        # A column that nobody asks for has a place too: one kernel serves any mix.
        places = [
            column.place(payload, layout.readouts[name])
            if name in layout.readouts
            else payload.view(column.rows.dtype)
            for name, column in self._columns.items()
        ]
        _readout_kernel[(layout.copies.shape[1], min(longest, _MAX_PROGRAMS))](
            self._packet, self._table, *self._rows, *places, *self._absent,
            self._table.stride(0), COPIES=self._head, **self._units, PAGE=self._page_size,
            BLOCK=_UNITS,
        )  # fmt: skip

    def snapshot(
        self, kv_slots_T: Tensor, places: Mapping[str, PayloadSlice], payload: Tensor
    ) -> None:
        """Copy the rows at the tokens' cache slots, and those slots, into the payload block.

        Args:
            kv_slots_T: int64.
            places: column name -> where to, with ``kv_slots``.
            payload: the payload block.
        """
        num_tokens = len(kv_slots_T)
        most = max(self._columns[name].num_units for name in places if name != "kv_slots")
        slots_out = places["kv_slots"]
        outs = [
            column.place(payload, places[name]) if name in places else None
            for name, column in self._columns.items()
        ]
        _snapshot_kernel[(ceil_div(num_tokens * most, _UNITS),)](
            kv_slots_T, payload[slots_out.offset :].view(torch.int64), *self._rows,
            *outs, *self._absent, num_tokens, **self._units, BLOCK=_UNITS,
        )  # fmt: skip
