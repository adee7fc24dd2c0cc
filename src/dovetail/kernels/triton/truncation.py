"""Truncation without a sort: what top-k, top-p and min-p leave of a row, as a border.

Tokens ordered by logit and then by id, each rule keeps a beginning; so the support is the tokens
before a border, and a border is a logit and an id. It is searched in ranges of depth: four are
measured, by number or by mass, and the logits of the one that has the border are gathered. For
whole rows several programs a row do that; with what they gathered one program goes on, until all
that is left has one depth. Counts and masses are integers (``kernels.masses``), so no order of
summation and no device gives another border, and the order in which logits are gathered is free.

Shape legend: N rows that sample, V vocabulary, S programs of a row.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels import masses
from dovetail.kernels.backend import Borders, ShapedLogits
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import TruncateTiles, ceil_div, power_of_two

_STEP_BITS = tl.constexpr(masses.STEP_BITS)
_STEPS_PER_NAT = tl.constexpr(masses.STEPS_PER_NAT)
_DEEPEST = tl.constexpr(masses.DEEPEST)
_DEEPEST_STEP = tl.constexpr(int(masses.DEEPEST))
_STEPS_MASK = tl.constexpr((1 << masses.STEP_BITS) - 1)
_UPPER_BITS = tl.constexpr(32 - masses.STEP_BITS)
_MASS_SHIFT = tl.constexpr(masses.MASS_BITS - 30)
_WHOLE_MASS = tl.constexpr(1 << masses.MASS_BITS)
_C: Any = tuple(tl.constexpr(value) for value in masses.COEFFICIENTS)
_C0, _C1, _C2, _C3, _C4, _C5 = _C
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(2**31 - 1)


@jit
def depth_of(x, top):
    """See ``kernels.masses``."""
    steps = (top - x) * _STEPS_PER_NAT
    return tl.where(steps < _DEEPEST, steps, _DEEPEST).to(tl.int32)


@jit
def mass_of(depth):
    """See ``kernels.masses``; int64."""
    # The upper half of a product with part * 2^(32 - STEP_BITS) is the product >> STEP_BITS.
    part = (depth & _STEPS_MASK).to(tl.uint32) << _UPPER_BITS
    mass = part * 0 + _C5
    mass = _C4 - tl.umulhi(part, mass)
    mass = _C3 - tl.umulhi(part, mass)
    mass = _C2 - tl.umulhi(part, mass)
    mass = _C1 - tl.umulhi(part, mass)
    mass = _C0 - tl.umulhi(part, mass)
    octaves = tl.minimum(depth >> _STEP_BITS, 63).to(tl.int64)
    return (mass.to(tl.int64) << _MASS_SHIFT) >> octaves


@jit
def is_outside(x, token, least, last):
    """Return whether a token lies behind a border; never true of NaN."""
    return (x < least) | ((x == least) & (token > last))


@jit
def row_of(logits_ptr, changed_ptr, is_changed_ptr, row, stride):
    """Return where the logits begin that a row is drawn from."""
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    if tl.load(is_changed_ptr + row) != 0:
        row_ptr = changed_ptr + row.to(tl.int64) * stride
    return row_ptr


@jit
def _key(x):
    """Return an int64 that orders as the float does; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _LARGEST, bits).to(tl.int64)


@jit
def _float_of(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ _LARGEST, bits).to(tl.float32, bitcast=True)


@jit
def _turn(ptr, first, num, divisor, BLOCK: tl.constexpr, IS_SCALED: tl.constexpr):
    """Return BLOCK logits of a list, and which there are."""
    place = first + tl.arange(0, BLOCK)
    is_there = place < num
    x = tl.load(ptr + place, mask=is_there, other=float("-inf")).to(tl.float32)
    if not IS_SCALED:
        x = tl.math.div_rn(x, divisor)
    return x, is_there


@jit
def _measure(
    ptr, begin, end, divisor, top, nearest, width, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
    IS_SCALED: tl.constexpr,
):  # fmt: skip
    """Return the number, or the mass, of one, two and three ranges from a depth on, and of all.

    What lies above the first range counts with it. Of ``ptr``, places from ``begin`` to ``end``.
    """
    one, two = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    three, total = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for first in range(begin, end, BLOCK):
        x, is_there = _turn(ptr, first, end, divisor, BLOCK, IS_SCALED)
        depth = depth_of(x, top)
        amount = is_there.to(tl.int64)
        if BY_MASS:
            amount = tl.where(is_there, mass_of(depth), 0)
        one += tl.where(depth < nearest + width, amount, 0)
        two += tl.where(depth < nearest + 2 * width, amount, 0)
        three += tl.where(depth < nearest + 3 * width, amount, 0)
        total += amount
    return tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0), tl.sum(total, axis=0)


