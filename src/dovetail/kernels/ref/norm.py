"""RMS norm in plain torch (Zhang and Sennrich, arXiv 1910.07467)."""

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``kernels.api.rms_norm``."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.add_rms_norm``."""
    total = x + residual
    return rms_norm(total, weight, eps), total
