"""Draws from what penalties, biases and truncation leave: the plain draw with a border.

As ``kernels.triton.sampling``, on rows that come from one of two tensors, and with logprobs of
several kinds. What is reported may be another distribution than what is drawn from, so both are
followed.

Shape legend: N rows that sample, V vocabulary, S programs of a row.
"""

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels.backend import Borders, PlainDraws, ShapedLogits
from dovetail.kernels.ref.sampling import KIND_RAW, KIND_TRUNCATED
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.ranking import is_outside, row_of
from dovetail.kernels.triton.sampling import gumbel, random_words, uniform
from dovetail.kernels.triton.tiles import SampleTiles, ceil_div, power_of_two

_RAW, _TRUNCATED = tl.constexpr(KIND_RAW), tl.constexpr(KIND_TRUNCATED)
_SPREAD = 1024
"""Tokens of a row that one program spreads, or looks through in a turn."""


@jit
def _may_win(x, u, leader):
    """Return whether any token of a turn can reach the score ``leader``; True if in doubt.

    It takes ``-log1p(-u) <= exp(x - leader)``, and u is less than that. A hundredth is left for
    rounding, which is less while scores are below 2^16.
    """
    in_reach = u <= tl.exp(x - leader) * 1.01
    return (tl.abs(leader) > 65536.0) | (tl.max(in_reach.to(tl.int32), axis=0) > 0)


