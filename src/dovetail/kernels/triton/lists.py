"""Lists of logits that one program goes through: measured, narrowed, searched.

For kernels to call. A list is ``num`` float32 in memory that only this program writes. Measures are
integers, so the order of a list is free. Depth, mass and key: see ``kernels.triton.ranking``.
"""

import triton.language as tl

from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.ranking import depth_of, float_of, key_of, mass_of

_LARGEST = tl.constexpr(2**31 - 1)


@jit
def turn(ptr, first, num, divisor, BLOCK: tl.constexpr, IS_SCALED: tl.constexpr):
    """Return BLOCK logits of a list, and which there are."""
    place = first + tl.arange(0, BLOCK)
    is_there = place < num
    x = tl.load(ptr + place, mask=is_there, other=float("-inf")).to(tl.float32)
    if not IS_SCALED:
        x = tl.math.div_rn(x, divisor)
    return x, is_there


@jit
def measure(
    ptr, begin, end, divisor, top, nearest, width, BY_MASS: tl.constexpr, BLOCK: tl.constexpr,
    IS_SCALED: tl.constexpr,
):  # fmt: skip
    """Return the number, or the mass, of one, two and three ranges from a depth on, and of all.

    What lies above the first range counts with it. Of ``ptr``, places from ``begin`` to ``end``.
    """
    one, two = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    three, total = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    for first in range(begin, end, BLOCK):
        x, is_there = turn(ptr, first, end, divisor, BLOCK, IS_SCALED)
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
def range_width(nearest, farthest):
    """Return how wide each of four ranges of depth is."""
    return (farthest - nearest) // 4 + 1


@jit
def chosen_range(nearest, farthest, above, one, two, three, goal):
    """Return the range in which a goal is reached, and what lies above it."""
    width = range_width(nearest, farthest)
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
        x, is_there = turn(ptr, first, num, 1.0, BLOCK, True)
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
def keep_largest(ptr, num, logit, num_equal, BLOCK: tl.constexpr):
    """Keep of a list what is larger than a logit, and so many that are equal; return how many."""
    count, seen = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, num, BLOCK):
        x, is_there = turn(ptr, first, num, 1.0, BLOCK, True)
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
        x, is_there = turn(ptr, first, num, 1.0, BLOCK, True)
        count += (is_there & (key_of(x) >= key)).to(tl.int32)
    return tl.sum(count, axis=0)


@jit
def _key_range(ptr, num, BLOCK: tl.constexpr):
    """Return the least and the greatest key of a list."""
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, num, BLOCK):
        x, is_there = turn(ptr, first, num, 1.0, BLOCK, True)
        least = tl.minimum(least, tl.where(is_there, x, float("inf")))
        most = tl.maximum(most, x)
    return key_of(tl.min(least, axis=0)), key_of(tl.max(most, axis=0))


@jit
def nth_largest(ptr, num, nth, BLOCK: tl.constexpr):
    """Return the nth largest of a list, how many equal ones there are, and in the first n."""
    low, high = _key_range(ptr, num, BLOCK)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        if _count_from(ptr, num, middle, BLOCK) >= nth:
            low = middle
        else:
            high = middle - 1
    num_above = _count_from(ptr, num, low + 1, BLOCK)
    return float_of(low), _count_from(ptr, num, low, BLOCK) - num_above, nth - num_above


@jit
def narrowed(
    ptr, num, top, nearest, farthest, above, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """Keep of a list what has the depth at which a goal is reached; of a number, what is above too.

    Returns:
        How many there are, that depth, and what lies above the list.
    """
    while nearest < farthest:
        width = range_width(nearest, farthest)
        one, two, three, _ = measure(ptr, 0, num, 1.0, top, nearest, width, BY_MASS, BLOCK, True)
        nearest, farthest, above_it = chosen_range(nearest, farthest, above, one, two, three, goal)
        if BY_MASS:
            above = above_it
            num, nearest, farthest = _keep(ptr, num, top, nearest, farthest, BLOCK)
        else:
            num, _, farthest = _keep(ptr, num, top, 0, farthest, BLOCK)
    return num, nearest, above
