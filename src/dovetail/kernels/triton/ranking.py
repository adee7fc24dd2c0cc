"""What truncation knows of one logit: its place in the order, its depth, its mass.

``kernels.masses`` on the device, for kernels to call.
"""

from typing import Any

import triton.language as tl

from dovetail.kernels import masses
from dovetail.kernels.triton.jit import jit

_STEP_BITS = tl.constexpr(masses.STEP_BITS)
_STEPS_PER_NAT = tl.constexpr(masses.STEPS_PER_NAT)
_DEEPEST = tl.constexpr(masses.DEEPEST)
_STEPS_MASK = tl.constexpr((1 << masses.STEP_BITS) - 1)
_UPPER_BITS = tl.constexpr(32 - masses.STEP_BITS)
_MASS_SHIFT = tl.constexpr(masses.MASS_BITS - 30)
_C: Any = tuple(tl.constexpr(value) for value in masses.COEFFICIENTS)
_C0, _C1, _C2, _C3, _C4, _C5 = _C
_SIGN_LESS = tl.constexpr(2**31 - 1)


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
def ceil_product(share, total):
    """Return the product rounded up, int64; in float64, as ``kernels.ref.sampling`` has it."""
    product = share.to(tl.float64) * total.to(tl.float64)
    whole = product.to(tl.int64)
    return whole + (whole.to(tl.float64) < product).to(tl.int64)


@jit
def budget_of(top_p, total):
    """Return the mass that top-p asks for, int64; the likeliest token stays at least."""
    return tl.maximum(ceil_product(top_p, total), 1)


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
def key_of(x):
    """Return an int64 that orders as the float does; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _SIGN_LESS, bits).to(tl.int64)


@jit
def float_of(key):
    """Return the float of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ _SIGN_LESS, bits).to(tl.float32, bitcast=True)
