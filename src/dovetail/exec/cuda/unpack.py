"""From a packet on the GPU to the inputs of one forward, in a few kernels and no wait.

Owns the GPU form of ``exec.batch.unpack``: it applies the packet's state changes, then works out
positions, cache slots and work lists. What most steps need has grids of a fixed size and reads all
the rest off the packet, so that a recorded step can hold it; what few steps need is launched by
itself, as large as the plan says.

Shape legend: as in ``exec.cuda.step``.
"""

from dataclasses import dataclass, field

import torch
import triton.language as tl
from torch import Tensor

from dovetail.errors import InvariantError
from dovetail.exec.cuda.step import WORD_COLUMNS, SlotTensors, StepShape, StepTensors
from dovetail.exec.kv import KVStore
from dovetail.exec.packet import PacketSchema
from dovetail.exec.readback import BROKEN_ROW
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import ceil_div, power_of_two
from dovetail.sched.plan import MAX_BIASES, MAX_REPORTED_IDS, StepPlan, TokenTable

_TOKENS = 128
"""Tokens that one program places."""

_PAGE_PROGRAMS = 64
"""Programs that take turns with the entries of page tables: a step may have none, or thousands."""

_ROWS = ("slot", "generation", "start", "width", "samples")
"""The columns of rows, by whose numbers kernels here and in ``pack`` and ``shaped`` read them."""

_BROKEN = tl.constexpr(BROKEN_ROW)
_BIAS = tl.constexpr(int(TokenTable.BIAS))


def _places(schema: PacketSchema, table: str) -> dict[str, int]:
    """Return the columns of a table of the packet by their number."""
    columns = next(item.columns for item in schema.tables if item.name == table)
    return {column: index for index, column in enumerate(columns)}


@jit
def _column(packet_ptr, HEAD: tl.constexpr, INDEX: tl.constexpr):
    """Where a column begins, given its table's place in the header and its number there."""
    return packet_ptr + tl.load(packet_ptr + HEAD) + INDEX * tl.load(packet_ptr + HEAD + 1)


