"""The gated activation of Llama-like MLPs; computed in float32, rounded once."""

import triton.language as tl
from torch import Tensor

from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import RowTiles, ceil_div

_BLOCK = 1024


@jit
def silu(x):
    """Return ``x * sigmoid(x)`` of a float32 tile."""
    return x / (1.0 + tl.exp(-x))


@jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, WIDTH, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = column < WIDTH
    gate_ptr = gate_up_ptr + row * 2 * WIDTH + column
    gate = tl.load(gate_ptr, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + WIDTH, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, silu(gate) * up, mask=is_real)


def silu_mul(gate_up: Tensor, *, tiles: RowTiles) -> Tensor:
    """See ``kernels.api.silu_mul``."""
    gate_up = gate_up.contiguous()
    *leading, both = gate_up.shape
    width = both // 2
    out = gate_up.new_empty(*leading, width)
    if out.numel():
        grid = (out.numel() // width, ceil_div(width, _BLOCK))
        _silu_mul_kernel[grid](gate_up, out, width, BLOCK=_BLOCK, num_warps=tiles.num_warps)
    return out
