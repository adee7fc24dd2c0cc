"""The operations of layers on a CPU; as a module, a ``kernels.backend.LayerKernels``.

Each takes the numpy form for a single token in float32, and the reference otherwise.
"""

import torch
from torch import Tensor

from dovetail.kernels import api
from dovetail.kernels.backend import Capture
from dovetail.kernels.cpu import one_token

MAX_NUMPY_WEIGHTS = 2**19
"""Elements of the largest matrix that numpy multiplies. What is larger is bound by the memory it
is read from, not by calls, and torch divides it among its threads."""


def is_one_token(x: Tensor) -> bool:
    """Return whether ``x``, [T, N], is what ``one_token`` takes."""
    return x.shape[0] == 1 and x.dtype == torch.float32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See ``kernels.api.linear``."""
    if is_one_token(x) and weight.numel() <= MAX_NUMPY_WEIGHTS:
        return one_token.linear(x, weight, bias)
    return api.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See ``kernels.api.rms_norm``."""
    return (one_token if is_one_token(x) else api).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.add_rms_norm``."""
    return (one_token if is_one_token(x) else api).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See ``kernels.api.silu_mul``."""
    return (one_token if is_one_token(gate_up) else api).silu_mul(gate_up)


def route(
    logits_TE: Tensor, k: int, norm_topk_prob: bool, *, capture: Capture | None = None
) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.route``."""
    if is_one_token(logits_TE) and capture is None:
        return one_token.router_topk(logits_TE, k, norm_topk_prob)
    return api.route(logits_TE, k, norm_topk_prob, capture=capture)


def fused_moe(
    x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_gate_up_E2IM: Tensor, w_down_EMI: Tensor
) -> Tensor:
    """See ``kernels.api.fused_moe``."""
    run = one_token.fused_moe if is_one_token(x_TM) else api.fused_moe
    return run(x_TM, ids_TK, weights_TK, w_gate_up_E2IM, w_down_EMI)
