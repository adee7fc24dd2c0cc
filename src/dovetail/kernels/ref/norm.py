"""RMS norm in plain torch (Zhang and Sennrich, arXiv 1910.07467)."""

from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``kernels.api.rms_norm``."""
    return _normed(x, eps).mul_(weight).to(x.dtype)


def qk_norm(
    qk_TGD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, *, num_heads: int, eps: float
) -> Tensor:
    """See ``kernels.api.qk_norm``."""
    out_TGD = _normed(qk_TGD, eps)
    out_TGD[:, :num_heads] *= q_weight_D
    out_TGD[:, num_heads:] *= k_weight_D
    return out_TGD.to(qk_TGD.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.add_rms_norm``."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def _normed(x: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps)``, float32. (On the CPU torch's own norm takes longer.)"""
    wide = x.float()
    return wide * (wide * wide).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
