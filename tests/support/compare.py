"""Comparisons with the oracle, and the rule for ties.

Two right programs may differ where a choice hangs on rounding. A difference is excused only if it
is the first one and a choice on the way to it was nearer to another outcome than rounding is.
"""

from collections.abc import Sequence

import numpy as np

from dovetail.core.generation import Generation
from tests.support.oracle import OracleGeneration, Routing

# Measured on the random models here: logits of one token differ by up to 1e-5 between batch shapes
# and attention kernels of one library, router logits by up to 5e-6. A gap has twice that, and two
# programs have more.
SCORE_NOISE = 1e-4
ROUTER_NOISE = 3e-5


def assert_same_tokens(
    got_ids: Sequence[int],
    want: OracleGeneration,
    *,
    noise: float = SCORE_NOISE,
    router_noise: float = ROUTER_NOISE,
    context: str = "",
) -> int:
    """Check that the ids are the oracle's, up to a tie.

    Args:
        got_ids: the ids to check.
        want: the oracle's generation.
        noise: bound on rounding of logits; of scores at temperature T it is ``noise / T`` if
            T is less than 1, and a repetition penalty multiplies it. Applies to score gaps and to
            borders of the support.
        router_noise: bound on rounding of router logits.
        context: goes into the message.

    Returns:
        The number of equal tokens: ``len(want.token_ids)``, or less if a tie was met.
    """
    got, expected = tuple(got_ids), want.token_ids
    shared = min(len(got), len(expected))
    at = next((i for i in range(shared) if got[i] != expected[i]), shared)
    if at == shared:
        assert len(got) == len(expected), (
            f"{_heading(context)}{len(got)} tokens instead of {len(expected)} "
            f"(finish: {want.finish}); the first {shared} are equal"
        )
        return shared
    noise *= _noise_scale(want)
    gap, border, router = want.gaps[at], want.border_gaps[at], want.router_gaps[at]
    assert gap < noise or border < noise or router < router_noise, (
        f"{_heading(context)}token {at} (position {len(want.prompt_ids) + at}) is {got[at]} "
        f"instead of {expected[at]}, and no tie: score gap {gap:.3g}, border gap {border:.3g} "
        f"(noise {noise:.3g}), router gap {router:.3g} (noise {router_noise:.3g})\n"
        f"  got  {_window(got, at)}\n  want {_window(expected, at)}"
    )
    return at


def assert_follows(
    got_ids: Sequence[int],
    want: OracleGeneration,
    *,
    noise: float = SCORE_NOISE,
    router_noise: float = ROUTER_NOISE,
    context: str = "",
) -> list[int]:
    """Check each id against what ``Oracle.follow`` draws in its place, up to ties.

    As ``assert_same_tokens``, but a tie does not end the comparison.

    Returns:
        The positions where a tie was met.
    """
    assert len(got_ids) == len(want.token_ids), context
    different = [
        i for i, pair in enumerate(zip(got_ids, want.token_ids, strict=True)) if len(set(pair)) > 1
    ]
    for at in different:
        scaled = noise * _noise_scale(want)
        gap, border, router = want.gaps[at], want.border_gaps[at], want.router_gaps[at]
        assert gap < scaled or border < scaled or router < router_noise, (
            f"{_heading(context)}token {at} (position {len(want.prompt_ids) + at}) is "
            f"{got_ids[at]} instead of {want.token_ids[at]}, and no tie: score gap {gap:.3g}, "
            f"border gap {border:.3g} (noise {scaled:.3g}), router gap {router:.3g} "
            f"(noise {router_noise:.3g})\n"
            f"  got  {_window(tuple(got_ids), at)}\n  want {_window(want.token_ids, at)}"
        )
    return different


