"""Attention of a step that decodes one row, in float32 on a CPU: ``attention.paged`` in numpy.

Shape legend: H query heads, K KV heads, D head dim, C cache slots, L layers, S cached tokens,
F = (H + 2 K) D.
"""

import torch
from torch import Tensor

from dovetail.attention.backend import QkNorm, Rotation
from dovetail.kernels.cpu import one_token


class OneTokenAttention:
    """Attention of one token over its row; a ``StepAttention``.

    Args:
        k_cache_LCKD, v_cache_LCKD: the pools of all layers, float32.
        kv_slots_S: int64, cache slots of the row's tokens; the last is the step's own.
    """

    def __init__(self, k_cache_LCKD: Tensor, v_cache_LCKD: Tensor, kv_slots_S: Tensor) -> None:
        self._k_LCKD = k_cache_LCKD.numpy()
        self._v_LCKD = v_cache_LCKD.numpy()
        self._kv_slots_S = kv_slots_S.numpy()

    def attend(
        self, layer: int, qkv_TF: Tensor, qk_norm: QkNorm | None, rotation: Rotation
    ) -> Tensor:
        """See ``StepAttention``; T is 1."""
        k_CKD, v_CKD, slots_S = self._k_LCKD[layer], self._v_LCKD[layer], self._kv_slots_S
        num_kv_heads, head_dim = k_CKD.shape[1:]
        qkv_GD = qkv_TF.numpy().reshape(-1, head_dim)
        num_heads = len(qkv_GD) - 2 * num_kv_heads
        qk_GD = qkv_GD[:-num_kv_heads]
        if qk_norm is not None:
            qk_GD = one_token.qk_norm(
                qk_GD, qk_norm.q_weight_D, qk_norm.k_weight_D, num_heads=num_heads, eps=qk_norm.eps
            )
        cos_D, sin_D = rotation.cos_sin_T2D.numpy()[0]
        qk_GD = one_token.rotary(qk_GD, cos_D, sin_D)
        k_CKD[slots_S[-1]] = qk_GD[num_heads:]
        v_CKD[slots_S[-1]] = qkv_GD[-num_kv_heads:]
        out_HD = one_token.decode_attention(
            qk_GD[:num_heads], k_CKD.take(slots_S, axis=0), v_CKD.take(slots_S, axis=0)
        )
        return torch.from_numpy(out_HD[None])
