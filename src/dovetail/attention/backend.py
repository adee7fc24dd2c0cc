"""What a model layer may know of the step it runs in.

Owns the protocol between layers and attention backends. A layer sees its
tokens, their positions, and an ``attend`` function; where keys and values lie is
the backend's business.

Shape legend: T tokens, H query heads, K KV heads, D head dim, F = (H + 2 K) D.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from dovetail.capture.rows import ExpertRecorder
from dovetail.kernels import api


class Rotation(NamedTuple):
    """How the tokens of a step are turned; see ``kernels.api.rotary``. The same numbers twice.

    Attributes:
        cos_T1D, sin_T1D: views of ``cos_sin_T2D``.
        cos_sin_T2D: float32, of each token the cosines (c, c) and signed sines (-s, s).
    """

    cos_T1D: Tensor
    sin_T1D: Tensor
    cos_sin_T2D: Tensor


class QkNorm(NamedTuple):
    """How q and k are normalised; see ``kernels.api.qk_norm``."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    eps: float


class StepAttention(Protocol):
    """Attention of one step: rows, lengths and page tables are already bound."""

    def attend(
        self, layer: int, qkv_TF: Tensor, qk_norm: QkNorm | None, rotation: Rotation
    ) -> Tensor:
        """Normalise and turn q and k, store k and v, then attend causally within each row.

        All of it belongs to the backend, because some do the first three as one operation.

        Args:
            layer: whose keys and values.
            qkv_TF: of each token the query heads, the key heads, the value heads.
            qk_norm: None leaves out the norms.
            rotation: of the step's tokens.

        Returns:
            [T, H, D], the dtype of ``qkv_TF``.
        """
        ...


def rotated_heads(
    qkv_TF: Tensor,
    qk_norm: QkNorm | None,
    rotation: Rotation,
    *,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [T, H, D] and k [T, K, D], normalised and turned, and v [T, K, D]."""
    qkv_TGD = qkv_TF.view(len(qkv_TF), -1, head_dim)
    num_heads = qkv_TGD.shape[1] - 2 * num_kv_heads
    qk_TGD, v_TKD = qkv_TGD.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if qk_norm is not None:
        qk_TGD = api.qk_norm(
            qk_TGD, qk_norm.q_weight_D, qk_norm.k_weight_D, num_heads=num_heads, eps=qk_norm.eps
        )
    # q and k turn by the same angles, so they go as one tensor.
    qk_TGD = api.rotary(qk_TGD, rotation.cos_T1D, rotation.sin_T1D)
    q_THD, k_TKD = qk_TGD.split_with_sizes((num_heads, num_kv_heads), dim=1)
    return q_THD, k_TKD, v_TKD


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The step a forward belongs to; passed down, never ambient.

    Attributes:
        token_ids: int64 [T], input tokens.
        positions: int64 [T], absolute positions.
        kv_slots: int64 [T], flat index ``page * page_size + offset`` under which
            per-token state of each token is stored.
        attention: see ``StepAttention``.
        recorder: takes down the experts of the tokens; None in an engine that captures none.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    attention: StepAttention
    recorder: ExpertRecorder | None = None
