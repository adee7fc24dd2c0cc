"""Paged attention in plain torch: the CPU path and the oracle of other backends.

What each op means stands in ``kernels.api``.

Shape legend: T tokens, R rows, S cached tokens of a row, H query heads, K KV heads, D head dim,
C cache slots.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.kernels.scratch import Scratch


def write_kv(cache_CKD: Tensor, kv_slots_T: Tensor, x_TKD: Tensor) -> None:
    """See ``kernels.api.write_kv``."""
    cache_CKD.index_copy_(0, kv_slots_T, x_TKD)


def decode_attention(
    q_RHD: Tensor,
    k_cache_CKD: Tensor,
    v_cache_CKD: Tensor,
    *,
    kv_slots_RS: Tensor,
    bias_R11S: Tensor,
    scratch: Scratch,
) -> Tensor:
    """See ``kernels.api.decode_attention``."""
    num_rows, num_heads, head_dim = q_RHD.shape
    num_kv_heads = k_cache_CKD.shape[1]
    flat = kv_slots_RS.view(-1)
    shape = (len(flat), num_kv_heads, head_dim)
    k = scratch.take("k", shape, k_cache_CKD)
    v = scratch.take("v", shape, v_cache_CKD)
    torch.index_select(k_cache_CKD, 0, flat, out=k)
    torch.index_select(v_cache_CKD, 0, flat, out=v)
    k = k.view(num_rows, -1, num_kv_heads, head_dim)
    v = v.view(num_rows, -1, num_kv_heads, head_dim)
    # The query heads that share a KV head see the same keys, so they stand as query tokens.
    grouped = q_RHD.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias_R11S
    )
    return out.reshape(num_rows, num_heads, head_dim)


def prefill_attention(
    q_THD: Tensor, k_cache_CKD: Tensor, v_cache_CKD: Tensor, *, kv_slots_S: Tensor
) -> Tensor:
    """See ``kernels.api.prefill_attention``."""
    width, num_cached = len(q_THD), len(kv_slots_S)
    k = k_cache_CKD.index_select(0, kv_slots_S).transpose(0, 1)
    v = v_cache_CKD.index_select(0, kv_slots_S).transpose(0, 1)
    mask = torch.ones(width, num_cached, dtype=torch.bool).tril_(num_cached - width)
    out = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)