@jit
def _tenant_kernel(
    packet_ptr, kv_len_ptr, last_token_ptr, words_ptr, seed_ptr, table_ptr, num_slots, table_stride,
    SLOTS: tl.constexpr, SLOT: tl.constexpr, FIRST: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    SEEDS: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One new tenant of a slot. Its sampling parameters are columns that follow one another."""
    write = tl.program_id(0)
    slot = tl.load(_column(packet_ptr, SLOTS, SLOT) + write).to(tl.int64)
    tl.store(kv_len_ptr + slot, 0)
    tl.store(last_token_ptr + slot, -1)
    first = _column(packet_ptr, SLOTS, FIRST) + write
    length = tl.load(packet_ptr + SLOTS + 1)
    for column in range(NUM_COLUMNS):
        tl.store(words_ptr + column * num_slots + slot, tl.load(first + column * length))
    seed = _column(packet_ptr, SEEDS, 0) + 2 * write
    low = tl.load(seed).to(tl.int64) & 0xFFFFFFFF
    tl.store(seed_ptr + slot, (tl.load(seed + 1).to(tl.int64) << 32) | low)
    for start in range(0, PAGES, BLOCK):
        page = start + tl.arange(0, BLOCK)
        tl.store(table_ptr + slot * table_stride + page, -1, mask=page < PAGES)


@jit(do_not_specialize=["num_writes"])
def _token_write_kernel(
    packet_ptr, bias_ids_ptr, bias_values_ptr, bias_until_ptr, report_ids_ptr, num_writes,
    TOKENS: tl.constexpr, BIASES: tl.constexpr, REPORTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of token tables; the columns are those of ``TokenWrites``, in their order."""
    write = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = write < num_writes
    table = tl.load(_column(packet_ptr, TOKENS, 0) + write, mask=is_real, other=0)
    slot = tl.load(_column(packet_ptr, TOKENS, 1) + write, mask=is_real, other=0).to(tl.int64)
    index = tl.load(_column(packet_ptr, TOKENS, 2) + write, mask=is_real, other=0)
    token_id = tl.load(_column(packet_ptr, TOKENS, 3) + write, mask=is_real, other=0)
    value = tl.load(_column(packet_ptr, TOKENS, 4) + write, mask=is_real, other=0)
    until = tl.load(_column(packet_ptr, TOKENS, 5) + write, mask=is_real, other=0)
    is_bias = is_real & (table == _BIAS)
    place = slot * BIASES + index
    tl.store(bias_ids_ptr + place, token_id, mask=is_bias)
    tl.store(bias_values_ptr + place, value.to(tl.float32, bitcast=True), mask=is_bias)
    tl.store(bias_until_ptr + place, until, mask=is_bias)
    tl.store(report_ids_ptr + slot * REPORTS + index, token_id, mask=is_real & (table != _BIAS))


@jit
def _poison(column_ptr, page, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, BYTES, BLOCK):
        byte = start + tl.arange(0, BLOCK)
        ones = tl.full((BLOCK,), 255, tl.uint8)
        tl.store(column_ptr + page * BYTES + byte, ones, mask=byte < BYTES)


@jit
def _page_kernel(
    packet_ptr, table_ptr, first_ptr, second_ptr, third_ptr, table_stride, PAGES: tl.constexpr,
    SLOT: tl.constexpr, INDEX: tl.constexpr, PAGE: tl.constexpr, IS_FRESH: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries of page tables; the side data of a fresh page is a stranger's and is forgotten."""
    for write in range(tl.program_id(0), tl.load(packet_ptr + PAGES + 1), PROGRAMS):
        slot = tl.load(_column(packet_ptr, PAGES, SLOT) + write).to(tl.int64)
        index = tl.load(_column(packet_ptr, PAGES, INDEX) + write)
        page = tl.load(_column(packet_ptr, PAGES, PAGE) + write)
        tl.store(table_ptr + slot * table_stride + index, page)
        page = page.to(tl.int64)
        if tl.load(_column(packet_ptr, PAGES, IS_FRESH) + write) != 0:
            _poison(first_ptr, page, FIRST, BLOCK)
            if second_ptr is not None:
                _poison(second_ptr, page, SECOND, BLOCK)
            if third_ptr is not None:
                _poison(third_ptr, page, THIRD, BLOCK)


@jit
def _row_column(
    packet_ptr, rows_ptr, row, num_rows, rows_stride, ROWS: tl.constexpr, INDEX: tl.constexpr
):  # fmt: skip
    """Return a column of the rows: of the packet, or kept from the step before."""
    is_real, is_kept = row < num_rows, tl.load(packet_ptr + ROWS + 1) == 0
    kept = rows_ptr + INDEX * rows_stride + row
    sent = _column(packet_ptr, ROWS, INDEX) + row
    value = tl.load(sent, mask=is_real & (is_kept == 0), other=0)
    value += tl.load(kept, mask=is_real & is_kept, other=0)
    tl.store(kept, value, mask=is_real)
    return value


@jit(do_not_specialize=["num_decode_entries", "num_tile_entries"])
def _row_kernel(
    packet_ptr, rows_ptr, kv_len_ptr, table_ptr, temperature_ptr, seed_ptr, sample_index_ptr,
    num_decode_ptr, begin_ptr, first_ptr, first_tile_ptr, end_ptr, last_ptr, status_ptr,
    row_temperature_ptr, row_seed_ptr, row_sample_index_ptr, decode_ptr, tiles_ptr,
    rows_stride, table_stride, num_decode_entries, num_tile_entries, ROWS: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All rows at once: lengths, and the list of decode rows. Unused tiles are marked."""
    row = tl.arange(0, BLOCK)
    num_rows, num_tokens = tl.load(packet_ptr), tl.load(packet_ptr + 1)
    is_real = row < num_rows
    slot = _row_column(packet_ptr, rows_ptr, row, num_rows, rows_stride, ROWS, 0)
    start = _row_column(packet_ptr, rows_ptr, row, num_rows, rows_stride, ROWS, 2)
    width = _row_column(packet_ptr, rows_ptr, row, num_rows, rows_stride, ROWS, 3)
    _row_column(packet_ptr, rows_ptr, row, num_rows, rows_stride, ROWS, 4)
    slot = slot.to(tl.int64)
    is_decode = is_real & (start < 0)

    begin = tl.where(is_decode, tl.load(kv_len_ptr + slot, mask=is_real, other=0), start)
    end = begin + width
    last_page = (end - 1) // PAGE  # pages are told in order: who has this one has all before
    has_place = is_real & (last_page < PAGES)
    page = tl.load(table_ptr + slot * table_stride + last_page, mask=has_place, other=-1)
    is_good = page >= 0
    first = tl.cumsum(width) - width
    num_tiles = tl.where(is_real & (start >= 0), (width + TILE_TOKENS - 1) // TILE_TOKENS, 0)
    first_tile = tl.cumsum(num_tiles) - num_tiles

    tl.store(num_decode_ptr, tl.sum(is_decode.to(tl.int32)))
    tl.store(kv_len_ptr + slot, end, mask=is_good)
    tl.store(begin_ptr + row, begin, mask=is_real)
    # The entry after the last row is that of padding.
    is_entry = row <= num_rows
    tl.store(first_ptr + row, tl.where(is_real, first, num_tokens), mask=is_entry)
    tl.store(first_tile_ptr + row, first_tile, mask=is_entry)
    tl.store(end_ptr + row, end.to(tl.int64), mask=is_real)
    tl.store(status_ptr + row, tl.where(is_good, 0, _BROKEN), mask=is_real)
    # A padded row samples from the token of its own number: a padded one, or any other.
    last = tl.where(is_real, first + width - 1, row)
    is_kept = row < rows_stride
    tl.store(last_ptr + row, last.to(tl.int64), mask=is_kept)
    tl.store(rows_ptr + 4 * rows_stride + row, 0, mask=is_kept & (is_real == 0))
    temperature = tl.load(temperature_ptr + slot, mask=is_real, other=0.0)
    seed = tl.load(seed_ptr + slot, mask=is_real, other=0)
    sample_index = tl.load(sample_index_ptr + slot, mask=is_real, other=0)
    tl.store(row_temperature_ptr + row, temperature, mask=is_kept)
    tl.store(row_seed_ptr + row, seed, mask=is_kept)
    tl.store(row_sample_index_ptr + row, sample_index.to(tl.int64), mask=is_kept)

    entry, is_listed = decode_ptr + row * 4, row < num_decode_entries
    # What is no prompt chunk owns the token of its number: a decode row, or padding of the list.
    owns = is_decode | (row >= num_tokens)
    tl.store(entry, tl.where(is_good, slot, 0).to(tl.int32), mask=is_listed)
    tl.store(entry + 1, row, mask=is_listed)
    tl.store(entry + 2, tl.where(owns, 1, 0), mask=is_listed)
    tl.store(entry + 3, tl.where(is_good & is_decode, end, 0), mask=is_listed)
    for begin_entry in range(0, num_tile_entries, BLOCK):
        tile = begin_entry + row
        tl.store(tiles_ptr + tile * 4 + 2, 0, mask=tile < num_tile_entries)


@jit(do_not_specialize=["num_padded", "num_tile_entries"])
def _token_kernel(
    packet_ptr, rows_ptr, last_token_ptr, table_ptr, num_decode_ptr, begin_ptr, first_ptr,
    first_tile_ptr, status_ptr, token_ids_ptr, positions_ptr, kv_slots_ptr, tokens_ptr, tiles_ptr,
    rows_stride, table_stride, num_padded, num_tile_entries, sink,
    TOKEN_IDS: tl.constexpr, PAGE: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens: id, position and cache slot of each, and the tiles that begin with them."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_rows, num_tokens = tl.load(packet_ptr), tl.load(packet_ptr + 1)
    is_real, is_padded = token < num_tokens, (token >= num_tokens) & (token < num_padded)
    # Decode rows stand before prompt chunks and have one token each.
    num_decode = tl.load(num_decode_ptr)
    row = tl.minimum(token, num_decode)
    for i in range(num_decode + 1, num_rows):
        row = tl.where(token >= tl.load(first_ptr + i), i, row)
    row = tl.where(is_real, row, num_rows)  # the entry of padding
    first = tl.load(first_ptr + row)
    slot = tl.load(rows_ptr + row, mask=is_real, other=0).to(tl.int64)
    is_decode = is_real & (token < num_decode)
    width = tl.load(rows_ptr + 3 * rows_stride + row, mask=is_real, other=0)
    begin = tl.load(begin_ptr + row, mask=is_real, other=0)
    is_good = is_real & (tl.load(status_ptr + row, mask=is_real, other=1) == 0)

    position = begin + token - first
    page = tl.load(table_ptr + slot * table_stride + position // PAGE, mask=is_good, other=-1)
    is_good = is_good & (page >= 0)
    kv_slot = tl.where(is_good, page.to(tl.int64) * PAGE + position % PAGE, sink)
    sent = _column(packet_ptr, TOKEN_IDS, 0) + token - num_decode
    given = tl.load(sent, mask=is_real & (is_decode == 0), other=0)
    drawn = tl.load(last_token_ptr + slot, mask=is_decode, other=0)
    token_id = tl.maximum(tl.where(is_decode, drawn, given), 0)
    is_stored = is_real | is_padded
    tl.store(token_ids_ptr + token, token_id.to(tl.int64), mask=is_stored)
    tl.store(positions_ptr + token, tl.where(is_good, position, 0).to(tl.int64), mask=is_stored)
    tl.store(kv_slots_ptr + token, kv_slot, mask=is_stored)
    tl.store(tokens_ptr + kv_slot, token_id, mask=is_good)

    offset = token - first
    width = tl.where(is_real, width, num_padded - num_tokens)
    leads = (offset % TILE_TOKENS == 0) & (is_decode == 0) & is_stored
    tile = tl.load(first_tile_ptr + row) + offset // TILE_TOKENS
    leads = leads & (tile < num_tile_entries)
    entry, size = tiles_ptr + tile * 4, tl.minimum(width - offset, TILE_TOKENS)
    tl.store(entry, tl.where(is_good, slot, 0).to(tl.int32), mask=leads)
    tl.store(entry + 1, token, mask=leads)
    tl.store(entry + 2, size, mask=leads)
    tl.store(entry + 3, tl.where(is_good, position + size, 0), mask=leads)


@jit(do_not_specialize=["num_targets"])
def _target_kernel(
    packet_ptr, targets_ptr, num_targets, TARGETS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    target = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = target < num_targets
    value = tl.load(_column(packet_ptr, TARGETS, 0) + target, mask=is_real, other=0)
    tl.store(targets_ptr + target, value.to(tl.int64), mask=is_real)


@dataclass(slots=True)
class Unpacker:
    """Fills ``inputs`` from packets and keeps ``slots`` and ``kv`` in step with them.

    Attributes:
        packet: int32, the one that was fetched last.
        schema: of the packet.
        slots, inputs, kv: what is changed.
        page_size: tokens of a page.
        tile_tokens: see ``QueryTiles.max_tokens``.
    """

    packet: Tensor
    schema: PacketSchema
    slots: SlotTensors
    inputs: StepTensors
    kv: KVStore
    page_size: int
    tile_tokens: int
    heads: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.heads = self.schema.heads
        for name, sidecar in self.kv.sidecars.items():
            if not sidecar.spec.is_poison_all_ones:
                raise InvariantError(f"the poison of column {name} is not all ones in bits")
        places = [_places(self.schema, "slots")[name] for name in WORD_COLUMNS]
        if tuple(_places(self.schema, "rows")) != _ROWS:
            raise InvariantError(f"the kernels know rows as {_ROWS}, the packet has others")
        if places != list(range(places[0], places[0] + len(places))):
            raise InvariantError("the packet's sampling parameters do not follow one another")

    @staticmethod
    def has_to_install(plan: StepPlan) -> bool:
        """Return whether there is anything for ``install`` to do."""
        return bool(len(plan.slot_writes) or len(plan.token_writes) or len(plan.targets))

    def install(self, plan: StepPlan) -> None:
        """Take over what few plans have: new tenants, their token tables, targets of prompts."""
        slots, table = self.slots, self.slots.page_table_SB
        if len(plan.slot_writes):
            places = _places(self.schema, "slots")
            _tenant_kernel[(len(plan.slot_writes),)](
                self.packet, slots.kv_len, slots.last_token, slots.words_CS, slots.seed, table,
                len(slots.kv_len), table.stride(0), SLOTS=self.heads["slots"],
                SLOT=places["slot"], FIRST=places[WORD_COLUMNS[0]], NUM_COLUMNS=len(WORD_COLUMNS),
                SEEDS=self.heads["seeds"], PAGES=table.shape[1], BLOCK=1024,
            )  # fmt: skip
        if num_writes := len(plan.token_writes):
            _token_write_kernel[(ceil_div(num_writes, _TOKENS),)](
                self.packet, slots.bias_ids_SJ, slots.bias_values_SJ, slots.bias_until_SJ,
                slots.report_ids_SJ, num_writes, TOKENS=self.heads["tokens"],
                BIASES=MAX_BIASES, REPORTS=MAX_REPORTED_IDS, BLOCK=_TOKENS,
            )  # fmt: skip
        if num_targets := len(plan.targets):
            _target_kernel[(ceil_div(num_targets, _TOKENS),)](
                self.packet, self.inputs.targets_T, num_targets, TARGETS=self.heads["targets"],
                BLOCK=_TOKENS,
            )  # fmt: skip

    def write_pages(self) -> None:
        """Change page tables. After ``install``: the pages are the new tenants'."""
        columns = [sidecar.rows for sidecar in self.kv.sidecars.values()]
        page_bytes = [self.page_size * rows.stride(0) * rows.itemsize for rows in columns]
        num_absent, table = 3 - len(columns), self.slots.page_table_SB
        places = _places(self.schema, "pages")
        _page_kernel[(_PAGE_PROGRAMS,)](
            self.packet, table, *(rows.view(-1).view(torch.uint8) for rows in columns),
            *([None] * num_absent), table.stride(0), self.heads["pages"], places["slot"],
            places["index"], places["page"], places["is_fresh"],
            *page_bytes, *([0] * num_absent), PROGRAMS=_PAGE_PROGRAMS, BLOCK=1024,
        )  # fmt: skip

    def fill(self, padded: StepShape) -> None:
        """Work out the inputs of a forward, padded to a shape."""
        at, slots = self.inputs, self.slots
        stride, table = at.rows_5R.stride(0), slots.page_table_SB
        _row_kernel[(1,)](
            self.packet, at.rows_5R, slots.kv_len, table, slots.param("temperature"), slots.seed,
            slots.param("sample_index"),
            at.num_decode, at.begin_R, at.first_R, at.first_tile_R, at.end_R, at.last_R,
            at.status_R,
            at.temperature_R, at.seed_R, at.sample_index_R, at.decode_R4, at.tiles_N4,
            stride, table.stride(0), padded.num_decode, padded.num_tiles, ROWS=self.heads["rows"],
            PAGE=self.page_size, PAGES=table.shape[1], TILE_TOKENS=self.tile_tokens,
            BLOCK=power_of_two(at.rows_5R.shape[1] + 1),
        )  # fmt: skip
        tokens = self.kv.sidecars["tokens"]
        _token_kernel[(ceil_div(padded.num_tokens, _TOKENS),)](
            self.packet, at.rows_5R, slots.last_token, table, at.num_decode, at.begin_R,
            at.first_R, at.first_tile_R,
            at.status_R, at.token_ids_T, at.positions_T, at.kv_slots_T, tokens.rows, at.tiles_N4,
            stride, table.stride(0), padded.num_tokens, padded.num_tiles,
            tokens.sink, TOKEN_IDS=self.heads["token_ids"], PAGE=self.page_size,
            TILE_TOKENS=self.tile_tokens, BLOCK=_TOKENS,
        )  # fmt: skip
