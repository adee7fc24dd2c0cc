"""Attention over paged KV, one step at a time.

Owns the order of work within a layer: write the step's keys and values, then attend.
Must not know where page tables come from: it is bound to cache slots that are
already worked out.

Shape legend: T tokens, R rows, D decode rows, S cached tokens of a row, H query heads,
K KV heads, C cache slots, L layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.kernels import api


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The step's work list: where the tokens of each row lie.

    Attributes:
        kv_slots_T: int64, where each token of the step is written.
        num_decode: D; the first D tokens are the decode rows'.
        decode_slots_DS: int64 [D, S], cache slots of the decode rows, padded to the longest.
        decode_len_D: int64 [D], real length of each.
        prefill_rows: per prefill row its token range ``[begin, end)`` in the step and
            int64 [S] cache slots.
    """

    kv_slots_T: Tensor
    num_decode: int
    decode_slots_DS: Tensor
    decode_len_D: Tensor
    prefill_rows: tuple[tuple[int, int, Tensor], ...]


class PagedAttention:
    """Attention of one step over the KV pools; a ``StepAttention``.

    Args:
        k_cache_LCKD, v_cache_LCKD: the pools of all layers.
        rows: the step's work list.
        dtype: of the queries.
    """

    def __init__(
        self, k_cache_LCKD: Tensor, v_cache_LCKD: Tensor, rows: AttentionRows, *, dtype: torch.dtype
    ) -> None:
        self._k_cache = k_cache_LCKD
        self._v_cache = v_cache_LCKD
        self._rows = rows
        columns = torch.arange(rows.decode_slots_DS.shape[1])
        is_padding = columns[None, :] >= rows.decode_len_D[:, None]
        bias = torch.zeros(is_padding.shape, dtype=dtype).masked_fill_(is_padding, float("-inf"))
        self._decode_bias = bias[:, None, None, :]

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write k and v of the step's tokens, then attend causally within each row."""
        rows, k_cache, v_cache = self._rows, self._k_cache[layer], self._v_cache[layer]
        api.write_kv(k_cache, rows.kv_slots_T, k_TKD)
        api.write_kv(v_cache, rows.kv_slots_T, v_TKD)
        parts = []
        if rows.num_decode:
            parts.append(
                api.decode_attention(
                    q_THD[: rows.num_decode],
                    k_cache,
                    v_cache,
                    kv_slots_RS=rows.decode_slots_DS,
                    bias_R11S=self._decode_bias,
                )
            )
        for begin, end, kv_slots_S in rows.prefill_rows:
            parts.append(
                api.prefill_attention(q_THD[begin:end], k_cache, v_cache, kv_slots_S=kv_slots_S)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