@jit
def _range_width(nearest, farthest):
    """Return how wide each of four ranges of depth is."""
    return (farthest - nearest) // 4 + 1


@jit
def _chosen(nearest, farthest, above, one, two, three, goal):
    """Return the range in which a goal is reached, and what lies above it."""
    width = _range_width(nearest, farthest)
    index = (above + one < goal).to(tl.int32) + (above + two < goal).to(tl.int32)
    index += (above + three < goal).to(tl.int32)
    above += tl.where(index > 2, three, tl.where(index > 1, two, tl.where(index > 0, one, 0)))
    nearest += index * width
    return nearest, tl.minimum(farthest, nearest + width - 1), above


@jit
def _keep(ptr, num, top, nearest, farthest, BLOCK: tl.constexpr):
    """Keep of a list what lies in a range; return how many, the first and the last depth of them.

    In its place: what a turn stores lies in what has been loaded.
    """
    count = tl.full((), 0, tl.int32)
    first_depth = tl.full((BLOCK,), _LARGEST, tl.int32)
    last_depth = tl.full((BLOCK,), -1, tl.int32)
    for first in range(0, num, BLOCK):
        x, is_there = _turn(ptr, first, num, 1.0, BLOCK, True)
        depth = depth_of(x, top)
        is_kept = is_there & (depth >= nearest) & (depth <= farthest)
        place = count + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
        tl.store(ptr + place, x, mask=is_kept)
        count += tl.sum(is_kept.to(tl.int32), axis=0)
        first_depth = tl.minimum(first_depth, tl.where(is_kept, depth, _LARGEST))
        last_depth = tl.maximum(last_depth, tl.where(is_kept, depth, -1))
    tl.debug_barrier()  # other threads of the program load what this one stored
    return count, tl.min(first_depth, axis=0), tl.max(last_depth, axis=0)


@jit
def _keep_largest(ptr, num, logit, num_equal, BLOCK: tl.constexpr):
    """Keep of a list what is larger than a logit, and so many that are equal; return how many."""
    count, seen = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, num, BLOCK):
        x, is_there = _turn(ptr, first, num, 1.0, BLOCK, True)
        is_equal = (is_there & (x == logit)).to(tl.int32)
        is_among = (is_equal > 0) & (seen + tl.cumsum(is_equal, axis=0) <= num_equal)
        is_kept = (is_there & (x > logit)) | is_among
        place = count + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
        tl.store(ptr + place, x, mask=is_kept)
        count += tl.sum(is_kept.to(tl.int32), axis=0)
        seen += tl.sum(is_equal, axis=0)
    tl.debug_barrier()
    return count


@jit
def _count_from(ptr, num, key, BLOCK: tl.constexpr):
    """Return how many of a list have this key or a greater one."""
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num, BLOCK):
        x, is_there = _turn(ptr, first, num, 1.0, BLOCK, True)
        count += (is_there & (_key(x) >= key)).to(tl.int32)
    return tl.sum(count, axis=0)


@jit
def _key_range(ptr, num, BLOCK: tl.constexpr):
    """Return the least and the greatest key of a list."""
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, num, BLOCK):
        x, is_there = _turn(ptr, first, num, 1.0, BLOCK, True)
        least = tl.minimum(least, tl.where(is_there, x, float("inf")))
        most = tl.maximum(most, x)
    return _key(tl.min(least, axis=0)), _key(tl.max(most, axis=0))


@jit
def _nth_largest(ptr, num, nth, BLOCK: tl.constexpr):
    """Return the nth largest of a list, how many equal ones there are, and in the first n."""
    low, high = _key_range(ptr, num, BLOCK)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        if _count_from(ptr, num, middle, BLOCK) >= nth:
            low = middle
        else:
            high = middle - 1
    num_above = _count_from(ptr, num, low + 1, BLOCK)
    return _float_of(low), _count_from(ptr, num, low, BLOCK) - num_above, nth - num_above


