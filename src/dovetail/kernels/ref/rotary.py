"""Rotary position embedding in plain torch (Su et al., arXiv 2104.09864).

Shape legend: T tokens, H query heads, K KV heads, D head dim, P positions.
"""

import torch
from torch import Tensor


def rotary(
    q_THD: Tensor, k_TKD: Tensor, cos_sin_P2D: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.rotary``."""
    heads, half = (q_THD.shape[1], k_TKD.shape[1]), q_THD.shape[2] // 2
    cos_T1D, sin_T1D = cos_sin_P2D[positions_T].chunk(2, dim=1)
    # q and k turn by the same angles, so they go as one tensor: fewer operations, same result.
    # The table holds -sin in its first half, so swapping the halves is all that is left to do.
    x = torch.cat((q_THD, k_TKD), dim=1)
    turned = (x * cos_T1D).addcmul_(x.roll(half, dims=-1), sin_T1D).to(x.dtype)
    q_THD, k_TKD = turned.split_with_sizes(heads, dim=1)
    return q_THD, k_TKD
