"""The experts' MLPs: slot by slot for few tokens, grouped by expert for many.

Few tokens choose experts that are nearly all different, so each pair of token and expert is two
matrix-vector products: reading the weights once is all there is to do. Of many tokens those of an
expert stand together, and each run of them is the left side of a matrix product.

Integer atomics decide in which row of a run a slot stands; no row's arithmetic depends on that.
Sums over a token's experts are made in the order of its ids.

Shape legend: as in ``kernels.backend``; S slots (T * K: one for each token and chosen expert), N
runs of rows.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels.triton.activation import silu
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import (
    GemmTiles,
    GroupedTiles,
    SlotwiseTiles,
    TileTable,
    ceil_div,
    power_of_two,
)

_SORT_CELLS = 8192
"""Slots of a program of the sort, times experts."""
_COMBINE_COLUMNS = 1024


@jit
def _up_slot_kernel(
    x_ptr, ids_ptr, w_ptr, hidden_ptr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the hidden state of one slot."""
    slot = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < INNER)[:, None]
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    x_ptr += (slot // TOP_K).to(tl.int64) * WIDTH
    w_ptr += expert * 2 * INNER * WIDTH + column[:, None] * WIDTH
    gate, up = tl.zeros((COLUMNS, DEPTH), tl.float32), tl.zeros((COLUMNS, DEPTH), tl.float32)
    for start in tl.static_range(0, WIDTH, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        is_depth = depth < WIDTH
        is_real = is_column & is_depth[None, :]
        x = tl.load(x_ptr + depth, mask=is_depth, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(w_ptr + depth[None, :], mask=is_real, other=0.0).to(tl.float32) * x
        w = tl.load(w_ptr + INNER * WIDTH + depth[None, :], mask=is_real, other=0.0)
        up += w.to(tl.float32) * x
    hidden = silu(tl.sum(gate, axis=1)) * tl.sum(up, axis=1)
    target = hidden_ptr + slot.to(tl.int64) * INNER + column
    tl.store(target, hidden.to(hidden_ptr.dtype.element_ty), mask=column < INNER)


@jit
def _down_slot_kernel(
    hidden_ptr, ids_ptr, weights_ptr, w_ptr, out_ptr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the output of one token, its experts one by one."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < WIDTH)[:, None]
    out = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(TOP_K):
        slot = token * TOP_K + i
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        row_ptr = w_ptr + expert * WIDTH * INNER + column[:, None] * INNER
        y = tl.zeros((COLUMNS, DEPTH), tl.float32)
        for start in tl.static_range(0, INNER, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            is_depth = depth < INNER
            hidden = tl.load(hidden_ptr + slot * INNER + depth, mask=is_depth, other=0.0)
            w = tl.load(row_ptr + depth[None, :], mask=is_column & is_depth[None, :], other=0.0)
            y += w.to(tl.float32) * hidden.to(tl.float32)[None, :]
        rounded = tl.sum(y, axis=1).to(out_ptr.dtype.element_ty).to(tl.float32)
        out += tl.load(weights_ptr + slot) * rounded
    tl.store(
        out_ptr + token * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=column < WIDTH
    )


def slotwise_moe(
    x_TM: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w_gate_up_E2IM: Tensor,
    w_down_EMI: Tensor,
    *,
    tiles: SlotwiseTiles,
) -> Tensor:
    """See ``kernels.backend.Kernels.fused_moe``."""
    num_tokens, top_k = ids_TK.shape
    _, width, inner = w_down_EMI.shape
    hidden_SI = x_TM.new_empty(num_tokens * top_k, inner)
    out_TM = torch.empty_like(x_TM)
    _up_slot_kernel[(num_tokens * top_k, ceil_div(inner, tiles.up_columns))](
        x_TM, ids_TK, w_gate_up_E2IM, hidden_SI, TOP_K=top_k, WIDTH=width, INNER=inner,
        COLUMNS=tiles.up_columns, DEPTH=tiles.up_depth, num_warps=tiles.num_warps,
    )  # fmt: skip
    _down_slot_kernel[(num_tokens, ceil_div(width, tiles.down_columns))](
        hidden_SI, ids_TK, weights_TK, w_down_EMI, out_TM, TOP_K=top_k, WIDTH=width, INNER=inner,
        COLUMNS=tiles.down_columns, DEPTH=tiles.down_depth, num_warps=tiles.num_warps,
    )  # fmt: skip
    return out_TM


class SlotRuns(NamedTuple):
    """Slots sorted by expert, and the runs that a program takes of them.

    Attributes:
        order_S: int32, the slots, those of an expert together.
        runs_N3: int32; expert, first place within ``order_S``, number of rows. 0 rows: unused.
        counts_E: int32, slots of each expert.
    """

    order_S: Tensor
    runs_N3: Tensor
    counts_E: Tensor


@jit(do_not_specialize=["SLOTS"])
def _count_kernel(ids_ptr, counts_ptr, rank_ptr, SLOTS, BLOCK: tl.constexpr):
    """Count the slots of each expert; a slot's rank is how many were there before it."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = slot < SLOTS
    expert = tl.load(ids_ptr + slot, mask=is_real, other=0)
    rank = tl.atomic_add(counts_ptr + expert, 1, mask=is_real, sem="relaxed")
    tl.store(rank_ptr + slot, rank, mask=is_real)


@jit(do_not_specialize=["SLOTS", "RUNS"])
def _place_kernel(
    ids_ptr, counts_ptr, rank_ptr, order_ptr, runs_ptr, SLOTS, EXPERTS, RUNS,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place BLOCK slots, and describe BLOCK runs."""
    expert = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + expert, mask=expert < EXPERTS, other=0)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)

    is_slot = index < SLOTS
    mine = tl.load(ids_ptr + index, mask=is_slot, other=0).to(tl.int32)
    start = tl.sum(tl.where(expert[None, :] < mine[:, None], counts[None, :], 0), axis=1)
    rank = tl.load(rank_ptr + index, mask=is_slot, other=0)
    tl.store(order_ptr + start + rank, index, mask=is_slot)

    run_end = tl.cumsum(tl.cdiv(counts, ROWS))
    is_past = run_end[None, :] <= index[:, None]  # experts whose runs all come before this one
    owner = tl.sum(is_past.to(tl.int32), axis=1)
    runs_before = tl.max(tl.where(is_past, run_end[None, :], 0), axis=1)
    rows_before = tl.sum(tl.where(is_past, counts[None, :], 0), axis=1)
    of_owner = tl.sum(tl.where(expert[None, :] == owner[:, None], counts[None, :], 0), axis=1)
    skipped = (index - runs_before) * ROWS
    num_rows = tl.minimum(tl.maximum(of_owner - skipped, 0), ROWS)
    run, is_run = runs_ptr + index * 3, index < RUNS
    tl.store(run, owner, mask=is_run)
    tl.store(run + 1, rows_before + skipped, mask=is_run)
    tl.store(run + 2, num_rows, mask=is_run)


def sort_slots(ids_TK: Tensor, num_experts: int, *, rows: int) -> SlotRuns:
    """Sort slots by expert and cut each expert's into runs of at most ``rows``.

    A run holds at least one row, so there are at most S / rows + E of them, and at most S.
    """
    num_slots = ids_TK.numel()
    num_runs = min(num_slots, num_slots // rows + num_experts)
    counts_E = ids_TK.new_zeros(num_experts, dtype=torch.int32)
    rank_S = ids_TK.new_empty(num_slots, dtype=torch.int32)
    order_S = ids_TK.new_empty(num_slots, dtype=torch.int32)
    runs_N3 = ids_TK.new_empty(num_runs, 3, dtype=torch.int32)
    _count_kernel[(ceil_div(num_slots, 256),)](
        ids_TK, counts_E, rank_S, num_slots, BLOCK=256, num_warps=4
    )
    block_e = power_of_two(num_experts)
    block = max(16, _SORT_CELLS // block_e)
    _place_kernel[(ceil_div(max(num_slots, num_runs), block),)](
        ids_TK, counts_E, rank_S, order_S, runs_N3, num_slots, num_experts, num_runs,
        ROWS=rows, BLOCK_E=block_e, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return SlotRuns(order_S, runs_N3, counts_E)


@jit
def _up_run_kernel(
    x_ptr, w_ptr, order_ptr, runs_ptr, hidden_ptr, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the hidden states of one run, in sorted order."""
    NUM_PARTS: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    run, part = tl.program_id(0) // NUM_PARTS, tl.program_id(0) % NUM_PARTS
    num_rows = tl.load(runs_ptr + run * 3 + 2)
    if num_rows == 0:
        return
    expert, first = tl.load(runs_ptr + run * 3).to(tl.int64), tl.load(runs_ptr + run * 3 + 1)
    row = tl.arange(0, ROWS)
    # Rows past the last repeat it, columns too: what they give is not stored.
    token = tl.load(order_ptr + first + tl.minimum(row, num_rows - 1)) // TOP_K
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    x_tile = x_ptr + token.to(tl.int64)[:, None] * WIDTH + depth[None, :]
    w_ptr += expert * 2 * INNER * WIDTH
    w_tile = w_ptr + tl.minimum(column, INNER - 1)[None, :] * WIDTH + depth[:, None]
    gate, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, DEPTH):
        if WIDTH % DEPTH == 0:
            x = tl.load(x_tile + start)
            w_gate, w_up = tl.load(w_tile + start), tl.load(w_tile + INNER * WIDTH + start)
        else:
            is_depth = start + depth < WIDTH
            x = tl.load(x_tile + start, mask=is_depth[None, :], other=0.0)
            w_gate = tl.load(w_tile + start, mask=is_depth[:, None], other=0.0)
            w_up = tl.load(w_tile + INNER * WIDTH + start, mask=is_depth[:, None], other=0.0)
        gate = tl.dot(x, w_gate, gate, input_precision=PRECISION)
        up = tl.dot(x, w_up, up, input_precision=PRECISION)
    hidden = (silu(gate) * up).to(hidden_ptr.dtype.element_ty)
    target = hidden_ptr + (first + row).to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(target, hidden, mask=(row < num_rows)[:, None] & (column < INNER)[None, :])


@jit
def _down_run_kernel(
    hidden_ptr, w_ptr, order_ptr, runs_ptr, y_ptr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the expert outputs of one run, each row at its slot."""
    NUM_PARTS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    run, part = tl.program_id(0) // NUM_PARTS, tl.program_id(0) % NUM_PARTS
    num_rows = tl.load(runs_ptr + run * 3 + 2)
    if num_rows == 0:
        return
    expert, first = tl.load(runs_ptr + run * 3).to(tl.int64), tl.load(runs_ptr + run * 3 + 1)
    row = tl.arange(0, ROWS)
    place = first + tl.minimum(row, num_rows - 1)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    hidden_tile = hidden_ptr + place.to(tl.int64)[:, None] * INNER + depth[None, :]
    w_ptr += expert * WIDTH * INNER
    w_tile = w_ptr + tl.minimum(column, WIDTH - 1)[None, :] * INNER + depth[:, None]
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, INNER, DEPTH):
        if INNER % DEPTH == 0:
            hidden, w = tl.load(hidden_tile + start), tl.load(w_tile + start)
        else:
            is_depth = start + depth < INNER
            hidden = tl.load(hidden_tile + start, mask=is_depth[None, :], other=0.0)
            w = tl.load(w_tile + start, mask=is_depth[:, None], other=0.0)
        y = tl.dot(hidden, w, y, input_precision=PRECISION)
    slot = tl.load(order_ptr + place)
    target = y_ptr + slot.to(tl.int64)[:, None] * WIDTH + column[None, :]
    is_real = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=is_real)


@jit
def _combine_kernel(
    y_ptr, weights_ptr, out_ptr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_real = column < WIDTH
    out = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(TOP_K):
        slot = token * TOP_K + i
        y = tl.load(y_ptr + slot * WIDTH + column, mask=is_real, other=0.0).to(tl.float32)
        out += tl.load(weights_ptr + slot) * y
    tl.store(out_ptr + token * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=is_real)


def combine(y_SM: Tensor, weights_TK: Tensor) -> Tensor:
    """Return each token's weighted sum of its slots, in float32 and in their order, [T, M]."""
    num_tokens, top_k = weights_TK.shape
    width = y_SM.shape[1]
    out_TM = y_SM.new_empty(num_tokens, width)
    columns = min(_COMBINE_COLUMNS, power_of_two(width))
    _combine_kernel[(num_tokens, ceil_div(width, columns))](
        y_SM, weights_TK, out_TM, TOP_K=top_k, WIDTH=width, COLUMNS=columns, num_warps=4
    )
    return out_TM


def up_product(
    x_TM: Tensor, w_gate_up_E2IM: Tensor, runs: SlotRuns, *, top_k: int, rows: int, tiles: GemmTiles
) -> Tensor:
    """Return ``silu(gate) * up`` of each slot, in sorted order, [S, I]."""
    _, both, width = w_gate_up_E2IM.shape
    hidden_SI = x_TM.new_empty(len(runs.order_S), both // 2)
    _up_run_kernel[(len(runs.runs_N3) * ceil_div(both // 2, tiles.columns),)](
        x_TM, w_gate_up_E2IM, runs.order_S, runs.runs_N3, hidden_SI,
        TOP_K=top_k, WIDTH=width, INNER=both // 2,
        ROWS=rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, PRECISION=_precision(x_TM),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return hidden_SI


def down_product(
    hidden_SI: Tensor, w_down_EMI: Tensor, runs: SlotRuns, *, rows: int, tiles: GemmTiles
) -> Tensor:
    """Return the expert outputs of each slot, in the order of slots, [S, M]."""
    _, width, inner = w_down_EMI.shape
    y_SM = hidden_SI.new_empty(len(hidden_SI), width)
    _down_run_kernel[(len(runs.runs_N3) * ceil_div(width, tiles.columns),)](
        hidden_SI, w_down_EMI, runs.order_S, runs.runs_N3, y_SM, WIDTH=width, INNER=inner,
        ROWS=rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, PRECISION=_precision(hidden_SI),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return y_SM


def grouped_moe(
    x_TM: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w_gate_up_E2IM: Tensor,
    w_down_EMI: Tensor,
    *,
    tiles: GroupedTiles,
) -> Tensor:
    """See ``kernels.backend.Kernels.fused_moe``."""
    top_k, rows = ids_TK.shape[1], tiles.rows
    runs = sort_slots(ids_TK, len(w_down_EMI), rows=rows)
    hidden_SI = up_product(x_TM, w_gate_up_E2IM, runs, top_k=top_k, rows=rows, tiles=tiles.up)
    y_SM = down_product(hidden_SI, w_down_EMI, runs, rows=rows, tiles=tiles.down)
    return combine(y_SM, weights_TK)


class TritonExperts:
    """``Kernels.fused_moe`` in Triton, slot by slot or grouped as the table of tiles has it."""

    def __init__(self, table: TileTable) -> None:
        self._table = table

    def __call__(
        self,
        x_TM: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        w_gate_up_E2IM: Tensor,
        w_down_EMI: Tensor,
    ) -> Tensor:
        """See ``kernels.backend.Kernels.fused_moe``."""
        weights = (weights_TK, w_gate_up_E2IM, w_down_EMI)
        tiles = self._table.experts(len(ids_TK), ids_TK.shape[1], len(w_down_EMI), x_TM.itemsize)
        if isinstance(tiles, SlotwiseTiles):
            return slotwise_moe(x_TM, ids_TK, *weights, tiles=tiles)
        return grouped_moe(x_TM, ids_TK, *weights, tiles=tiles)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
