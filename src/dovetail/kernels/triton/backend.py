"""``kernels.backend.Kernels`` in Triton: every operation with the tiles of one table.

Owns who computes the experts: Triton, or torch's grouped matrix product.
"""

from collections.abc import Callable
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.errors import ConfigError
from dovetail.kernels.backend import (
    Borders,
    Capture,
    PlainDraws,
    QueryTiles,
    ShapedLogits,
    WorkItems,
)
from dovetail.kernels.triton import (
    activation,
    attention,
    norm,
    rotary,
    router,
    sampling,
    shaped_sampling,
    truncation,
)
from dovetail.kernels.triton.experts import TritonExperts
from dovetail.kernels.triton.grouped_mm import TorchExperts
from dovetail.kernels.triton.tiles import RowTiles, TileTable

FusedMoe = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""See ``Kernels.fused_moe``."""

MOE_BACKENDS: MappingProxyType[str, Callable[[TileTable], FusedMoe]] = MappingProxyType(
    {"triton": TritonExperts, "torch": TorchExperts}
)


def kernels(device: torch.device, moe_backend: str | None) -> "TritonKernels":
    """Return the operations for ``device``.

    Args:
        device: where they run.
        moe_backend: one of ``MOE_BACKENDS``; None is Triton.

    Raises:
        ConfigError: it is no NVIDIA GPU, or there is no such way to compute the experts.
    """
    if device.type != "cuda":
        raise ConfigError("kernels", f"'triton' needs an NVIDIA GPU, not '{device.type}'")
    moe_backend = moe_backend or "triton"
    if moe_backend not in MOE_BACKENDS:
        raise ConfigError("moe_backend", f"is '{moe_backend}'; give {' or '.join(MOE_BACKENDS)}")
    table = TileTable(torch.cuda.get_device_properties(device).multi_processor_count)
    return TritonKernels(table, MOE_BACKENDS[moe_backend](table))


class TritonKernels:
    """All operations; what each means is said once, in ``kernels.backend``.

    Args:
        table: the tile sizes of the device.
        fused_moe: the operation of that name; None is Triton's.
    """

    def __init__(self, table: TileTable, fused_moe: FusedMoe | None = None) -> None:
        self._table = table
        self._fused_moe = fused_moe or TritonExperts(table)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``kernels.api.linear``; the library of the GPU's vendor is hard to beat."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``kernels.api.rms_norm``."""
        return norm.rms_norm(x, weight, eps, tiles=self._table.row(x.shape[-1]))

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``kernels.api.add_rms_norm``."""
        return norm.add_rms_norm(x, residual, weight, eps, tiles=self._table.row(x.shape[-1]))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels.silu_mul``."""
        return activation.silu_mul(gate_up, tiles=self._table.row(gate_up.shape[-1] // 2))

    def rotate_and_store(
        self,
        qkv_TF: Tensor,
        *,
        qk_norm: tuple[Tensor, Tensor, float] | None,
        cos_sin_P2D: Tensor,
        positions_T: Tensor,
        kv_slots_T: Tensor,
        k_cache_CKD: Tensor,
        v_cache_CKD: Tensor,
    ) -> Tensor:
        """See ``Kernels.rotate_and_store``."""
        num_heads = qkv_TF.shape[1] // k_cache_CKD.shape[2]
        return rotary.rotate_and_store(
            qkv_TF,
            qk_norm=qk_norm,
            cos_sin_P2D=cos_sin_P2D,
            positions_T=positions_T,
            kv_slots_T=kv_slots_T,
            k_cache_CKD=k_cache_CKD,
            v_cache_CKD=v_cache_CKD,
            tiles=self._table.rotate(len(qkv_TF), num_heads),
        )

    def tile_tokens(self, group: int) -> int:
        """See ``Kernels.tile_tokens``."""
        return self._table.prefill_tokens(group)

    def split_keys(
        self,
        queries: QueryTiles,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
    ) -> WorkItems:
        """See ``Kernels.split_keys``."""
        tiles = self._table.split(len(queries.tiles_N4), queries.max_tokens, num_kv_heads)
        return attention.split_keys(queries, num_kv_heads=num_kv_heads, window=window, tiles=tiles)

    def paged_attention(
        self,
        q_THD: Tensor,
        k_cache_CKD: Tensor,
        v_cache_CKD: Tensor,
        *,
        page_table_SB: Tensor,
        page_size: int,
        work: WorkItems,
        sinks_H: Tensor | None = None,
        out_THD: Tensor | None = None,
    ) -> Tensor:
        """See ``Kernels.paged_attention``."""
        num_kv_heads = k_cache_CKD.shape[1]
        tiles = self._table.attention(
            work.max_tokens * q_THD.shape[1] // num_kv_heads,
            q_THD.shape[2] * q_THD.itemsize,
            len(work.items_W8) * num_kv_heads,
        )
        return attention.paged_attention(
            q_THD,
            k_cache_CKD,
            v_cache_CKD,
            page_table_SB=page_table_SB,
            page_size=page_size,
            work=work,
            sinks_H=sinks_H,
            out_THD=out_THD,
            tiles=tiles,
        )

    def route(
        self, logits_TE: Tensor, k: int, norm_topk_prob: bool, *, capture: Capture | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels.route``."""
        return router.route(
            logits_TE, k, norm_topk_prob, capture=capture, tiles=RowTiles(num_warps=1)
        )

    def fused_moe(
        self,
        x_TM: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        w_gate_up_E2IM: Tensor,
        w_down_EMI: Tensor,
    ) -> Tensor:
        """See ``Kernels.fused_moe``."""
        return self._fused_moe(x_TM, ids_TK, weights_TK, w_gate_up_E2IM, w_down_EMI)

    def sample_plain(
        self,
        logits_NV: Tensor,
        *,
        temperature_N: Tensor,
        seed_N: Tensor,
        position_N: Tensor,
        sample_index_N: Tensor,
    ) -> PlainDraws:
        """See ``Kernels.sample_plain``."""
        return sampling.sample_plain(
            logits_NV,
            temperature_N=temperature_N,
            seed_N=seed_N,
            position_N=position_N,
            sample_index_N=sample_index_N,
            tiles=self._table.sample(len(logits_NV), logits_NV.shape[1]),
        )

    def truncate(
        self,
        logits: ShapedLogits,
        *,
        temperature_N: Tensor,
        top_k_N: Tensor,
        top_p_N: Tensor,
        min_p_N: Tensor,
        work_NV: Tensor,
        out: Borders,
    ) -> Borders:
        """See ``Kernels.truncate``."""
        return truncation.truncate(
            logits,
            temperature_N=temperature_N,
            top_k_N=top_k_N,
            top_p_N=top_p_N,
            min_p_N=min_p_N,
            work_NV=work_NV,
            out=out,
            tiles=self._table.truncate(*work_NV.shape),
        )

    def sample_shaped(
        self,
        logits: ShapedLogits,
        borders: Borders,
        *,
        temperature_N: Tensor,
        seed_N: Tensor,
        position_N: Tensor,
        sample_index_N: Tensor,
        logprob_kind_N: Tensor,
    ) -> PlainDraws:
        """See ``Kernels.sample_shaped``."""
        return shaped_sampling.sample_shaped(
            logits,
            borders,
            temperature_N=temperature_N,
            seed_N=seed_N,
            position_N=position_N,
            sample_index_N=sample_index_N,
            logprob_kind_N=logprob_kind_N,
            tiles=self._table.sample(*logits.raw_NV.shape),
        )

    def spread(
        self,
        logits: ShapedLogits,
        borders: Borders,
        *,
        temperature_N: Tensor,
        logprob_kind_N: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Kernels.spread``."""
        return shaped_sampling.spread(
            logits, borders, temperature_N=temperature_N, logprob_kind_N=logprob_kind_N
        )
