"""RMS norm in plain torch (Zhang and Sennrich, arXiv 1910.07467)."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``kernels.api.rms_norm``."""
    return F.rms_norm(x, weight.shape, weight, eps)


def qk_norm(
    qk_TGD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, *, num_heads: int, eps: float
) -> Tensor:
    """See ``kernels.api.qk_norm``."""
    out_TGD = F.rms_norm(qk_TGD, q_weight_D.shape, None, eps)
    out_TGD[:, :num_heads] *= q_weight_D
    out_TGD[:, num_heads:] *= k_weight_D
    return out_TGD


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.add_rms_norm``."""
    total = x + residual
    return rms_norm(total, weight, eps), total
