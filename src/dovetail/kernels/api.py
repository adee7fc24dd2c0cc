"""Every device operation the engine has: one documented function an op.

Owns what an op means: shapes, dtypes, rounding, ties. A backend is a function of the same name and
signature; ``ref`` runs on any device torch has, is the CPU path, and is what every other backend is
tested against. Must not know models, layers or steps.

Unless said otherwise an op allocates its result, leaves its inputs alone, and returns the dtype of
its first argument.

Shape legend: T tokens, H query heads, K KV heads or, in the mixture-of-experts ops, experts per
token, D head dim, M model dim, E experts, I expert inner dim,
R rows, C cache slots, S cached tokens of a row, N rows that sample, V vocabulary.
"""

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dovetail.kernels.backend import Capture
from dovetail.kernels.ref import activation, attention, capture, moe, norm, sampling
from dovetail.kernels.ref import rotary as rotary_ref
from dovetail.kernels.scratch import Scratch


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``.

    Args:
        x: [..., N].
        weight: [O, N].
        bias: [O].

    Returns:
        [..., O].
    """
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Computed in float32, rounded once. (transformers rounds before the multiplication by ``weight``
    too: in bfloat16 it may differ from this by one unit in the last place.)

    Args:
        x: [..., N].
        weight: [N], the dtype of ``x``.
        eps: added to the mean square.
    """
    return norm.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalise the sum.

    The sum is rounded to the dtype of ``x`` before it is normalised.

    Args:
        x: [..., N].
        residual: [..., N].
        weight: [N].
        eps: see ``rms_norm``.

    Returns:
        ``rms_norm(x + residual)`` and ``x + residual``.
    """
    return norm.add_rms_norm(x, residual, weight, eps)


def qk_norm(
    qk_TGD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, *, num_heads: int, eps: float
) -> Tensor:
    """RMS-normalise each head of q and of k, all in one tensor (Qwen3, arXiv 2505.09388).

    Computed in float32, rounded once.

    Args:
        qk_TGD: G = H + K heads, the H query heads first.
        q_weight_D: weight of the query heads.
        k_weight_D: weight of the KV heads.
        num_heads: H.
        eps: see ``rms_norm``.

    Returns:
        [T, G, D].
    """
    return norm.qk_norm(qk_TGD, q_weight_D, k_weight_D, num_heads=num_heads, eps=eps)


def rotary(qk_TGD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate q and k by their positions, in the half-rotation convention of transformers.

    Dimension i turns with dimension i + D/2. Computed in float32, rounded once.

    Args:
        qk_TGD: G = H + K heads, queries and keys.
        cos_T1D: float32, the cosines of each token's angles, (c, c), each half D/2 wide.
        sin_T1D: float32, the signed sines, (-s, s).

    Returns:
        [T, G, D].
    """
    return rotary_ref.rotary(qk_TGD, cos_T1D, sin_T1D)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` for ``gate_up = (gate, up)``.

    Args:
        gate_up: [..., 2 N], first all of gate, then all of up.

    Returns:
        [..., N].
    """
    return activation.silu_mul(gate_up)


def router_topk(logits_TE: Tensor, k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Choose each token's experts: softmax over all experts in float32, then the k largest.

    Of equal probabilities the lower expert id goes first. (``torch.topk``, which transformers uses,
    leaves that open; without ties the choice and its order are the same.)

    Args:
        logits_TE: router logits, any float dtype.
        k: experts per token.
        norm_topk_prob: whether to rescale each token's k weights to sum to 1.

    Returns:
        Weights, float32 [T, K], and expert ids, int64 [T, K], both by descending weight.
    """
    return moe.router_topk(logits_TE, k, norm_topk_prob)


def route(
    logits_TE: Tensor, k: int, norm_topk_prob: bool, *, capture: Capture | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``router_topk``, and record the ids; see ``kernels.backend.Kernels.route``."""
    weights_TK, ids_TK = moe.router_topk(logits_TE, k, norm_topk_prob)
    if capture is not None:
        moe.record_experts(ids_TK, capture)
    return weights_TK, ids_TK


def fused_moe(
    x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_gate_up_E2IM: Tensor, w_down_EMI: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts, each a SwiGLU MLP.

    Expert outputs have the dtype of ``x_TM``; they are weighted and summed in float32, in the order
    of ``ids_TK``, and rounded once.

    Args:
        x_TM: inputs.
        ids_TK: int64, experts of each token.
        weights_TK: float32, their weights.
        w_gate_up_E2IM: [E, 2 I, M], first all of gate, then all of up.
        w_down_EMI: [E, M, I].

    Returns:
        [T, M].
    """
    return moe.fused_moe(x_TM, ids_TK, weights_TK, w_gate_up_E2IM, w_down_EMI)


def write_kv(cache_CKD: Tensor, kv_slots_T: Tensor, x_TKD: Tensor) -> None:
    """Store each token's keys or values at its cache slot, in place.

    Args:
        cache_CKD: one layer's pool.
        kv_slots_T: int64, no slot twice.
        x_TKD: keys or values, the dtype of the pool.
    """
    attention.write_kv(cache_CKD, kv_slots_T, x_TKD)


def fill_rows(rows_C: Tensor, index: NDArray[np.int64] | slice, value: float) -> None:
    """Set the chosen rows of side data to one value, in place.

    Args:
        rows_C: [C, ...].
        index: which rows.
        value: what every element becomes.
    """
    capture.fill_rows(rows_C, index, value)


def store_layer(rows_TLK: Tensor, layer: int, values_TK: Tensor) -> None:
    """Store one layer's part of the first T rows, in place.

    Args:
        rows_TLK: [T or more, layers, K].
        layer: which of the layers.
        values_TK: narrowed to the dtype of the rows; the caller sees to it that they fit.
    """
    capture.store_layer(rows_TLK, layer, values_TK)


def scatter_rows(rows_C: Tensor, slots_T: NDArray[np.int64], values_T: Tensor) -> None:
    """Store each token's row at its slot, in place.

    Args:
        rows_C: [C, ...].
        slots_T: of real tokens, no slot twice; padding may share one.
        values_T: [T, ...], the dtype of the rows.
    """
    capture.scatter_rows(rows_C, slots_T, values_T)


def gather_rows(rows_C: Tensor, slots_S: NDArray[np.int64], out_S: NDArray[np.generic]) -> None:
    """Copy the rows at these slots to ``out_S``.

    Args:
        rows_C: [C, ...].
        slots_S: any slots.
        out_S: [S, ...], the dtype of the rows.
    """
    capture.gather_rows(rows_C, slots_S, out_S)


def decode_attention(
    q_RHD: Tensor,
    k_cache_CKD: Tensor,
    v_cache_CKD: Tensor,
    *,
    kv_slots_RS: Tensor,
    bias_R11S: Tensor,
    scratch: Scratch,
) -> Tensor:
    """Attend with one query token a row, over the row's cached tokens, itself included.

    Softmax scale ``D ** -0.5``; query head h reads KV head ``h // (H / K)``.

    Args:
        q_RHD: queries.
        k_cache_CKD: one layer's keys.
        v_cache_CKD: one layer's values.
        kv_slots_RS: int64, cache slots of each row's tokens. Shorter rows are padded with slots
            of their own, never a stranger's: NaN there would pass through a zero weight.
        bias_R11S: 0 for a token, -inf for padding, the dtype of ``q_RHD``.
        scratch: memory to work in.

    Returns:
        [R, H, D].
    """
    return attention.decode_attention(
        q_RHD,
        k_cache_CKD,
        v_cache_CKD,
        kv_slots_RS=kv_slots_RS,
        bias_R11S=bias_R11S,
        scratch=scratch,
    )


def prefill_attention(
    q_THD: Tensor, k_cache_CKD: Tensor, v_cache_CKD: Tensor, *, kv_slots_S: Tensor
) -> Tensor:
    """Attend causally with the last T of the S cached tokens of one row.

    Scale and heads as in ``decode_attention``.

    Args:
        q_THD: queries of positions ``S - T .. S - 1``.
        k_cache_CKD: one layer's keys, the T new ones included.
        v_cache_CKD: one layer's values.
        kv_slots_S: int64, cache slots of the row's tokens.

    Returns:
        [T, H, D].
    """
    return attention.prefill_attention(q_THD, k_cache_CKD, v_cache_CKD, kv_slots_S=kv_slots_S)


Draws = sampling.Draws


def penalize(
    logits_NV: Tensor,
    *,
    row_S: Tensor,
    token_S: Tensor,
    is_output_S: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
) -> Tensor:
    """Make tokens that have occurred less likely.

    Repetition (CTRL, arXiv 1909.05858): the logit of a token that occurs in prompt or output is
    divided by the penalty if positive, else multiplied by it. Then frequency times the token's
    count in the output is subtracted, and presence if that count is not zero.

    Args:
        logits_NV: float32.
        row_S: int64, whose token each entry is. Here S runs over the tokens so far of all rows.
        token_S: int64.
        is_output_S: bool, generated rather than prompt.
        repetition_N: float32, 1 does nothing.
        frequency_N: float32, 0 does nothing.
        presence_N: float32, 0 does nothing.

    Returns:
        [N, V].
    """
    return sampling.penalize(
        logits_NV,
        row_S=row_S,
        token_S=token_S,
        is_output_S=is_output_S,
        repetition_N=repetition_N,
        frequency_N=frequency_N,
        presence_N=presence_N,
    )


def penalize_counted(
    logits_NV: Tensor,
    *,
    occurs_NV: Tensor,
    num_drawn_NV: Tensor,
    repetition_N: Tensor,
    frequency_N: Tensor,
    presence_N: Tensor,
) -> Tensor:
    """Do what ``penalize`` does where the tokens so far have been counted.

    Args:
        logits_NV: float32.
        occurs_NV: bool, the token is in prompt or output.
        num_drawn_NV: float32, how often it is in the output.
        repetition_N, frequency_N, presence_N: as for ``penalize``.

    Returns:
        [N, V].
    """
    return sampling.penalize_counted(
        logits_NV,
        occurs_NV=occurs_NV,
        num_drawn_NV=num_drawn_NV,
        repetition_N=repetition_N,
        frequency_N=frequency_N,
        presence_N=presence_N,
    )


def add_bias(logits_NV: Tensor, *, row_B: Tensor, token_B: Tensor, value_B: Tensor) -> Tensor:
    """Add numbers to single logits; -inf forbids a token.

    Args:
        logits_NV: float32.
        row_B: int64. B runs over the biases of all rows; a logit may have several.
        token_B: int64.
        value_B: float32.

    Returns:
        [N, V].
    """
    return sampling.add_bias(logits_NV, row_B=row_B, token_B=token_B, value_B=value_B)


def support_mask(scaled_NV: Tensor, *, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Return which tokens truncation leaves; see ``sample``, whose truncation this is.

    Top-p leaves at least one token.

    Args:
        scaled_NV: float32, logits divided by the temperature.
        top_k_N: integers, 0 keeps all.
        top_p_N, min_p_N: float32.

    Returns:
        bool [N, V].
    """
    return sampling.support_mask(scaled_NV, top_k_N=top_k_N, top_p_N=top_p_N, min_p_N=min_p_N)


def sample_greedy(logits_NV: Tensor) -> Draws:
    """Take each row's largest logit; what ``sample`` does if every temperature is 0.

    Args:
        logits_NV: float32, penalties and biases applied.

    Returns:
        See ``Draws``; logprobs are the log-softmax of ``logits_NV``.
    """
    return sampling.sample_greedy(logits_NV)


def sample(
    logits_NV: Tensor,
    *,
    raw_NV: Tensor,
    temperature_N: Tensor,
    top_k_N: Tensor,
    top_p_N: Tensor,
    min_p_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
    sample_index_N: Tensor,
    logprob_kind_N: Tensor,
) -> Draws:
    """Draw one token a row: the argmax of ``logits / temperature`` plus Gumbel noise.

    Noise is Philox4x32-10 (Salmon et al., SC 2011) keyed by the 64-bit seed, low word first, with
    counter (token id // 4, position, sample index, 0); token id % 4 picks the word x, and
    ``u = (x + 0.5) * 2^-32``, ``g = -log(-log1p(-u))`` in float32. So a draw is a pure function of
    its row. Temperature 0 is greedy. Of equal scores the lower id wins.

    Truncation works on the probabilities at the row's temperature, tokens ordered by probability
    and then by id: top-k keeps the first k; top-p keeps, of the distribution renormalised over
    those, the tokens before which less than p has been gathered; min-p drops what is less likely
    than min_p times the likeliest. Greedy rows are not truncated. Probabilities are the integers of
    ``kernels.masses``: top-p compares with ``ceil(p * their sum)``, min-p with ``ceil(min_p * the
    likeliest's)``, both products in float64, so every backend leaves the same tokens.

    Args:
        logits_NV: float32, penalties and biases applied.
        raw_NV: float32, the model's own.
        temperature_N: float32.
        top_k_N: int64, 0 keeps all.
        top_p_N: float32.
        min_p_N: float32.
        seed_N: int64, the bit pattern of the seed.
        position_N: int64, the index that the drawn token will have in its sequence.
        sample_index_N: int64.
        logprob_kind_N: int64, what is reported: 0 log-softmax of ``logits / temperature`` (1 for
            greedy) before truncation; 1 of ``raw_NV``; 2 of ``logits / temperature`` after
            truncation.

    Returns:
        See ``Draws``. Status 0 is good, 1 means logits that are not finite, 2 that no token was
        left.
    """
    return sampling.sample(
        logits_NV,
        raw_NV=raw_NV,
        temperature_N=temperature_N,
        top_k_N=top_k_N,
        top_p_N=top_p_N,
        min_p_N=min_p_N,
        seed_N=seed_N,
        position_N=position_N,
        sample_index_N=sample_index_N,
        logprob_kind_N=logprob_kind_N,
    )


def top_logprobs(logits_NV: Tensor, log_total_N: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest ids of each row and their logprobs, likeliest first, then by id.

    Args:
        logits_NV: float32.
        log_total_N: float32, logsumexp of each row.
        num_top: how many, at most V.

    Returns:
        ids, int64 [N, num_top]; logprobs, float32 [N, num_top].
    """
    return sampling.top_logprobs(logits_NV, log_total_N, num_top)
