"""``kernels.backend.Kernels`` in plain torch, on any device: the oracle of other backends.

Written to be read, not to be fast: it may wait for the device, so a CUDA graph cannot hold it.
Computes in float32, or in float64 where the inputs are.

Shape legend: as in ``kernels.backend``; B tokens of one tile, G query heads of a KV head, X keys.
"""

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
from dovetail.kernels.ref import activation, moe, norm, rotary, sampling


def kernels(device: torch.device, moe_backend: str | None) -> "RefKernels":
    """Return the operations.

    Raises:
        ConfigError: experts are to be computed by others than torch.
    """
    if moe_backend not in (None, "torch"):
        raise ConfigError("moe_backend", f"is '{moe_backend}'; the reference is plain torch")
    return RefKernels()


class RefKernels:
    """All operations; what each means is said once, in ``kernels.backend``."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``kernels.api.linear``."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``kernels.api.rms_norm``."""
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``kernels.api.add_rms_norm``."""
        return norm.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See ``Kernels.silu_mul``."""
        return activation.silu_mul(_wide(gate_up)).to(gate_up.dtype)

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
        num_kv_heads, dim = k_cache_CKD.shape[1:]
        num_heads = qkv_TF.shape[1] // dim - 2 * num_kv_heads
        qkv_TGD = qkv_TF.reshape(len(qkv_TF), -1, dim)
        qk_TGD, v_TKD = qkv_TGD.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        qk_TGD = _wide(qk_TGD)
        if qk_norm is not None:
            q_weight_D, k_weight_D, eps = qk_norm
            qk_TGD = norm.qk_norm(
                qk_TGD, _wide(q_weight_D), _wide(k_weight_D), num_heads=num_heads, eps=eps
            )
        cos_T1D, sin_T1D = cos_sin_P2D[positions_T.long()].chunk(2, dim=1)
        qk_TGD = rotary.rotary(qk_TGD, cos_T1D, sin_T1D).to(qkv_TF.dtype)
        q_THD, k_TKD = qk_TGD.split_with_sizes((num_heads, num_kv_heads), dim=1)
        k_cache_CKD[kv_slots_T.long()] = k_TKD
        v_cache_CKD[kv_slots_T.long()] = v_TKD
        return q_THD.contiguous()

    def tile_tokens(self, group: int) -> int:
        """See ``Kernels.tile_tokens``; a few, so that chunks have several tiles."""
        return 4

    def split_keys(
        self,
        queries: QueryTiles,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None = None,
    ) -> WorkItems:
        """See ``Kernels.split_keys``; divides nothing."""
        tiles_N4 = queries.tiles_N4
        num_tiles = len(tiles_N4)
        items_N8 = tiles_N4.new_zeros(num_tiles, 8)
        items_N8[:, :4] = tiles_N4
        items_N8[:, 5] = tiles_N4[:, 3]
        items_N8[:, 6] = torch.arange(num_tiles, device=tiles_N4.device)
        items_N8[:, 7] = 1
        arrivals_NK = tiles_N4.new_zeros(num_tiles, num_kv_heads)
        return WorkItems(items_N8, arrivals_NK, 0, queries.max_tokens, window)

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
        out_THD = torch.empty_like(q_THD) if out_THD is None else out_THD
        for index, item in enumerate(work.items_W8.tolist()):
            slot, first_token, num_tokens, kv_len, _, _, first_item, _ = item
            if not num_tokens or index != first_item:
                continue
            begin = 0 if work.window is None else max(0, kv_len - num_tokens + 1 - work.window)
            keys_X = torch.arange(begin, kv_len, device=q_THD.device)
            pages_X = page_table_SB[slot, keys_X // page_size].long()
            kv_slots_X = pages_X * page_size + keys_X % page_size
            tile = slice(first_token, first_token + num_tokens)
            positions_B = torch.arange(kv_len - num_tokens, kv_len, device=q_THD.device)
            is_seen_BX = keys_X <= positions_B[:, None]
            if work.window is not None:
                is_seen_BX &= keys_X > positions_B[:, None] - work.window
            out_THD[tile] = _attend(
                q_THD[tile], k_cache_CKD[kv_slots_X], v_cache_CKD[kv_slots_X], is_seen_BX, sinks_H
            )
        return out_THD

    def route(
        self, logits_TE: Tensor, k: int, norm_topk_prob: bool, *, capture: Capture | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``Kernels.route``."""
        wide_TE = logits_TE.float()
        comparable_TE = wide_TE.masked_fill(wide_TE.isnan(), -torch.inf)
        # Two stable sorts: by id it is already, then NaN last, then by logit.
        order_TE = wide_TE.isnan().to(torch.int8).argsort(dim=-1, stable=True)
        by_logit_TE = comparable_TE.gather(1, order_TE).argsort(
            dim=-1, descending=True, stable=True
        )
        ids_TK = order_TE.gather(1, by_logit_TE)[:, :k]
        weights_TK = torch.softmax(wide_TE, dim=-1).gather(1, ids_TK)
        if norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        if capture is not None:
            moe.record_experts(ids_TK, capture)
        return weights_TK, ids_TK.to(torch.int32)

    def fused_moe(
        self,
        x_TM: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        w_gate_up_E2IM: Tensor,
        w_down_EMI: Tensor,
    ) -> Tensor:
        """See ``Kernels.fused_moe``."""
        return moe.fused_moe(x_TM, ids_TK.long(), weights_TK, w_gate_up_E2IM, w_down_EMI)

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
        wide_NV = logits_NV.float()
        draws = sampling.sample(
            wide_NV,
            raw_NV=wide_NV,
            temperature_N=temperature_N,
            top_k_N=torch.zeros_like(seed_N),
            top_p_N=torch.ones_like(temperature_N),
            min_p_N=torch.zeros_like(temperature_N),
            seed_N=seed_N,
            position_N=position_N,
            sample_index_N=sample_index_N,
            logprob_kind_N=torch.full_like(seed_N, sampling.KIND_SCALED),
        )
        return PlainDraws(draws.ids_N, draws.logprobs_N, draws.status_N, draws.log_total_N)

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
        scaled_NV = _scaled(logits, temperature_N)
        cuts_N = (top_k_N > 0) | (top_p_N < 1.0) | (min_p_N > 0.0)
        inside_NV = ~(cuts_N & (temperature_N != 0.0))[:, None] | sampling.support_mask(
            scaled_NV, top_k_N=top_k_N, top_p_N=top_p_N, min_p_N=min_p_N
        )
        # NaN, which no border cuts off, is left out of it.
        is_ranked_NV = inside_NV & ~torch.isnan(scaled_NV)
        least_N = scaled_NV.masked_fill(~is_ranked_NV, torch.inf).amin(dim=-1)
        is_whole_N = inside_NV.all(dim=-1)
        out.least_N.copy_(torch.where(is_whole_N, -torch.inf, least_N))
        token_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
        is_last_NV = is_ranked_NV & (scaled_NV == least_N[:, None])
        last_N = torch.where(is_last_NV, token_V, -1).amax(dim=-1)
        out.last_N.copy_(torch.where(is_whole_N, scaled_NV.shape[1], last_N))
        return out

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
        _, reported_NV, outside_NV = self.spread(
            logits, borders, temperature_N=temperature_N, logprob_kind_N=logprob_kind_N
        )
        left_NV = _processed(logits).masked_fill(outside_NV, -torch.inf)
        drawn = self.sample_plain(
            left_NV,
            temperature_N=temperature_N,
            seed_N=seed_N,
            position_N=position_N,
            sample_index_N=sample_index_N,
        )
        log_total_N = torch.logsumexp(reported_NV, dim=-1)
        logprobs_N = reported_NV.gather(1, drawn.ids_N[:, None]).view(-1) - log_total_N
        status_N = (~torch.isfinite(log_total_N)).to(torch.int64)
        is_empty_N = left_NV.amax(dim=-1) == -torch.inf
        is_empty_N &= torch.isfinite(logits.raw_NV.amax(dim=-1))
        status_N.masked_fill_(is_empty_N, sampling.STATUS_EMPTY_SUPPORT)
        return PlainDraws(drawn.ids_N, logprobs_N, status_N, log_total_N)

    def spread(
        self,
        logits: ShapedLogits,
        borders: Borders,
        *,
        temperature_N: Tensor,
        logprob_kind_N: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Kernels.spread``."""
        scaled_NV, least_N1 = _scaled(logits, temperature_N), borders.least_N[:, None]
        token_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
        is_behind_NV = token_V > borders.last_N[:, None]
        outside_NV = (scaled_NV < least_N1) | ((scaled_NV == least_N1) & is_behind_NV)
        kind_N1 = logprob_kind_N[:, None]
        is_hidden_NV = outside_NV & (kind_N1 == sampling.KIND_TRUNCATED)
        reported_NV = scaled_NV.masked_fill(is_hidden_NV, -torch.inf)
        reported_NV = torch.where(kind_N1 == sampling.KIND_RAW, logits.raw_NV, reported_NV)
        return scaled_NV, reported_NV, outside_NV


def _processed(logits: ShapedLogits) -> Tensor:
    """Return the rows that are drawn from."""
    return torch.where(logits.is_changed_N[:, None] != 0, logits.changed_NV, logits.raw_NV)


def _scaled(logits: ShapedLogits, temperature_N: Tensor) -> Tensor:
    return _processed(logits) / torch.where(temperature_N == 0.0, 1.0, temperature_N)[:, None]


def _attend(
    q_BHD: Tensor, k_XKD: Tensor, v_XKD: Tensor, is_seen_BX: Tensor, sinks_H: Tensor | None
) -> Tensor:
    """Return one tile's attention, [B, H, D]; zeros where there are no keys."""
    num_tokens, num_heads, dim = q_BHD.shape
    group = num_heads // k_XKD.shape[1]
    k_XHD, v_XHD = (_wide(x).repeat_interleave(group, dim=1) for x in (k_XKD, v_XKD))
    score_HBX = torch.einsum("bhd,xhd->hbx", _wide(q_BHD), k_XHD) * dim**-0.5
    score_HBX = score_HBX.masked_fill(~is_seen_BX, -torch.inf)
    if sinks_H is not None:
        sink_HB1 = sinks_H.to(score_HBX.dtype)[:, None, None].expand(-1, num_tokens, 1)
        score_HBX = torch.cat((score_HBX, sink_HB1), dim=-1)
    share_HBX = torch.softmax(score_HBX, dim=-1)[..., : len(k_XKD)]
    return torch.einsum("hbx,xhd->bhd", share_HBX, v_XHD).to(q_BHD.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
