"""A ``StepAttention`` for one sequence, without pages: keys and values in plain tensors.

Shape legend: T tokens, S tokens so far, H query heads, K KV heads, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.attention.backend import ForwardContext, QkNorm, Rotation, rotated_heads
from dovetail.models.decoder import DecoderLM


class DenseAttention:
    """Attention of one sequence over all tokens it was given, step after step."""

    def __init__(self, model: DecoderLM) -> None:
        layer = model.model.layers[0].self_attn
        self._heads = {"num_kv_heads": layer.num_kv_heads, "head_dim": layer.head_dim}
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(
        self, layer: int, qkv_TF: Tensor, qk_norm: QkNorm | None, rotation: Rotation
    ) -> Tensor:
        """Append k and v, then attend causally."""
        q_THD, k_TKD, v_TKD = rotated_heads(qkv_TF, qk_norm, rotation, **self._heads)
        if layer in self._kv:
            past_k, past_v = self._kv[layer]
            k_TKD, v_TKD = torch.cat((past_k, k_TKD)), torch.cat((past_v, v_TKD))
        self._kv[layer] = k_TKD, v_TKD
        num_new, num_all = len(q_THD), len(k_TKD)
        visible_TS = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)
        out_HTD = F.scaled_dot_product_attention(
            q_THD.transpose(0, 1)[None],
            k_TKD.transpose(0, 1)[None],
            v_TKD.transpose(0, 1)[None],
            attn_mask=visible_TS,
            enable_gqa=True,
        )[0]
        return out_HTD.transpose(0, 1)


def step(attention: DenseAttention, token_ids: list[int], start: int = 0) -> ForwardContext:
    """Return the context of a step that forwards ``token_ids`` from position ``start`` on."""
    positions = torch.arange(start, start + len(token_ids))
    return ForwardContext(
        token_ids=torch.tensor(token_ids),
        positions=positions,
        kv_slots=positions,
        attention=attention,
    )
