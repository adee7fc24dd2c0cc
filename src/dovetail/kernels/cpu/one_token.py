"""The operations of a layer for a single token in float32, in numpy.

Tensors of one token are so small that a call costs more than its work, and a call of numpy costs
a fraction of one of torch: not only in time, but in the code it pushes through the processor's
cache, where the weights want to be. Numbers and ties are those of ``kernels.ref``, up to rounding.

Arrays are views of tensors and results become tensors again without a copy.

Shape legend: N input features, O output features, E experts, K experts per token, M model dim,
I expert inner dim, H query heads, G heads of q and k, X KV heads, D head dim, C cache slots,
S cached tokens.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]


def linear(x_1N: Tensor, weight_ON: Tensor, bias_O: Tensor | None) -> Tensor:
    """See ``kernels.cpu.layers.linear``."""
    y_O = weight_ON.numpy().dot(x_1N.numpy()[0])
    if bias_O is not None:
        y_O += bias_O.numpy()
    return torch.from_numpy(y_O[None])


def rms_norm(x_1N: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """See ``kernels.api.rms_norm``."""
    return torch.from_numpy(_normed(x_1N.numpy(), weight_N, eps))


def add_rms_norm(
    x_1N: Tensor, residual_1N: Tensor, weight_N: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.add_rms_norm``."""
    total_1N = x_1N.numpy() + residual_1N.numpy()
    return torch.from_numpy(_normed(total_1N, weight_N, eps)), torch.from_numpy(total_1N)


def silu_mul(gate_up_12N: Tensor) -> Tensor:
    """See ``kernels.api.silu_mul``."""
    return torch.from_numpy(_gated(gate_up_12N.numpy()[0])[None])


def router_topk(logits_1E: Tensor, k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.router_topk``."""
    logits_E = logits_1E.numpy()[0]
    probs_E = np.exp(logits_E - logits_E.max())
    probs_E /= probs_E.sum()
    ids_K = (-probs_E).argsort(kind="stable")[:k]
    weights_K = probs_E[ids_K]
    if norm_topk_prob:
        weights_K /= weights_K.sum()
    return torch.from_numpy(weights_K[None]), torch.from_numpy(ids_K[None])


def fused_moe(
    x_1M: Tensor, ids_1K: Tensor, weights_1K: Tensor, w_gate_up_E2IM: Tensor, w_down_EMI: Tensor
) -> Tensor:
    """See ``kernels.api.fused_moe``."""
    x_M, weights_K = x_1M.numpy()[0], weights_1K.numpy()[0]
    up_E2IM, down_EMI = w_gate_up_E2IM.numpy(), w_down_EMI.numpy()
    total_M = np.zeros_like(x_M)
    for expert, weight in zip(ids_1K.numpy()[0].tolist(), weights_K, strict=True):
        y_M = down_EMI[expert].dot(_gated(up_E2IM[expert].dot(x_M)))
        y_M *= weight
        total_M += y_M
    return torch.from_numpy(total_M[None])


def qk_norm(
    qk_GD: Floats, q_weight_D: Tensor, k_weight_D: Tensor, *, num_heads: int, eps: float
) -> Floats:
    """See ``kernels.api.qk_norm``."""
    scale_G = np.einsum("gd,gd->g", qk_GD, qk_GD)
    scale_G /= qk_GD.shape[1]
    scale_G += eps
    np.sqrt(scale_G, out=scale_G)
    out_GD = qk_GD / scale_G[:, None]
    out_GD[:num_heads] *= q_weight_D.numpy()
    out_GD[num_heads:] *= k_weight_D.numpy()
    return out_GD


def rotary(qk_GD: Floats, cos_D: Floats, sin_D: Floats) -> Floats:
    """See ``kernels.api.rotary``."""
    half = qk_GD.shape[1] // 2
    out_GD = qk_GD * cos_D
    out_GD[:, :half] += qk_GD[:, half:] * sin_D[:half]
    out_GD[:, half:] += qk_GD[:, :half] * sin_D[half:]
    return out_GD


def decode_attention(q_HD: Floats, k_SXD: Floats, v_SXD: Floats) -> Floats:
    """Attend to all S tokens; see ``kernels.api.decode_attention``. Returns [H, D]."""
    num_heads, head_dim = q_HD.shape
    q_XHD = q_HD.reshape(k_SXD.shape[1], -1, head_dim) * np.float32(head_dim**-0.5)
    share_XHS = np.matmul(q_XHD, k_SXD.transpose(1, 2, 0))
    share_XHS -= share_XHS.max(axis=-1, keepdims=True)
    np.exp(share_XHS, out=share_XHS)
    share_XHS /= share_XHS.sum(axis=-1, keepdims=True)
    return np.matmul(share_XHS, v_SXD.transpose(1, 0, 2)).reshape(num_heads, head_dim)


def _normed(x_1N: Floats, weight_N: Tensor, eps: float) -> Floats:
    x_N = x_1N[0]
    mean_square = float(x_N.dot(x_N)) / len(x_N)
    y_1N = x_1N * np.float32(1.0 / math.sqrt(mean_square + eps))
    y_1N *= weight_N.numpy()
    return y_1N


def _gated(gate_up_2N: Floats) -> Floats:
    """Return ``silu(gate) * up``."""
    half = len(gate_up_2N) // 2
    gate_N = gate_up_2N[:half]
    y_N = np.exp(-gate_N)
    y_N += 1
    np.divide(gate_N, y_N, out=y_N)
    y_N *= gate_up_2N[half:]
    return y_N