def assert_top(
    got_ids: Sequence[int],
    got_logprobs: Sequence[float],
    row: np.ndarray,
    *,
    num_top: int,
    tol: float = 1e-4,
    context: str = "",
) -> None:
    """Check one list of likeliest ids against the logprobs of all ids, ``row`` ``[V]``.

    Equal ones may stand in any order, and so may those that rounding can swap.
    """
    assert len(got_ids) == len(got_logprobs) == num_top == len(set(got_ids)), (context, got_ids)
    assert list(got_logprobs) == sorted(got_logprobs, reverse=True), (context, got_logprobs)
    for values in (row[list(got_ids)], np.sort(row)[::-1][:num_top]):
        is_close = np.isclose(got_logprobs, values, rtol=0, atol=tol)
        assert is_close.all(), f"{_heading(context)}top {got_ids} {got_logprobs} against {values}"


def assert_logprobs(
    got: Sequence[float], want: Sequence[float], tol: float = 1e-4, *, context: str = ""
) -> None:
    """Check that two rows of logprobs have one length and agree within ``tol``.

    The comparison ends where ``assert_same_tokens`` says: cut both rows to the count it returns.
    """
    got_n, want_n = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    assert got_n.shape == want_n.shape, (
        f"{_heading(context)}logprobs have shape {got_n.shape} instead of {want_n.shape}"
    )
    wrong = np.flatnonzero(~np.isclose(got_n, want_n, rtol=0, atol=tol))  # NaN is wrong too
    assert not len(wrong), (
        f"{_heading(context)}{len(wrong)} of {len(want_n)} logprobs differ by more than {tol:g}; "
        f"the first is number {wrong[0]}: {got_n[wrong[0]]!r} instead of {want_n[wrong[0]]!r}"
    )


def assert_same_generations(ours: Sequence[Generation], wanted: Sequence[Generation]) -> None:
    """Check that engines gave the same: ids and expert rows exactly, logprobs up to kernels."""
    for a, b in zip(ours, wanted, strict=True):
        assert a.token_ids == b.token_ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
        assert a.routes is not None and b.routes is not None
        assert np.array_equal(a.routes.ids, b.routes.ids)


def assert_same_routes(
    got: np.ndarray, want: Routing, *, noise: float = ROUTER_NOISE, context: str = ""
) -> None:
    """Check expert ids ``[T, L, K]`` against the oracle's: in order, up to router ties.

    A row whose order is a tie must hold the same set; a row whose set is a tie is passed over.
    """
    got = np.asarray(got)
    assert got.shape == want.expert_ids.shape, (
        f"{_heading(context)}expert ids have shape {got.shape} instead of {want.expert_ids.shape}"
    )
    same_order = (got == want.expert_ids).all(axis=-1)
    same_set = (np.sort(got, axis=-1) == np.sort(want.expert_ids, axis=-1)).all(axis=-1)
    excused = np.where(same_set, want.order_gaps < noise, want.gaps < noise)
    wrong = np.argwhere(~(same_order | excused))
    if len(wrong):
        token, layer = wrong[0]
        raise AssertionError(
            f"{_heading(context)}{len(wrong)} of {same_order.size} expert rows differ; the first "
            f"is token {token}, MoE layer {layer}: {got[token, layer]} instead of "
            f"{want.expert_ids[token, layer]} (gap {want.gaps[token, layer]:.3g}, order gap "
            f"{want.order_gaps[token, layer]:.3g}, noise {noise:.3g})"
        )


def _noise_scale(want: OracleGeneration) -> float:
    """By how much the request enlarges an error of a logit."""
    return want.noise_scale or 1 / min(want.temperature or 1.0, 1.0)


def _heading(context: str) -> str:
    return f"{context}: " if context else ""


def _window(ids: tuple[int, ...], at: int, width: int = 4) -> str:
    start = max(0, at - width)
    shown = [f"[{t}]" if i == at else str(t) for i, t in enumerate(ids)][start : at + width + 1]
    return (
        f"{'... ' if start else ''}{' '.join(shown)}{' ...' if at + width + 1 < len(ids) else ''}"
    )
