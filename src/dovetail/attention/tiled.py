"""Attention over paged KV by work lists that lie on the device.

Owns the order of work within a layer: turn, store, attend. The lists, slots and page tables are at
fixed addresses and may be filled anew between two runs of what was recorded here. Must not know who
fills them.

Shape legend: as in ``kernels.backend``; L layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.attention.backend import QkNorm, Rotation
from dovetail.kernels.backend import Kernels, WorkItems


class TiledAttention:
    """Attention of one step; a ``StepAttention``.

    Args:
        kernels: who computes.
        k_cache_LCKD, v_cache_LCKD: the pools of all layers.
        page_table_SB: the pages of each sequence.
        page_size: tokens of a page.
        kv_slots_T: where each token of the step is stored.
        places_T: 0, 1, 2, ...: ``Rotation`` is by token, where the kernel looks up positions.
        works: lists that together hold each token of the step once.
    """

    def __init__(
        self,
        kernels: Kernels,
        k_cache_LCKD: Tensor,
        v_cache_LCKD: Tensor,
        *,
        page_table_SB: Tensor,
        page_size: int,
        kv_slots_T: Tensor,
        places_T: Tensor,
        works: Sequence[WorkItems],
    ) -> None:
        self._kernels = kernels
        self._k_cache = k_cache_LCKD
        self._v_cache = v_cache_LCKD
        self._page_table = page_table_SB
        self._page_size = page_size
        self._kv_slots = kv_slots_T
        self._places = places_T
        self._works = works

    def attend(
        self, layer: int, qkv_TF: Tensor, qk_norm: QkNorm | None, rotation: Rotation
    ) -> Tensor:
        """See ``StepAttention``."""
        k_cache_CKD, v_cache_CKD = self._k_cache[layer], self._v_cache[layer]
        q_THD = self._kernels.rotate_and_store(
            qkv_TF,
            qk_norm=qk_norm,
            cos_sin_P2D=rotation.cos_sin_T2D,
            positions_T=self._places,
            kv_slots_T=self._kv_slots,
            k_cache_CKD=k_cache_CKD,
            v_cache_CKD=v_cache_CKD,
        )
        out_THD = torch.empty_like(q_THD)
        for work in self._works:
            self._kernels.paged_attention(
                q_THD,
                k_cache_CKD,
                v_cache_CKD,
                page_table_SB=self._page_table,
                page_size=self._page_size,
                work=work,
                out_THD=out_THD,
            )
        return out_THD
