"""Truncation without a sort: what top-k, top-p and min-p leave of a row, as a border.

Tokens ordered by logit and then by id, each rule keeps a beginning; so the support is the tokens
before a border, and a border is a logit and an id. It is searched in ranges of depth: four are
measured, by number or by mass, and the logits of the one that has the border are gathered. For
whole rows several programs a row do that; with what they gathered one program goes on, until all
that is left has one depth. Counts and masses are integers (``kernels.masses``), so no order of
summation and no device gives another border, and the order in which logits are gathered is free.

Shape legend: N rows that sample, V vocabulary, S programs of a row.
"""

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels import masses
from dovetail.kernels.backend import Borders, ShapedLogits
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.lists import (
    chosen_range,
    keep_largest,
    measure,
    narrowed,
    nth_largest,
    range_width,
    turn,
)
from dovetail.kernels.triton.ranking import (
    budget_of,
    ceil_product,
    depth_of,
    float_of,
    key_of,
    mass_of,
    row_of,
)
from dovetail.kernels.triton.tiles import TruncateTiles, ceil_div, power_of_two

_DEEPEST_STEP = tl.constexpr(int(masses.DEEPEST))
_WHOLE_MASS = tl.constexpr(1 << masses.MASS_BITS)
_INFINITY = tl.constexpr(float("inf"))


@jit
def _nth_equal(ptr, num, divisor, logit, nth, BLOCK: tl.constexpr):
    """Return the nth token of a row that has a logit, by id."""
    seen, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + num
    for first in range(0, num, BLOCK):
        x, is_there = turn(ptr, first, num, divisor, BLOCK, False)
        is_equal = (is_there & (x == logit)).to(tl.int32)
        is_nth = (is_equal > 0) & (seen + tl.cumsum(is_equal, axis=0) == nth)
        token = first + tl.arange(0, BLOCK)
        found = tl.minimum(found, tl.min(tl.where(is_nth, token, num), axis=0))
        seen += tl.sum(is_equal, axis=0)
    return found


@jit
def _min_p_border(min_p, top):
    """Return the least logit that min-p keeps; by halves, for masses fall as logits do."""
    least_mass = ceil_product(min_p, tl.full((), _WHOLE_MASS, tl.int64))
    depth, deepest = tl.full((), 0, tl.int32), tl.full((), _DEEPEST_STEP, tl.int32)
    while depth < deepest:
        middle = depth + ((deepest - depth + 1) >> 1)
        if mass_of(middle) >= least_mass:
            depth = middle
        else:
            deepest = middle - 1
    low, high = key_of(tl.full((), float("-inf"), tl.float32)), key_of(top)
    while low < high:
        middle = low + ((high - low) >> 1)
        if depth_of(float_of(middle), top) <= depth:
            high = middle
        else:
            low = middle + 1
    return float_of(low)


@jit
def _is_cut(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab):
    """Return whether truncation cuts a row at all, and by what it has to be measured."""
    top_k = tl.load(top_k_ptr + row)
    by_number = (top_k > 0) & (top_k < vocab)
    by_mass = tl.load(top_p_ptr + row) < 1.0
    is_drawn = tl.load(temperature_ptr + row) != 0.0
    is_cut = is_drawn & (by_number | by_mass | (tl.load(min_p_ptr + row) > 0.0))
    return is_cut, is_drawn & by_number, is_drawn & by_mass