@jit
def _nth_equal(ptr, num, divisor, logit, nth, BLOCK: tl.constexpr):
    """Return the nth token of a row that has a logit, by id."""
    seen, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + num
    for first in range(0, num, BLOCK):
        x, is_there = _turn(ptr, first, num, divisor, BLOCK, False)
        is_equal = (is_there & (x == logit)).to(tl.int32)
        is_nth = (is_equal > 0) & (seen + tl.cumsum(is_equal, axis=0) == nth)
        token = first + tl.arange(0, BLOCK)
        found = tl.minimum(found, tl.min(tl.where(is_nth, token, num), axis=0))
        seen += tl.sum(is_equal, axis=0)
    return found


@jit
def _ceil_product(share, total):
    """Return the product rounded up, int64; in float64, as ``kernels.ref.sampling`` has it."""
    product = share.to(tl.float64) * total.to(tl.float64)
    whole = product.to(tl.int64)
    return whole + (whole.to(tl.float64) < product).to(tl.int64)


@jit
def _narrowed(
    ptr, num, top, nearest, farthest, above, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Keep of a list what has the depth at which a goal is reached; of a number, what is above too.

    Returns:
        How many there are, that depth, and what lies above the list.
    """
    while nearest < farthest:
        width = _range_width(nearest, farthest)
        one, two, three, _ = _measure(ptr, 0, num, 1.0, top, nearest, width, BY_MASS, BLOCK, True)
        nearest, farthest, above_it = _chosen(nearest, farthest, above, one, two, three, goal)
        if BY_MASS:
            above = above_it
            num, nearest, farthest = _keep(ptr, num, top, nearest, farthest, BLOCK)
        else:
            num, _, farthest = _keep(ptr, num, top, 0, farthest, BLOCK)
    return num, nearest, above


@jit
def _min_p_border(min_p, top):
    """Return the least logit that min-p keeps; by halves, for masses fall as logits do."""
    least_mass = _ceil_product(min_p, tl.full((), _WHOLE_MASS, tl.int64))
    depth, deepest = tl.full((), 0, tl.int32), tl.full((), _DEEPEST_STEP, tl.int32)
    while depth < deepest:
        middle = depth + ((deepest - depth + 1) >> 1)
        if mass_of(middle) >= least_mass:
            depth = middle
        else:
            deepest = middle - 1
    low, high = _key(tl.full((), float("-inf"), tl.float32)), _key(top)
    while low < high:
        middle = low + ((high - low) >> 1)
        if depth_of(_float_of(middle), top) <= depth:
            high = middle
        else:
            low = middle + 1
    return _float_of(low)


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
        x, is_there = _turn(row_ptr, first, end, 1.0, BLOCK, True)  # division keeps the order
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
    width, begin = _range_width(0, deepest), split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, VOCAB)
    part_ptr = parts_ptr + (row * SPLITS + split) * 4
    if by_number:
        one, two, three, total = _measure(
            row_ptr, begin, end, divisor, top, 0, width, False, BLOCK, False
        )
    else:
        one, two, three, total = _measure(
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
    goal = tl.where(by_number, top_k.to(tl.int64), _ceil_product(top_p, total))
    nothing = tl.full((), 0, tl.int64)
    nearest, farthest, above = _chosen(
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
        x, is_there = _turn(row_ptr, first, end, divisor, BLOCK, False)
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
            num, nearest, _ = _narrowed(
                found_ptr, num, top, nearest, farthest, tl.full((), 0, tl.int64), goal, False, BLOCK
            )
            least, num_equal, num_kept = _nth_largest(found_ptr, num, top_k, BLOCK)
            if by_mass:
                num = _keep_largest(found_ptr, num, least, num_kept, BLOCK)
                nearest, farthest = tl.full((), 0, tl.int32), depth_of(least, top)
                _, _, _, total = _measure(found_ptr, 0, num, 1.0, top, 0, 0, True, BLOCK, True)
                above, goal = tl.full((), 0, tl.int64), _ceil_product(top_p, total)
        else:
            num_equal, num_kept = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        if by_mass:
            num, nearest, above = _narrowed(
                found_ptr, num, top, nearest, farthest, above, goal, True, BLOCK
            )
            each = tl.maximum(mass_of(nearest), 1)
            wanted = tl.minimum((goal - above + each - 1) // each, num.to(tl.int64)).to(tl.int32)
            logit, num_equal_here, num_kept_here = _nth_largest(found_ptr, num, wanted, BLOCK)
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
