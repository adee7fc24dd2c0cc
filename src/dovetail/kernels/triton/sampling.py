"""Draws from logits as they are: one pass over the vocabulary, without a sort.

Several programs share a row, each with a run of the vocabulary; a second, small kernel joins what
they found. Noise: see ``kernels.api.sample``.

Shape legend: N rows that sample, V vocabulary, S programs of a row.
"""

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels.backend import PlainDraws
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import SampleTiles, ceil_div, power_of_two


@jit
def random_words(seed, position, sample_index, first_token, BLOCK: tl.constexpr):
    """Return the random words of BLOCK tokens, uint32; ``first_token`` is a multiple of 4."""
    block = (first_token // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros((BLOCK // 4,), tl.uint32)
    c1, c2 = zero + position.to(tl.uint32), zero + sample_index.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, block, c1, c2, zero)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@jit
def uniform(words):
    """Return u of random words, float32."""
    return (words.to(tl.float32) + 0.5) * 2.0**-32


@jit
def gumbel(u):
    """Return the Gumbel noise of u, float32.

    log1p(-u) is log(1 - u) times u / (1 - (1 - u)), which takes back what the subtraction rounded
    (Kahan); relative precision counts, for the least u win.
    """
    rest = 1.0 - u
    taken = 1.0 - rest
    exponential = tl.where(taken == 0.0, u, -tl.log(rest) * (u / taken))
    return tl.maximum(-tl.log(exponential), -3.4028234663852886e38)


@jit
def _may_win(u, share, origin, leader):
    """Return whether any token of a turn can reach the score ``leader``; True if in doubt.

    It takes ``-log1p(-u) <= exp(x - leader)``, and u is less than that; ``share`` is
    ``exp(x - origin)``. A hundredth is left for rounding, which is less while scores are below
    2^16; a share that is rounded to zero is out of reach while ``leader`` is not far below.
    """
    in_reach = u <= share * (tl.exp(origin - leader) * 1.01)
    is_unsure = (leader < origin - 60.0) | (tl.abs(origin) > 65536.0)
    return is_unsure | (tl.max(in_reach.to(tl.int32), axis=0) > 0)


@jit
def _draw_kernel(
    logits_ptr, temperature_ptr, seed_ptr, position_ptr, index_ptr,
    score_ptr, id_ptr, top_ptr, total_ptr, row_stride, VOCAB, PER_SPLIT, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best score, its token, and the terms of a logsumexp, over one run of the vocabulary.

    Most turns have no token that can win, and then the logarithms of its noise are left out.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    seed, position, sample_index = (
        tl.load(seed_ptr + row), tl.load(position_ptr + row), tl.load(index_ptr + row),
    )  # fmt: skip
    lane = tl.arange(0, BLOCK)
    best, best_id = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    top, leader = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    origin, total = tl.full((), 0.0, tl.float32), tl.zeros((BLOCK,), tl.float32)
    begin = split * PER_SPLIT
    for first in range(begin, tl.minimum(begin + PER_SPLIT, VOCAB), BLOCK):
        token = first + lane
        x = tl.load(
            logits_ptr + row.to(tl.int64) * row_stride + token,
            mask=token < VOCAB, other=float("-inf"),
        )  # fmt: skip
        x = tl.math.div_rn(x.to(tl.float32), divisor)
        above = tl.maximum(top, tl.max(x, axis=0))
        origin = tl.where(above == float("-inf"), 0.0, above)
        share = tl.exp(x - origin)
        total = total * tl.exp(top - origin) + share
        top = above
        if temperature == 0.0:
            is_better = x > best  # never true of NaN; of equal scores the first stays
            best, best_id = tl.where(is_better, x, best), tl.where(is_better, token, best_id)
        else:
            u = uniform(random_words(seed, position, sample_index, first, BLOCK))
            if _may_win(u, share, origin, leader):
                x += gumbel(u)
                is_better = x > best
                best, best_id = tl.where(is_better, x, best), tl.where(is_better, token, best_id)
                leader = tl.max(best, axis=0)
    score = tl.max(best, axis=0)
    cell = row * tl.num_programs(1) + split
    tl.store(score_ptr + cell, score)
    tl.store(id_ptr + cell, tl.min(tl.where(best == score, best_id, VOCAB), axis=0))
    tl.store(top_ptr + cell, origin)
    tl.store(total_ptr + cell, tl.sum(total, axis=0))


@jit
def _join_kernel(
    logits_ptr, temperature_ptr, score_ptr, id_ptr, top_ptr, total_ptr,
    ids_ptr, logprobs_ptr, status_ptr, log_total_ptr, row_stride, SPLITS, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    split = tl.arange(0, BLOCK)
    cell, is_real = row * SPLITS + split, split < SPLITS
    total = tl.load(total_ptr + cell, mask=is_real, other=0.0)
    top = tl.load(top_ptr + cell, mask=is_real & (total != 0.0), other=float("-inf"))
    origin = tl.max(top, axis=0)
    origin = tl.where(origin == float("-inf"), 0.0, origin)
    log_total = origin + tl.log(tl.sum(total * tl.exp(top - origin), axis=0))
    score = tl.load(score_ptr + cell, mask=is_real, other=float("-inf"))
    token = tl.load(id_ptr + cell, mask=is_real, other=2147483647)
    chosen = tl.min(tl.where(score == tl.max(score, axis=0), token, 2147483647), axis=0)
    temperature = tl.load(temperature_ptr + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    logit = tl.load(logits_ptr + row.to(tl.int64) * row_stride + chosen).to(tl.float32)
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    tl.store(logprobs_ptr + row, tl.math.div_rn(logit, divisor) - log_total)
    tl.store(log_total_ptr + row, log_total)
    is_finite = tl.abs(log_total) < float("inf")
    tl.store(status_ptr + row, tl.where(is_finite, 0, 1).to(tl.int64))


def sample_plain(
    logits_NV: Tensor,
    *,
    temperature_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
    sample_index_N: Tensor,
    tiles: SampleTiles,
) -> PlainDraws:
    """See ``kernels.backend.Kernels.sample_plain``."""
    num_rows, vocab_size = logits_NV.shape
    assert logits_NV.stride(1) == 1
    per_split = ceil_div(ceil_div(vocab_size, tiles.num_splits), tiles.tokens) * tiles.tokens
    num_splits = ceil_div(vocab_size, per_split)
    floats_NS = [logits_NV.new_empty(num_rows, num_splits, dtype=torch.float32) for _ in range(3)]
    score_NS, top_NS, total_NS = floats_NS
    id_NS = logits_NV.new_empty(num_rows, num_splits, dtype=torch.int32)
    draws = PlainDraws(
        ids_N=logits_NV.new_empty(num_rows, dtype=torch.int64),
        logprobs_N=logits_NV.new_empty(num_rows, dtype=torch.float32),
        status_N=logits_NV.new_empty(num_rows, dtype=torch.int64),
        log_total_N=logits_NV.new_empty(num_rows, dtype=torch.float32),
    )
    if not num_rows:
        return draws
    stride = logits_NV.stride(0)
    _draw_kernel[(num_rows, num_splits)](
        logits_NV, temperature_N, seed_N, position_N, sample_index_N,
        score_NS, id_NS, top_NS, total_NS, stride, vocab_size, per_split,
        BLOCK=tiles.tokens, num_warps=tiles.num_warps,
    )  # fmt: skip
    _join_kernel[(num_rows,)](
        logits_NV, temperature_N, score_NS, id_NS, top_NS, total_NS, *draws, stride, num_splits,
        BLOCK=power_of_two(num_splits), num_warps=1,
    )  # fmt: skip
    return draws
