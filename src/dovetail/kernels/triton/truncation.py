"""Truncation without a sort: what top-k, top-p and min-p leave of a row, as a border.

Tokens ordered by logit and then by id, each rule keeps a beginning; so the support is the tokens
before a border, and a border is a logit and an id. One program searches it in one row. It measures
four ranges of depth at a time, by number or by mass, keeps the tokens of the one that has the
border, and goes on with those until all have one depth. Counts and masses are integers
(``kernels.masses``): no order of summation and no device gives another border.

Shape legend: N rows that sample, V vocabulary.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels import masses
from dovetail.kernels.backend import Borders, ShapedLogits
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import TruncateTiles

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
def _turn(ptr, first, num, divisor, BLOCK: tl.constexpr):
    """Return BLOCK logits, their places, and which there are."""
    place = first + tl.arange(0, BLOCK)
    is_there = place < num
    x = tl.load(ptr + place, mask=is_there, other=float("-inf")).to(tl.float32)
    return tl.math.div_rn(x, divisor), place, is_there


@jit
def _extremes(ptr, num, divisor, BLOCK: tl.constexpr):
    """Return the largest and the least logit, and whether there is a NaN."""
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num, BLOCK):
        x, _, is_there = _turn(ptr, first, num, divisor, BLOCK)
        most = tl.maximum(most, x)
        least = tl.minimum(least, tl.where(is_there, x, float("inf")))
        spoilt = spoilt | (x != x).to(tl.int32)
    return tl.max(most, axis=0), tl.min(least, axis=0), tl.max(spoilt, axis=0) > 0


@jit
def _measure(
    ptr, num, divisor, top, least, last, begin, width, by_mass, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the number, or the mass, of one, two and three ranges from a depth on, and of all."""
    one, two = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    three, total = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for first in range(0, num, BLOCK):
        x, token, is_there = _turn(ptr, first, num, divisor, BLOCK)
        depth = depth_of(x, top)
        amount = tl.full((BLOCK,), 1, tl.int64)
        if by_mass:
            amount = mass_of(depth)
        amount = tl.where(is_there & (is_outside(x, token, least, last) == 0), amount, 0)
        one += tl.where(depth < begin + width, amount, 0)
        two += tl.where(depth < begin + 2 * width, amount, 0)
        three += tl.where(depth < begin + 3 * width, amount, 0)
        total += amount
    return tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0), tl.sum(total, axis=0)


@jit
def _chosen(begin, end, width, above, one, two, three, goal):
    """Return the range in which a goal is reached, and what lies above it."""
    index = (above + one < goal).to(tl.int32) + (above + two < goal).to(tl.int32)
    index += (above + three < goal).to(tl.int32)
    above += tl.where(index > 2, three, tl.where(index > 1, two, tl.where(index > 0, one, 0)))
    begin += index * width
    return begin, tl.minimum(end, begin + width - 1), above


@jit
def _gather(
    ptr, num, divisor, top, least, last, begin, end, found_ptr, BLOCK: tl.constexpr
):  # fmt: skip
    """Store the logits of a range of depths; return how many, the first and the last depth.

    ``found_ptr`` may be ``ptr``: what a turn stores lies in what has been loaded.
    """
    count = tl.full((), 0, tl.int32)
    nearest, farthest = tl.full((BLOCK,), _LARGEST, tl.int32), tl.full((BLOCK,), -1, tl.int32)
    for first in range(0, num, BLOCK):
        x, token, is_there = _turn(ptr, first, num, divisor, BLOCK)
        depth = depth_of(x, top)
        is_found = is_there & (is_outside(x, token, least, last) == 0)
        is_found = is_found & (depth >= begin) & (depth <= end)
        place = count + tl.cumsum(is_found.to(tl.int32), axis=0) - 1
        tl.store(found_ptr + place, x, mask=is_found)
        count += tl.sum(is_found.to(tl.int32), axis=0)
        nearest = tl.minimum(nearest, tl.where(is_found, depth, _LARGEST))
        farthest = tl.maximum(farthest, tl.where(is_found, depth, -1))
    return count, tl.min(nearest, axis=0), tl.max(farthest, axis=0)


@jit
def _count_from(ptr, num, key, BLOCK: tl.constexpr):
    """Return how many of some logits have this key or a greater one."""
    count = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num, BLOCK):
        x, _, is_there = _turn(ptr, first, num, 1.0, BLOCK)
        count += (is_there & (_key(x) >= key)).to(tl.int32)
    return tl.sum(count, axis=0)


