"""Attention over paged KV, one step at a time.

Owns the order of work within a layer: write the step's keys and values, then attend.
Must not know where page tables come from: it is bound to cache slots that are
already worked out.

Shape legend: T tokens, R rows, D decode rows, S cached tokens of a row, H query heads,
K KV heads, D head dim, C cache slots, L layers, F = (H + 2 K) D.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.attention.backend import QkNorm, Rotation, rotated_heads
from dovetail.kernels import api
from dovetail.kernels.scratch import Scratch


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that attend in one call.

    Attributes:
        tokens_D: int64 [D], index of each row's token within the step; 0, 1, ... if this is the
            only group.
        kv_slots_DS: int64 [D, S], cache slots of each row, padded to the longest.
        len_D: int64 [D], real length of each.
    """

    tokens_D: Tensor
    kv_slots_DS: Tensor
    len_D: Tensor


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The step's work list: where the tokens of each row lie.

    Attributes:
        kv_slots_T: int64, where each token of the step is written.
        decode_groups: the decode rows, those of similar length together.
        prefill_rows: per prefill row its token range ``[begin, end)`` in the step and
            int64 [S] cache slots.
    """

    kv_slots_T: Tensor
    decode_groups: tuple[DecodeGroup, ...]
    prefill_rows: tuple[tuple[int, int, Tensor], ...]

    @property
    def is_one_token(self) -> bool:
        """Whether the step decodes a single row and does nothing else."""
        return len(self.kv_slots_T) == 1 and len(self.decode_groups) == 1


class PagedAttention:
    """Attention of one step over the KV pools; a ``StepAttention``.

    Args:
        k_cache_LCKD, v_cache_LCKD: the pools of all layers.
        rows: the step's work list.
        dtype: of the queries.
        scratch: memory for operations to work in, kept from step to step.
    """

    def __init__(
        self,
        k_cache_LCKD: Tensor,
        v_cache_LCKD: Tensor,
        rows: AttentionRows,
        *,
        dtype: torch.dtype,
        scratch: Scratch,
    ) -> None:
        self._k_cache = k_cache_LCKD
        self._v_cache = v_cache_LCKD
        self._rows = rows
        self._scratch = scratch
        self._biases = [_padding_bias(group, dtype) for group in rows.decode_groups]

    def attend(
        self, layer: int, qkv_TF: Tensor, qk_norm: QkNorm | None, rotation: Rotation
    ) -> Tensor:
        """See ``StepAttention``."""
        rows, k_cache, v_cache = self._rows, self._k_cache[layer], self._v_cache[layer]
        q_THD, k_TKD, v_TKD = rotated_heads(
            qkv_TF, qk_norm, rotation, num_kv_heads=k_cache.shape[1], head_dim=k_cache.shape[2]
        )
        api.write_kv(k_cache, rows.kv_slots_T, k_TKD)
        api.write_kv(v_cache, rows.kv_slots_T, v_TKD)
        if len(rows.decode_groups) == 1 and not rows.prefill_rows:
            return self._decode(q_THD, rows.decode_groups[0], k_cache, v_cache, self._biases[0])
        out_THD = torch.empty_like(q_THD)
        for group, bias_D11S in zip(rows.decode_groups, self._biases, strict=True):
            q_DHD = q_THD.index_select(0, group.tokens_D)
            out_DHD = self._decode(q_DHD, group, k_cache, v_cache, bias_D11S)
            out_THD.index_copy_(0, group.tokens_D, out_DHD)
        for begin, end, kv_slots_S in rows.prefill_rows:
            out_THD[begin:end] = api.prefill_attention(
                q_THD[begin:end], k_cache, v_cache, kv_slots_S=kv_slots_S
            )
        return out_THD

    def _decode(
        self,
        q_DHD: Tensor,
        group: DecodeGroup,
        k_cache_CKD: Tensor,
        v_cache_CKD: Tensor,
        bias_D11S: Tensor,
    ) -> Tensor:
        return api.decode_attention(
            q_DHD,
            k_cache_CKD,
            v_cache_CKD,
            kv_slots_RS=group.kv_slots_DS,
            bias_R11S=bias_D11S,
            scratch=self._scratch,
        )


def _padding_bias(group: DecodeGroup, dtype: torch.dtype) -> Tensor:
    columns_S = torch.arange(group.kv_slots_DS.shape[1])
    is_padding_DS = columns_S >= group.len_D[:, None]
    bias_DS = torch.zeros(is_padding_DS.shape, dtype=dtype).masked_fill_(is_padding_DS, -torch.inf)
    return bias_DS[:, None, None, :]
