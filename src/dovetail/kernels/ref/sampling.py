"""The one sampler in plain torch: logits to tokens, logprobs and a status per row.

A draw is the argmax of perturbed scores (the Gumbel-max trick), and the noise is a
pure function of (seed, position, token): a draw depends neither on the batch nor on
the order of steps, and anybody can repeat it. Noise: Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Shape legend: N rows that sample, V vocabulary, B = ceil(V / 4) Philox blocks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.kernels import masses

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10

KIND_SCALED, KIND_RAW, KIND_TRUNCATED = 0, 1, 2
STATUS_OK, STATUS_NON_FINITE, STATUS_EMPTY_SUPPORT = 0, 1, 2


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the four output words of Philox4x32-10.

    Args:
        counter: four int64 tensors holding uint32 words, broadcastable.
        key: two int64 tensors holding uint32 words, broadcastable.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # An int64 product may wrap below zero; shift and mask still read its upper 32 bits.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _MASK32, (product1 >> 32) & _MASK32
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK32, high0 ^ c3 ^ k1, product0 & _MASK32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK32, (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def gumbel_noise(
    seed_N: Tensor, position_N: Tensor, sample_index_N: Tensor, *, vocab_size: int
) -> Tensor:
    """Return Gumbel(0, 1) noise for every token of every row.

    The key is the 64-bit seed (low word first), the counter is (token id // 4,
    absolute position, sample index, 0), the word is token id % 4. A word x becomes
    u = (x + 0.5) * 2^-32 and g = -log(-log1p(-u)), all in float32; u = 1 gives
    -inf, which becomes the least finite number.

    Args:
        seed_N: int64, the bit pattern of the seed.
        position_N: int64, the index that the drawn token will have in its sequence.
        sample_index_N: int64.
        vocab_size: V.

    Returns:
        float32 [N, V].
    """
    blocks = torch.arange(-(-vocab_size // 4), device=seed_N.device)
    zero = seed_N.new_zeros(1, 1)
    words = philox4x32(
        (blocks[None, :], position_N[:, None], sample_index_N[:, None], zero),
        (seed_N[:, None] & _MASK32, (seed_N[:, None] >> 32) & _MASK32),
    )
    x_NV = torch.stack(words, dim=-1).view(len(seed_N), -1)[:, :vocab_size]
    u_NV = (x_NV.to(torch.float32) + 0.5) * 2.0**-32
    # Kept finite: a token that is the only one left is drawn whatever its noise.
    return (-torch.log(-torch.log1p(-u_NV))).clamp_(min=torch.finfo(torch.float32).min)


def depths(scaled_NV: Tensor, top_N: Tensor) -> Tensor:
    """Return how far below the likeliest token each is, int64 [N, V]; see ``kernels.masses``."""
    steps_NV = (top_N[:, None] - scaled_NV) * masses.STEPS_PER_NAT
    return torch.where(steps_NV < masses.DEEPEST, steps_NV, masses.DEEPEST).to(torch.int64)


def masses_of(depth_NV: Tensor) -> Tensor:
    """Return the mass at each depth, int64; see ``kernels.masses``."""
    part_NV = depth_NV & ((1 << masses.STEP_BITS) - 1)
    *others, last = masses.COEFFICIENTS
    mass_NV = torch.full_like(depth_NV, last)
    for coefficient in reversed(others):
        mass_NV = coefficient - mass_NV.mul_(part_NV).bitwise_right_shift_(masses.STEP_BITS)
    octaves_NV = (depth_NV >> masses.STEP_BITS).clamp_(max=63)
    mass_NV.bitwise_left_shift_(masses.MASS_BITS - 30)
    return mass_NV.bitwise_right_shift_(octaves_NV)


def support_mask(scaled_NV: Tensor, *, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """See ``kernels.api.support_mask``."""
    sorted_NV, order_NV = torch.sort(scaled_NV, dim=-1, descending=True, stable=True)
    top_N = sorted_NV[:, 0]
    rank_V = torch.arange(scaled_NV.shape[1], device=scaled_NV.device)
    keep_NV = (rank_V < top_k_N[:, None]) | (top_k_N[:, None] == 0)
    if (top_p_N < 1.0).any() or (min_p_N > 0.0).any():
        mass_NV = masses_of(depths(sorted_NV, top_N)).mul_(keep_NV)
        gathered_NV = mass_NV.cumsum(dim=-1)
        # In float64, where each operation has one result: a budget is the same on every device.
        budget_N = torch.ceil(top_p_N.double() * gathered_NV[:, -1].double()).to(torch.int64)
        budget_N.clamp_(min=1)  # float32 rounds a tiny share to nothing; the likeliest stays
        is_first_NV = gathered_NV.sub_(mass_NV) < budget_N[:, None]
        keep_NV &= is_first_NV.logical_or_(top_p_N[:, None] >= 1.0)
        least_N = torch.ceil(min_p_N.double() * 2**masses.MASS_BITS).to(torch.int64)
        keep_NV &= mass_NV >= least_N[:, None]
    keep_NV |= ~torch.isfinite(top_N)[:, None]  # such a row has failed, whatever is left of it
    return torch.zeros_like(keep_NV).scatter_(1, order_NV, keep_NV)


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
    """See ``kernels.api.penalize``."""
    ones_S = logits_NV.new_ones(len(row_S))
    count_NV = torch.zeros_like(logits_NV).index_put_((row_S, token_S), ones_S, accumulate=True)
    occurs_NV = count_NV > 0
    count_NV.zero_().index_put_((row_S, token_S), is_output_S.float(), accumulate=True)
    return penalize_counted(
        logits_NV,
        occurs_NV=occurs_NV,
        num_drawn_NV=count_NV,
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
    """See ``kernels.api.penalize_counted``."""
    factor_NV = torch.where(logits_NV > 0, 1 / repetition_N[:, None], repetition_N[:, None])
    out_NV = torch.where(occurs_NV, logits_NV * factor_NV, logits_NV)
    out_NV -= frequency_N[:, None] * num_drawn_NV
    out_NV -= presence_N[:, None] * (num_drawn_NV > 0)
    return out_NV


def add_bias(logits_NV: Tensor, *, row_B: Tensor, token_B: Tensor, value_B: Tensor) -> Tensor:
    """See ``kernels.api.add_bias``."""
    return logits_NV.index_put((row_B, token_B), value_B, accumulate=True)


class Draws(NamedTuple):
    """One draw a row.

    Attributes:
        ids_N: int64, the drawn tokens.
        logprobs_N: float32, of the reported kind.
        status_N: int64; the id of a row whose status is not 0 means nothing, but is a legal id.
        reported_NV: float32, the logits that reported logprobs are the log-softmax of.
        log_total_N: float32, their logsumexp.
        scaled_NV: float32, what was drawn from: ``logits / temperature``, before truncation.
        outside_NV: bool, what truncation cut off; None if no row was truncated.
    """

    ids_N: Tensor
    logprobs_N: Tensor
    status_N: Tensor
    reported_NV: Tensor
    log_total_N: Tensor
    scaled_NV: Tensor
    outside_NV: Tensor | None


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
    """See ``kernels.api.sample``."""
    is_greedy_N = temperature_N == 0
    drawn = torch.nonzero(~is_greedy_N).view(-1)
    scaled_NV = logits_NV
    if len(drawn):
        scaled_NV = logits_NV / torch.where(is_greedy_N, 1.0, temperature_N)[:, None]
    scores_NV, reported_NV = scaled_NV, scaled_NV
    if len(drawn):
        noise_DV = gumbel_noise(
            seed_N[drawn],
            position_N[drawn],
            sample_index_N[drawn],
            vocab_size=logits_NV.shape[1],
        )
        scores_NV = scaled_NV.index_add(0, drawn, noise_DV)
    truncates_N = (top_k_N > 0) | (top_p_N < 1.0) | (min_p_N > 0.0)
    outside_NV: Tensor | None = None
    cut = torch.nonzero(truncates_N & ~is_greedy_N).view(-1)
    if len(cut):
        support_CV = support_mask(
            scaled_NV[cut], top_k_N=top_k_N[cut], top_p_N=top_p_N[cut], min_p_N=min_p_N[cut]
        )
        outside_NV = torch.zeros_like(scaled_NV, dtype=torch.bool).index_copy_(0, cut, ~support_CV)
        scores_NV = scores_NV.masked_fill(outside_NV, -torch.inf)
        is_truncated_N = logprob_kind_N == KIND_TRUNCATED
        reported_NV = scaled_NV.masked_fill(outside_NV & is_truncated_N[:, None], -torch.inf)
    is_raw_N = logprob_kind_N == KIND_RAW
    if is_raw_N.any():
        reported_NV = torch.where(is_raw_N[:, None], raw_NV, reported_NV)
    best_N, ids_N = scores_NV.max(dim=-1)
    log_total_N = torch.logsumexp(reported_NV, dim=-1)
    logprobs_N = reported_NV.gather(1, ids_N[:, None]).view(-1) - log_total_N
    is_finite_N = torch.isfinite(log_total_N) & ~torch.isnan(best_N)
    status_N = torch.where(is_finite_N, STATUS_OK, STATUS_NON_FINITE)
    is_empty_N = best_N == -torch.inf
    if is_empty_N.any():  # whoever took the last token away, it was not the model
        is_empty_N &= torch.isfinite(raw_NV.max(dim=-1).values)
        status_N = torch.where(is_empty_N, STATUS_EMPTY_SUPPORT, status_N)
    return Draws(
        ids_N,
        logprobs_N,
        status_N,
        reported_NV,
        log_total_N,
        scaled_NV,
        outside_NV,
    )


def sample_greedy(logits_NV: Tensor) -> Draws:
    """See ``kernels.api.sample_greedy``."""
    best_N, ids_N = logits_NV.max(dim=-1)
    log_total_N = torch.logsumexp(logits_NV, dim=-1)
    is_finite_N = torch.isfinite(log_total_N) & ~torch.isnan(best_N)
    status_N = torch.where(is_finite_N, STATUS_OK, STATUS_NON_FINITE)
    return Draws(ids_N, best_N - log_total_N, status_N, logits_NV, log_total_N, logits_NV, None)


def top_logprobs(logits_NV: Tensor, log_total_N: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """See ``kernels.api.top_logprobs``."""
    vocab_size = logits_NV.shape[-1]
    # torch.topk leaves open which of equal ones it takes, so each gets a number of its own: the
    # logit's bits as an integer of the same order, then the id from behind. Of the two zeros, one.
    bits_NV = (logits_NV + 0.0).view(torch.int32)
    ranks_NV = (bits_NV ^ ((bits_NV >> 31) & 0x7FFFFFFF)).long()
    ranks_NV <<= 32
    ranks_NV += torch.arange(vocab_size - 1, -1, -1, device=logits_NV.device)
    ids_NK = vocab_size - 1 - (torch.topk(ranks_NV, num_top, dim=-1).values & 0xFFFFFFFF)
    return ids_NK, logits_NV.gather(-1, ids_NK) - log_total_N[:, None]