@jit
def _draw_kernel(
    logits_ptr, changed_ptr, is_changed_ptr, least_ptr, last_ptr, temperature_ptr, seed_ptr,
    position_ptr, index_ptr, kind_ptr, score_ptr, id_ptr, top_ptr, total_ptr, row_stride, VOCAB,
    PER_SPLIT, BLOCK: tl.constexpr,
):  # fmt: skip
    """As the plain one; ``x`` is drawn from, and the logsumexp is that of what is reported."""
    row, split = tl.program_id(0), tl.program_id(1)
    temperature, kind = tl.load(temperature_ptr + row), tl.load(kind_ptr + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    seed, position, sample_index = (
        tl.load(seed_ptr + row), tl.load(position_ptr + row), tl.load(index_ptr + row),
    )  # fmt: skip
    least, last = tl.load(least_ptr + row), tl.load(last_ptr + row)
    row_ptr = row_of(logits_ptr, changed_ptr, is_changed_ptr, row, row_stride)
    lane = tl.arange(0, BLOCK)
    best, best_id = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    top, leader = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
    origin, total = tl.full((), 0.0, tl.float32), tl.zeros((BLOCK,), tl.float32)
    begin = split * PER_SPLIT
    for first in range(begin, tl.minimum(begin + PER_SPLIT, VOCAB), BLOCK):
        token = first + lane
        is_there = token < VOCAB
        x = tl.load(row_ptr + token, mask=is_there, other=float("-inf"))
        x = tl.math.div_rn(x, divisor)
        reported, cut = x, tl.where(is_outside(x, token, least, last), float("-inf"), x)
        if kind == _RAW:
            place = logits_ptr + row.to(tl.int64) * row_stride + token
            reported = tl.load(place, mask=is_there, other=float("-inf"))
        if kind == _TRUNCATED:
            reported = cut
        x = cut
        above = tl.maximum(top, tl.max(reported, axis=0))
        origin = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(top - origin) + tl.exp(reported - origin)
        top = above
        if temperature == 0.0:
            is_better = x > best  # never true of NaN; of equal scores the first stays
            best, best_id = tl.where(is_better, x, best), tl.where(is_better, token, best_id)
        elif (tl.abs(leader) > 65536.0) | (tl.max(x, axis=0) > leader - 24.0):  # noise is below 23
            u = uniform(random_words(seed, position, sample_index, first, BLOCK))
            if _may_win(x, u, leader):
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
def _is_finite_row(ptr, VOCAB, BLOCK: tl.constexpr):
    """Return whether the largest logit of a row is finite; a NaN counts as the largest."""
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, VOCAB, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(ptr + token, mask=token < VOCAB, other=float("-inf"))
        most = tl.maximum(most, tl.where(x != x, float("inf"), x))
    return tl.abs(tl.max(most, axis=0)) < float("inf")


@jit
def _join_kernel(
    logits_ptr, changed_ptr, is_changed_ptr, temperature_ptr, kind_ptr, score_ptr, id_ptr, top_ptr,
    total_ptr, ids_ptr, logprobs_ptr, status_ptr, log_total_ptr, row_stride, VOCAB, SPLITS,
    TURN: tl.constexpr, BLOCK: tl.constexpr,
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
    best = tl.max(score, axis=0)
    chosen = tl.min(tl.where(score == best, token, 2147483647), axis=0)
    raw_ptr = logits_ptr + row.to(tl.int64) * row_stride
    temperature, kind = tl.load(temperature_ptr + row), tl.load(kind_ptr + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    row_ptr = row_of(logits_ptr, changed_ptr, is_changed_ptr, row, row_stride)
    logit = tl.math.div_rn(tl.load(row_ptr + chosen), divisor)
    logit = tl.where(kind == _RAW, tl.load(raw_ptr + chosen), logit)
    status = tl.where(tl.abs(log_total) < float("inf"), 0, 1)
    if best == float("-inf"):  # whoever took the last token away, it was not the model
        status = tl.where(_is_finite_row(raw_ptr, VOCAB, TURN), 2, status)
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    tl.store(logprobs_ptr + row, logit - log_total)
    tl.store(log_total_ptr + row, log_total)
    tl.store(status_ptr + row, status.to(tl.int64))


@jit
def _spread_kernel(
    logits_ptr, changed_ptr, is_changed_ptr, least_ptr, last_ptr, temperature_ptr, kind_ptr,
    scaled_ptr, reported_ptr, outside_ptr, row_stride, VOCAB, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one row."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there, place = token < VOCAB, row.to(tl.int64) * row_stride + token
    temperature, kind = tl.load(temperature_ptr + row), tl.load(kind_ptr + row)
    row_ptr = row_of(logits_ptr, changed_ptr, is_changed_ptr, row, row_stride)
    raw = tl.load(logits_ptr + place, mask=is_there, other=0.0)
    x = tl.load(row_ptr + token, mask=is_there, other=0.0)
    x = tl.math.div_rn(x, tl.where(temperature == 0.0, 1.0, temperature))
    outside = is_outside(x, token, tl.load(least_ptr + row), tl.load(last_ptr + row))
    reported = tl.where(outside & (kind == _TRUNCATED), float("-inf"), x)
    tl.store(scaled_ptr + place, x, mask=is_there)
    tl.store(reported_ptr + place, tl.where(kind == _RAW, raw, reported), mask=is_there)
    tl.store(outside_ptr + place, outside.to(tl.uint8), mask=is_there)


def sample_shaped(
    logits: ShapedLogits,
    borders: Borders,
    *,
    temperature_N: Tensor,
    seed_N: Tensor,
    position_N: Tensor,
    sample_index_N: Tensor,
    logprob_kind_N: Tensor,
    tiles: SampleTiles,
) -> PlainDraws:
    """See ``kernels.backend.Kernels.sample_shaped``."""
    num_rows, vocab_size = logits.raw_NV.shape
    stride = logits.raw_NV.stride(0)
    assert stride == logits.changed_NV.stride(0) == vocab_size
    per_split = ceil_div(ceil_div(vocab_size, tiles.num_splits), tiles.tokens) * tiles.tokens
    num_splits = ceil_div(vocab_size, per_split)
    new = logits.raw_NV.new_empty
    floats_NS = [new(num_rows, num_splits, dtype=torch.float32) for _ in range(3)]
    score_NS, top_NS, total_NS = floats_NS
    id_NS = new(num_rows, num_splits, dtype=torch.int32)
    draws = PlainDraws(
        ids_N=new(num_rows, dtype=torch.int64),
        logprobs_N=new(num_rows, dtype=torch.float32),
        status_N=new(num_rows, dtype=torch.int64),
        log_total_N=new(num_rows, dtype=torch.float32),
    )
    _draw_kernel[(num_rows, num_splits)](
        *logits, *borders, temperature_N, seed_N, position_N, sample_index_N, logprob_kind_N,
        score_NS, id_NS, top_NS, total_NS, stride, vocab_size, per_split,
        BLOCK=tiles.tokens, num_warps=tiles.num_warps,
    )  # fmt: skip
    _join_kernel[(num_rows,)](
        *logits, temperature_N, logprob_kind_N, score_NS, id_NS, top_NS, total_NS, *draws, stride,
        vocab_size, num_splits, TURN=_SPREAD, BLOCK=power_of_two(num_splits), num_warps=1,
    )  # fmt: skip
    return draws


def spread(
    logits: ShapedLogits, borders: Borders, *, temperature_N: Tensor, logprob_kind_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``kernels.backend.Kernels.spread``."""
    num_rows, vocab_size = logits.raw_NV.shape
    scaled_NV, reported_NV = torch.empty_like(logits.raw_NV), torch.empty_like(logits.raw_NV)
    outside_NV = torch.empty_like(logits.raw_NV, dtype=torch.bool)
    _spread_kernel[(num_rows, ceil_div(vocab_size, _SPREAD))](
        *logits, *borders, temperature_N, logprob_kind_N, scaled_NV, reported_NV,
        outside_NV.view(torch.uint8), logits.raw_NV.stride(0), vocab_size, BLOCK=_SPREAD,
    )  # fmt: skip
    return scaled_NV, reported_NV, outside_NV