@jit
def _nth_largest(ptr, num, nth, BLOCK: tl.constexpr):
    """Return the nth largest of some logits, how many equal ones there are, and in the first n."""
    most, least, _ = _extremes(ptr, num, 1.0, BLOCK)
    low, high = _key(least), _key(most)
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
    """Return the nth token that has a logit, by id; ``num`` if there are fewer."""
    seen, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + num
    for first in range(0, num, BLOCK):
        x, token, is_there = _turn(ptr, first, num, divisor, BLOCK)
        is_equal = (is_there & (x == logit)).to(tl.int32)
        is_nth = (is_equal > 0) & (seen + tl.cumsum(is_equal, axis=0) == nth)
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
def _border(
    row_ptr, found_ptr, vocab, divisor, top, least, last, bottom, top_k, top_p, by_mass,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the border of a rule within an earlier border: ``top_k`` tokens, or ``top_p`` mass."""
    begin, end = tl.full((), 0, tl.int32), depth_of(bottom, top)
    width = (end - begin) // 4 + 1
    one, two, three, total = _measure(
        row_ptr, vocab, divisor, top, least, last, begin, width, by_mass, BLOCK
    )
    goal = top_k.to(tl.int64)
    if by_mass:
        goal = _ceil_product(top_p, total)
    above = tl.full((), 0, tl.int64)
    begin, end, above = _chosen(begin, end, width, above, one, two, three, goal)
    num, begin, end = _gather(
        row_ptr, vocab, divisor, top, least, last, begin, end, found_ptr, BLOCK
    )
    while begin < end:
        tl.debug_barrier()  # other threads of the program stored what this one loads
        width = (end - begin) // 4 + 1
        one, two, three, total = _measure(
            found_ptr, num, 1.0, top, bottom, vocab, begin, width, by_mass, BLOCK
        )
        begin, end, above = _chosen(begin, end, width, above, one, two, three, goal)
        num, begin, end = _gather(
            found_ptr, num, 1.0, top, bottom, vocab, begin, end, found_ptr, BLOCK
        )
    tl.debug_barrier()
    each = tl.full((), 1, tl.int64)
    if by_mass:
        each = tl.maximum(mass_of(begin), 1)
    wanted = tl.minimum((goal - above + each - 1) // each, num.to(tl.int64)).to(tl.int32)
    logit, num_equal, num_kept = _nth_largest(found_ptr, num, wanted, BLOCK)
    token = tl.where(logit > least, vocab, last)
    if num_kept < num_equal:
        token = _nth_equal(row_ptr, vocab, divisor, logit, num_kept, BLOCK)
    return logit, token


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
def _truncate_kernel(
    logits_ptr, changed_ptr, is_changed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    found_ptr, least_ptr, last_ptr, row_stride, VOCAB, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. ``found_ptr`` has room for a row of logits each."""
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    least, last = tl.full((), float("-inf"), tl.float32), tl.full((), 0, tl.int32) + VOCAB
    tl.store(least_ptr + row, least)
    tl.store(last_ptr + row, last)
    cuts_number = (top_k > 0) & (top_k < VOCAB)
    if (temperature == 0.0) | ((cuts_number | (top_p < 1.0) | (min_p > 0.0)) == 0):
        return
    row_ptr = row_of(logits_ptr, changed_ptr, is_changed_ptr, row, row_stride)
    found_ptr += row.to(tl.int64) * row_stride
    top, bottom, is_spoilt = _extremes(row_ptr, VOCAB, temperature, BLOCK)
    if is_spoilt | (tl.abs(top) == _INFINITY):
        return  # such a row has failed, whatever is left of it
    for by_mass in range(2):
        if tl.where(by_mass > 0, top_p < 1.0, cuts_number):
            least, last = _border(
                row_ptr, found_ptr, VOCAB, temperature, top, least, last, bottom, top_k, top_p,
                by_mass > 0, BLOCK,
            )  # fmt: skip
            bottom = least
            tl.debug_barrier()
    if min_p > 0.0:
        other = _min_p_border(min_p, top)
        last = tl.where(other > least, VOCAB, last)
        least = tl.maximum(least, other)
    tl.store(least_ptr + row, least)
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
    _truncate_kernel[(num_rows,)](
        logits.raw_NV, logits.changed_NV, logits.is_changed_N, temperature_N, top_k_N, top_p_N,
        min_p_N, work_NV.view(torch.float32), *out, stride, vocab_size,
        BLOCK=tiles.tokens, num_warps=tiles.num_warps,
    )  # fmt: skip
    return out
