"""Norms and rotation of q and k, and the write of k and v into the cache, in one kernel.

Shape legend: as in ``kernels.backend``; G heads of one program.
"""

import triton.language as tl
from torch import Tensor

from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import RotateTiles, ceil_div


@jit
def _weight(q_weight_ptr, k_weight_ptr, dim, is_query):
    q_weight = tl.load(q_weight_ptr + dim).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dim).to(tl.float32)
    return tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])


@jit
def _rotate_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, cos_sin_ptr, positions_ptr, slots_ptr,
    q_ptr, k_cache_ptr, v_cache_ptr, qkv_stride, k_stride, v_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A token and BLOCK_G of its heads. ``q_weight_ptr`` None: no norms."""
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    dim = tl.arange(0, HALF)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    is_real = (head < HEADS + 2 * KV_HEADS)[:, None]
    offsets = head[:, None] * DIM + dim[None, :]

    source = qkv_ptr + token * qkv_stride + offsets
    low = tl.load(source, mask=is_real, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=is_real, other=0.0).to(tl.float32)
    x, y = low, high
    if q_weight_ptr is not None:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        x = x * scale * _weight(q_weight_ptr, k_weight_ptr, dim, is_query)
        y = y * scale * _weight(q_weight_ptr, k_weight_ptr, dim + HALF, is_query)

    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * 2 * DIM
    cos, sin = tl.load(angles + dim)[None, :], tl.load(angles + DIM + HALF + dim)[None, :]
    turned_low = (x * cos - y * sin).to(q_ptr.dtype.element_ty)
    turned_high = (y * cos + x * sin).to(q_ptr.dtype.element_ty)

    target = q_ptr + token * HEADS * DIM + offsets
    tl.store(target, turned_low, mask=is_query[:, None])
    tl.store(target + HALF, turned_high, mask=is_query[:, None])
    slot = tl.load(slots_ptr + token).to(tl.int64)
    is_key = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    target = k_cache_ptr + slot * k_stride + offsets - HEADS * DIM
    tl.store(target, turned_low, mask=is_key)
    tl.store(target + HALF, turned_high, mask=is_key)
    is_value = is_value[:, None] & is_real
    target = v_cache_ptr + slot * v_stride + offsets - (HEADS + KV_HEADS) * DIM
    tl.store(target, low, mask=is_value)
    tl.store(target + HALF, high, mask=is_value)


def rotate_and_store(
    qkv_TF: Tensor,
    *,
    qk_norm: tuple[Tensor, Tensor, float] | None,
    cos_sin_P2D: Tensor,
    positions_T: Tensor,
    kv_slots_T: Tensor,
    k_cache_CKD: Tensor,
    v_cache_CKD: Tensor,
    tiles: RotateTiles,
) -> Tensor:
    """See ``kernels.backend.Kernels.rotate_and_store``; D must be a power of two."""
    num_tokens, width = qkv_TF.shape
    num_kv_heads, dim = k_cache_CKD.shape[1:]
    num_heads = width // dim - 2 * num_kv_heads
    assert dim & (dim - 1) == 0 and qkv_TF.stride(1) == 1
    assert k_cache_CKD.stride()[1:] == v_cache_CKD.stride()[1:] == (dim, 1)
    q_weight_D, k_weight_D, eps = qk_norm or (None, None, 0.0)
    q_THD = qkv_TF.new_empty(num_tokens, num_heads, dim)
    if not num_tokens:
        return q_THD
    grid = (num_tokens, ceil_div(num_heads + 2 * num_kv_heads, tiles.heads))
    _rotate_kernel[grid](
        qkv_TF, q_weight_D, k_weight_D, cos_sin_P2D, positions_T, kv_slots_T,
        q_THD, k_cache_CKD, v_cache_CKD,
        qkv_TF.stride(0), k_cache_CKD.stride(0), v_cache_CKD.stride(0), eps,
        HEADS=num_heads, KV_HEADS=num_kv_heads, DIM=dim, BLOCK_G=tiles.heads,
        num_warps=tiles.num_warps,
    )  # fmt: skip
    return q_THD
