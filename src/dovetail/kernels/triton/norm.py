"""RMS norm, alone and with the residual sum before it; a row a program."""

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import RowTiles, power_of_two


@jit
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, eps, WIDTH, BLOCK: tl.constexpr
):  # fmt: skip
    """``residual_ptr`` None: no sum."""
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    is_real = column < WIDTH
    x = tl.load(x_ptr + row + column, mask=is_real, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row + column, mask=is_real, other=0.0)
        total = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row + column, total, mask=is_real)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + column, x * scale * weight, mask=is_real)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, tiles: RowTiles) -> Tensor:
    """See ``kernels.api.rms_norm``."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, None, eps, tiles)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, tiles: RowTiles
) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.add_rms_norm``."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps, tiles)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    tiles: RowTiles,
) -> None:
    width = x.shape[-1]
    if not x.numel():
        return
    _norm_kernel[(x.numel() // width,)](
        x, residual, weight, out, total, eps, width,
        BLOCK=power_of_two(width), num_warps=tiles.num_warps,
    )  # fmt: skip