@jit
def _extremes_kernel(
    logits_ptr, changed_ptr, is_changed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    most_ptr, least_ptr, num_found_ptr, row_stride, VOCAB, PER_SPLIT, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest and the least logit of one run of the vocabulary; NaN as the largest."""
    row, split = tl.program_id(0), tl.program_id(1)
    is_cut, _, _ = _is_cut(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB)
    if is_cut == 0:
        return
    if split == 0:
        tl.store(num_found_ptr + row, 0)
    row_ptr = row_of(logits_ptr, changed_ptr, is_changed_ptr, row, row_stride)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, VOCAB)
    for first in range(begin, end, BLOCK):
        x, is_there = turn(row_ptr, first, end, 1.0, BLOCK, True)  # division keeps the order
        most = tl.maximum(most, x)
        least = tl.minimum(least, tl.where(is_there, x, float("inf")))
        spoilt = spoilt | (x != x).to(tl.int32)
    is_spoilt = tl.max(spoilt, axis=0) > 0
    cell = row * tl.num_programs(1) + split
    tl.store(most_ptr + cell, tl.where(is_spoilt, float("inf"), tl.max(most, axis=0)))
    tl.store(least_ptr + cell, tl.min(least, axis=0))


@jit
def _extremes(row, most_ptr, least_ptr, divisor, SPLITS, CELLS: tl.constexpr):
    """Return a row's largest logit, infinite if there is a NaN, and the depth of the least one."""
    split = tl.arange(0, CELLS)
    cell = row * SPLITS + split
    most = tl.load(most_ptr + cell, mask=split < SPLITS, other=float("-inf"))
    least = tl.load(least_ptr + cell, mask=split < SPLITS, other=float("inf"))
    top = tl.math.div_rn(tl.max(most, axis=0), divisor)
    return top, depth_of(tl.math.div_rn(tl.min(least, axis=0), divisor), top)


@jit
def _measure_kernel(
    logits_ptr, changed_ptr, is_changed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    most_ptr, least_ptr, parts_ptr, row_stride, VOCAB, PER_SPLIT, SPLITS, CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first ranges of one run of the vocabulary: by number if top-k cuts the row."""
    row, split = tl.program_id(0), tl.program_id(1)
    _, by_number, by_mass = _is_cut(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB)
    if (by_number | by_mass) == 0:
        return
    row_ptr = row_of(logits_ptr, changed_ptr, is_changed_ptr, row, row_stride)
    divisor = tl.load(temperature_ptr + row)
    top, deepest = _extremes(row, most_ptr, least_ptr, divisor, SPLITS, CELLS)
    width, begin = range_width(0, deepest), split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, VOCAB)
    part_ptr = parts_ptr + (row * SPLITS + split) * 4
    if by_number:
        one, two, three, total = measure(
            row_ptr, begin, end, divisor, top, 0, width, False, BLOCK, False
        )
    else:
        one, two, three, total = measure(
            row_ptr, begin, end, divisor, top, 0, width, True, BLOCK, False
        )
    tl.store(part_ptr, one)
    tl.store(part_ptr + 1, two)
    tl.store(part_ptr + 2, three)
    tl.store(part_ptr + 3, total)


@jit
def _first_range(row, parts_ptr, deepest, top_k, top_p, by_number, SPLITS, CELLS: tl.constexpr):
    """Return the range of a whole row in which its goal is reached, what lies above, the goal."""
    split = tl.arange(0, CELLS)
    part_ptr, is_real = parts_ptr + (row * SPLITS + split) * 4, split < SPLITS
    one = tl.sum(tl.load(part_ptr, mask=is_real, other=0), axis=0)
    two = tl.sum(tl.load(part_ptr + 1, mask=is_real, other=0), axis=0)
    three = tl.sum(tl.load(part_ptr + 2, mask=is_real, other=0), axis=0)
    total = tl.sum(tl.load(part_ptr + 3, mask=is_real, other=0), axis=0)
    goal = tl.where(by_number, top_k.to(tl.int64), budget_of(top_p, total))
    nothing = tl.full((), 0, tl.int64)
    nearest, farthest, above = chosen_range(
        tl.full((), 0, tl.int32), deepest, nothing, one, two, three, goal
    )
    return nearest, farthest, above, goal


@jit
def _gather_kernel(
    logits_ptr, changed_ptr, is_changed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    most_ptr, least_ptr, parts_ptr, num_found_ptr, found_ptr, row_stride, VOCAB, PER_SPLIT, SPLITS,
    CELLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The logits of that range in one run of the vocabulary; if numbers count, those above too."""
    row, split = tl.program_id(0), tl.program_id(1)
    _, by_number, by_mass = _is_cut(row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB)
    if (by_number | by_mass) == 0:
        return
    row_ptr = row_of(logits_ptr, changed_ptr, is_changed_ptr, row, row_stride)
    found_ptr += row.to(tl.int64) * row_stride
    divisor = tl.load(temperature_ptr + row)
    top, deepest = _extremes(row, most_ptr, least_ptr, divisor, SPLITS, CELLS)
    nearest, farthest, _, _ = _first_range(
        row, parts_ptr, deepest, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), by_number,
        SPLITS, CELLS,
    )  # fmt: skip
    nearest = tl.where(by_number, 0, nearest)
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, VOCAB)
    for first in range(begin, end, BLOCK):
        x, is_there = turn(row_ptr, first, end, divisor, BLOCK, False)
        depth = depth_of(x, top)
        is_found = (is_there & (depth >= nearest) & (depth <= farthest)).to(tl.int32)
        count = tl.sum(is_found, axis=0)
        if count > 0:
            place = tl.atomic_add(num_found_ptr + row, count) + tl.cumsum(is_found, axis=0) - 1
            tl.store(found_ptr + place, x, mask=is_found > 0)


