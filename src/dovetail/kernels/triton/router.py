"""Routing: softmax over the experts, the k largest, and the record of the choice.

Experts are compared by one integer each, the logit's bits in an order that integers share with
floats, above the id counted backwards: so a maximum over integers is exact, breaks ties by id, and
has a place for NaN.
"""

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels.backend import Capture
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import RowTiles, power_of_two

_LEAST = tl.constexpr(-(2**63))


@jit
def _flip(bits):
    """From the bits of a float32 to an int32 of the same order, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _route_kernel(
    logits_ptr, weights_ptr, ids_ptr, routes_ptr, slots_ptr, row_stride, slot_stride, layer_offset,
    EXPERTS, TOP_K: tl.constexpr, NORMALISES: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``routes_ptr`` None: nothing is recorded."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    is_real = expert < EXPERTS
    x = tl.load(logits_ptr + token * row_stride + expert, mask=is_real, other=float("-inf"))
    x = x.to(tl.float32)
    top = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - top), axis=0)

    x = tl.where(x == 0.0, 0.0, x)  # -0 is not less than 0
    order = _flip(x.to(tl.int32, bitcast=True))
    order = tl.where(x != x, -(2**31), order)
    key = (order.to(tl.int64) << 32) | (BLOCK_E - 1 - expert).to(tl.int64)
    key = tl.where(is_real, key, _LEAST)
    rank = tl.arange(0, BLOCK_K)
    chosen = tl.full((BLOCK_K,), _LEAST, tl.int64)
    for i in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        chosen = tl.where(rank == i, best, chosen)
        key = tl.where(key == best, _LEAST, key)

    is_chosen = rank < TOP_K
    ids = BLOCK_E - 1 - (chosen & 0xFFFFFFFF).to(tl.int32)
    logits = _flip((chosen >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    weights = tl.where(is_chosen, tl.exp(logits - top) / total, 0.0)
    if NORMALISES:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + token * TOP_K + rank, weights, mask=is_chosen)
    tl.store(ids_ptr + token * TOP_K + rank, ids, mask=is_chosen)
    if routes_ptr is not None:
        target = routes_ptr + tl.load(slots_ptr + token).to(tl.int64) * slot_stride + layer_offset
        tl.store(target + rank, ids.to(routes_ptr.dtype.element_ty), mask=is_chosen)


def route(
    logits_TE: Tensor,
    k: int,
    norm_topk_prob: bool,
    *,
    capture: Capture | None = None,
    tiles: RowTiles,
) -> tuple[Tensor, Tensor]:
    """See ``kernels.backend.Kernels.route``."""
    num_tokens, num_experts = logits_TE.shape
    assert k <= num_experts and logits_TE.stride(1) == 1
    weights_TK = logits_TE.new_empty(num_tokens, k, dtype=torch.float32)
    ids_TK = logits_TE.new_empty(num_tokens, k, dtype=torch.int32)
    if not num_tokens:
        return weights_TK, ids_TK
    routes, slots, slot_stride, layer_offset = None, None, 0, 0
    if capture is not None:
        routes, slots = capture.routes_CLK, capture.kv_slots_T
        assert routes.shape[2] == k and routes.stride(2) == 1
        assert num_experts - 1 <= torch.iinfo(routes.dtype).max
        slot_stride, layer_offset = routes.stride(0), capture.moe_layer * routes.stride(1)
    _route_kernel[(num_tokens,)](
        logits_TE, weights_TK, ids_TK, routes, slots, logits_TE.stride(0), slot_stride,
        layer_offset, num_experts, TOP_K=k, NORMALISES=norm_topk_prob,
        BLOCK_E=power_of_two(num_experts), BLOCK_K=power_of_two(k),
        num_warps=tiles.num_warps,
    )  # fmt: skip
    return weights_TK, ids_TK
