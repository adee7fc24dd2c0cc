"""From one row of logits to one token, by the documented rules, in plain numpy.

Owns penalties, biases, truncation, the draw, what is reported of it, and how near it was to another
outcome. Must not know models or the package under test.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Rules:
    """How one request draws; a name means what it means to clients.

    Attributes:
        held_ids: ids that cannot be drawn before ``min_new_tokens`` were: those that end it.
        kind: which logprobs are reported: ``scaled``, ``raw`` or ``truncated``.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
    held_ids: frozenset[int] = frozenset()
    seed: int = 0
    sample_index: int = 0
    kind: str = "scaled"

    @property
    def noise_scale(self) -> float:
        """By how much these rules can enlarge an error of a logit."""
        largest = max(self.repetition_penalty, 1 / self.repetition_penalty)
        return largest / min(self.temperature or 1.0, 1.0)


class Draw(NamedTuple):
    """One drawn token.

    Attributes:
        token_id: the token.
        logprob: what is reported of it.
        gap: best minus second best score in the support; inf if it holds one token only.
        border_gap: the least move of a support border that changes the token; inf if none does.
        support_gap: the least move of a border that changes the support at all.
        reported: float64 ``[V]``, what is reported of each token; -inf where there is nothing.
    """

    token_id: int
    logprob: float
    gap: float
    border_gap: float
    support_gap: float
    reported: np.ndarray


def log_softmax(scaled: np.ndarray) -> np.ndarray:
    """Log-softmax over the last axis, in float64. Some, not all, may be -inf."""
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
        with np.errstate(invalid="ignore"):  # two tokens at -inf: neither is ever drawn
            steps = np.where(rank < count, ranked - ranked[count], ranked[count - 1] - ranked)
        return np.where(np.isnan(steps), np.inf, steps)

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


def processed(
    logits: np.ndarray, rules: Rules, prompt_ids: Sequence[int], output_ids: Sequence[int]
) -> np.ndarray:
    """Return the logits as they are drawn from, at temperature 1: float32 ``[V]``.

    In this order: repetition, over prompt and output; frequency and presence, over the output;
    biases; and -inf for the held ids while the output is shorter than ``min_new_tokens``.
    """
    out = logits.copy()
    for token in {*prompt_ids, *output_ids}:
        penalty = np.float32(rules.repetition_penalty)
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token, count in Counter(output_ids).items():
        out[token] -= np.float32(rules.frequency_penalty) * np.float32(count)
        out[token] -= np.float32(rules.presence_penalty)
    for token, bias in rules.logit_bias.items():
        out[token] += np.float32(bias)
    if len(output_ids) < rules.min_new_tokens:
        out[list(rules.held_ids)] = -np.inf
    return out


def draw(
    logits: np.ndarray,
    *,
    position: int,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    rules: Rules | None = None,
    **fields: object,
) -> Draw:
    """Draw the token at ``position`` from float32 logits ``[V]``; temperature 0 is greedy.

    ``rules``, or their fields as keywords. Penalties look at ``prompt_ids`` and ``output_ids``.
    """
    rules = rules or Rules(**fields)  # type: ignore[arg-type]
    final = processed(logits, rules, prompt_ids, output_ids)
    if rules.temperature == 0:
        scaled = scores = final
        support = support_of(scaled)
    else:
        scaled = final / np.float32(rules.temperature)
        noise = gumbel(random_words(rules.seed, position, rules.sample_index, len(logits)))
        scores = scaled + noise
        support = support_of(scaled, top_k=rules.top_k, top_p=rules.top_p, min_p=rules.min_p)
    order, size, margin = support
    inside = np.sort(order[:size])  # ascending, so that argmax gives ties to the lower id
    token_id = int(inside[np.argmax(scores[inside])])
    best = scores[token_id]
    others = scores[inside[inside != token_id]]
    # The token changes if it leaves the support, or if one outside that beats it comes in.
    outside_better = -margin[size:][scores[order[size:]] > best]
    border_gap = min(margin[order == token_id][0], outside_better.min(initial=np.inf))
    reported = _reported(logits, scaled, support, rules.kind)
    return Draw(
        token_id,
        float(reported[token_id]),
        float(best - others.max()) if len(others) else np.inf,
        float(border_gap),
        float(np.abs(margin[np.isfinite(scaled[order])]).min()),
        reported,
    )


def _reported(logits: np.ndarray, scaled: np.ndarray, support: Support, kind: str) -> np.ndarray:
    if kind == "raw":
        return log_softmax(logits)
    if kind == "truncated":
        inside = np.full_like(scaled, -np.inf)
        kept = support.order[: support.size]
        inside[kept] = scaled[kept]
        return log_softmax(inside)
    assert kind == "scaled", kind
    return log_softmax(scaled)