@jit
def _border_kernel(
    logits_ptr, changed_ptr, is_changed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    most_ptr, least_ptr, parts_ptr, num_found_ptr, found_ptr, border_ptr, last_ptr, row_stride,
    VOCAB, SPLITS, CELLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The border of one row, from what was gathered of it."""
    row = tl.program_id(0)
    tl.store(border_ptr + row, float("-inf"))
    tl.store(last_ptr + row, VOCAB)
    is_cut, by_number, by_mass = _is_cut(
        row, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, VOCAB
    )
    if is_cut == 0:
        return
    divisor = tl.load(temperature_ptr + row)
    top, deepest = _extremes(row, most_ptr, least_ptr, divisor, SPLITS, CELLS)
    if tl.abs(top) == _INFINITY:
        return  # such a row has failed, whatever is left of it
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    row_ptr = row_of(logits_ptr, changed_ptr, is_changed_ptr, row, row_stride)
    found_ptr += row.to(tl.int64) * row_stride
    least, last = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32) + VOCAB
    if by_number | by_mass:
        num = tl.load(num_found_ptr + row)
        nearest, farthest, above, goal = _first_range(
            row, parts_ptr, deepest, top_k, top_p, by_number, SPLITS, CELLS
        )
        if by_number:
            num, nearest, _ = narrowed(
                found_ptr, num, top, nearest, farthest, tl.full((), 0, tl.int64), goal, False, BLOCK
            )
            least, num_equal, num_kept = nth_largest(found_ptr, num, top_k, BLOCK)
            if by_mass:
                num = keep_largest(found_ptr, num, least, num_kept, BLOCK)
                nearest, farthest = tl.full((), 0, tl.int32), depth_of(least, top)
                _, _, _, total = measure(found_ptr, 0, num, 1.0, top, 0, 0, True, BLOCK, True)
                above, goal = tl.full((), 0, tl.int64), budget_of(top_p, total)
        else:
            num_equal, num_kept = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        if by_mass:
            num, nearest, above = narrowed(
                found_ptr, num, top, nearest, farthest, above, goal, True, BLOCK
            )
            each = tl.maximum(mass_of(nearest), 1)
            wanted = tl.minimum((goal - above + each - 1) // each, num.to(tl.int64)).to(tl.int32)
            logit, num_equal_here, num_kept_here = nth_largest(found_ptr, num, wanted, BLOCK)
            # At the border of top-k, tokens that are equal there have been left out already.
            is_moved = (logit > least) | (by_number == 0)
            num_equal = tl.where(is_moved, num_equal_here, num_equal)
            least, num_kept = logit, num_kept_here
        if num_kept < num_equal:
            last = _nth_equal(row_ptr, VOCAB, divisor, least, num_kept, BLOCK)
    if tl.load(min_p_ptr + row) > 0.0:
        other = _min_p_border(tl.load(min_p_ptr + row), top)
        last = tl.where(other > least, VOCAB, last)
        least = tl.maximum(least, other)
    tl.store(border_ptr + row, least)
    tl.store(last_ptr + row, last)


def truncate(
    logits: ShapedLogits,
    *,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    work_NV: Tensor,
    out: Borders,
    tiles: TruncateTiles,
) -> Borders:
    """See ``kernels.backend.Kernels.truncate``."""
    num_rows, vocab_size = logits.raw_NV.shape
    stride = logits.raw_NV.stride(0)
    assert stride == logits.changed_NV.stride(0) == work_NV.stride(0) == vocab_size
    row = tiles.row
    per_split = ceil_div(ceil_div(vocab_size, row.num_splits), row.tokens) * row.tokens
    num_splits = ceil_div(vocab_size, per_split)
    new = logits.raw_NV.new_empty
    most_NS, least_NS = (new(num_rows, num_splits, dtype=torch.float32) for _ in range(2))
    parts_NS4 = new(num_rows, num_splits, 4, dtype=torch.int64)
    num_found_N = new(num_rows, dtype=torch.int32)
    given = (*logits, temperature_N, top_k_N, top_p_N, min_p_N, most_NS, least_NS)
    found_NV, cells = work_NV.view(torch.float32), power_of_two(num_splits)
    grid, wide = (num_rows, num_splits), {"BLOCK": row.tokens, "num_warps": row.num_warps}
    _extremes_kernel[grid](*given, num_found_N, stride, vocab_size, per_split, **wide)
    _measure_kernel[grid](
        *given, parts_NS4, stride, vocab_size, per_split, num_splits, CELLS=cells, **wide
    )
    _gather_kernel[grid](
        *given, parts_NS4, num_found_N, found_NV, stride, vocab_size, per_split, num_splits,
        CELLS=cells, **wide,
    )  # fmt: skip
    _border_kernel[(num_rows,)](
        *given, parts_NS4, num_found_N, found_NV, *out, stride, vocab_size, num_splits,
        CELLS=cells, BLOCK=tiles.tokens, num_warps=tiles.num_warps,
    )  # fmt: skip
    return out
