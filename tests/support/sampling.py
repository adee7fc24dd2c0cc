"""From one row of logits to one token, by the documented rules, in plain numpy.

Owns truncation, the draw, and how near the draw was to another outcome. Must not know models or
the package under test.
"""

from typing import NamedTuple

import numpy as np

from tests.support.noise import gumbel, random_words


class Support(NamedTuple):
    """The tokens that may be drawn.

    Attributes:
        order: int ``[V]``, token ids by probability descending, then id ascending.
        size: the support is ``order[:size]``.
        margin: float64 ``[V]``, by rank: how far the token is from crossing the border of the
            support, negative outside. Measured in logits / T (top-k, top-p, min-p) and in
            probability (top-p), whichever is less.
    """

    order: np.ndarray
    size: int
    margin: np.ndarray


class Draw(NamedTuple):
    """One drawn token.

    Attributes:
        token_id: the token.
        logprob: its log-probability at the request's temperature, before truncation.
        gap: best minus second best score in the support; inf if it holds one token only.
        border_gap: the least move of a support border that changes the token; inf if none does.
    """

    token_id: int
    logprob: float
    gap: float
    border_gap: float


def log_softmax(scaled: np.ndarray) -> np.ndarray:
    """Log-softmax over the last axis, in float64."""
    shifted = scaled.astype(np.float64) - scaled.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def support_of(
    scaled: np.ndarray, *, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> Support:
    """Truncate logits that are already divided by the temperature, float32 ``[V]``.

    Each rule keeps a beginning of the ranking: top-k exactly k tokens; top-p those with less than
    ``top_p`` of probability before them, renormalised after top-k; min-p those of at least
    ``min_p`` times the highest probability.
    """
    order = np.argsort(-scaled, kind="stable")
    ranked = scaled[order].astype(np.float64)
    rank = np.arange(len(ranked))
    size, margin = len(ranked), np.full(len(ranked), np.inf)

    def keep(count: int, distance: np.ndarray) -> None:
        nonlocal size, margin
        size = min(size, count)
        margin = np.minimum(margin, np.where(rank < count, distance, -distance))

    def swap_distance(count: int) -> np.ndarray:
        """What a token's logit has to change by to trade places with one across the border."""
        if count == len(ranked):
            return np.full(len(ranked), np.inf)
        return np.where(rank < count, ranked - ranked[count], ranked[count - 1] - ranked)

    if 0 < top_k < size:
        keep(top_k, swap_distance(top_k))
    if top_p < 1:
        probability = np.exp(log_softmax(ranked[:size]))
        before = np.ones(len(ranked))
        before[:size] = np.concatenate(([0.0], np.cumsum(probability)[:-1]))
        count = min(size, max(1, int((before < top_p).sum())))
        keep(count, np.minimum(np.abs(before - top_p), swap_distance(count)))
    if min_p > 0:
        ratio = ranked - ranked[0]
        keep(int((np.exp(ratio) >= min_p).sum()), np.abs(ratio - np.log(min_p)))
    return Support(order, size, margin)


def draw(
    logits: np.ndarray,
    *,
    position: int,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    sample_index: int = 0,
) -> Draw:
    """Draw the token at ``position`` from float32 logits ``[V]``; temperature 0 is greedy."""
    if temperature == 0:
        scaled = scores = logits
        support = support_of(scaled)
    else:
        scaled = logits / np.float32(temperature)
        scores = scaled + gumbel(random_words(seed, position, sample_index, len(logits)))
        support = support_of(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
    order, size, margin = support
    inside = np.sort(order[:size])  # ascending, so that argmax gives ties to the lower id
    token_id = int(inside[np.argmax(scores[inside])])
    best = scores[token_id]
    others = scores[inside[inside != token_id]]
    # The token changes if it leaves the support, or if one outside that beats it comes in.
    outside_better = -margin[size:][scores[order[size:]] > best]
    border_gap = min(margin[order == token_id][0], outside_better.min(initial=np.inf))
    return Draw(
        token_id,
        float(log_softmax(scaled)[token_id]),
        float(best - others.max()) if len(others) else np.inf,
        float(border_gap),
    )
