"""Truncation and the draw follow the documented rules, ties included."""

import numpy as np
import pytest

from tests.support.noise import gumbel, random_words
from tests.support.sampling import Rules, draw, log_softmax, processed, support_of

KINDS = ("scaled", "raw", "truncated")


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def kept(logits: np.ndarray, **rules: float) -> list[int]:
    support = support_of(logits, **rules)
    return support.order[: support.size].tolist()


FOUR = logits_of(0.1, 0.4, 0.2, 0.3)
EQUAL = np.zeros(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("logits", "rules", "expected"),
    [
        (FOUR, {}, [1, 3, 2, 0]),
        (FOUR, {"top_k": 2}, [1, 3]),
        (FOUR, {"top_k": 99}, [1, 3, 2, 0]),
        (EQUAL, {"top_k": 3}, [0, 1, 2]),  # exactly k; the lower ids of equals
        (logits_of(0.2, 0.2, 0.4, 0.2), {"top_k": 2}, [2, 0]),
        (FOUR, {"top_p": 0.69}, [1, 3]),
        (FOUR, {"top_p": 0.71}, [1, 3, 2]),
        (FOUR, {"top_p": 1e-9}, [1]),  # at least one
        (EQUAL, {"top_p": 0.5}, [0, 1]),  # 0.5 lies before the third: not less than 0.5
        (EQUAL, {"top_p": 0.51}, [0, 1, 2]),
        (FOUR, {"min_p": 0.49}, [1, 3, 2]),
        (FOUR, {"min_p": 0.51}, [1, 3]),
        (FOUR, {"min_p": 1.0}, [1]),
        (EQUAL, {"min_p": 1.0}, [0, 1, 2, 3]),
        (FOUR, {"top_k": 2, "top_p": 0.55}, [1]),  # 0.4 / 0.7 = 0.571 once renormalised
        (FOUR, {"top_k": 3, "top_p": 0.8, "min_p": 0.74}, [1, 3]),
    ],
)
def test_truncation(logits, rules, expected):
    assert kept(logits, **rules) == expected


def test_truncation_equals_a_loop_over_tokens():
    rng = np.random.default_rng(0)
    for _ in range(200):
        logits = rng.normal(scale=2, size=rng.integers(1, 30)).astype(np.float32)
        top_k, top_p, min_p = int(rng.integers(1, 35)), rng.uniform(0.05, 1), rng.uniform(0, 0.3)
        ranked = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:top_k]
        weights = {t: np.exp(np.float64(logits[t])) for t in ranked}
        total, before, expected = sum(weights.values()), 0.0, []
        for token in ranked:
            if before < top_p and weights[token] >= min_p * weights[ranked[0]]:
                expected.append(token)
            before += weights[token] / total
        assert kept(logits, top_k=top_k, top_p=top_p, min_p=min_p) == expected


def test_margin_has_the_sign_of_the_support():
    rng = np.random.default_rng(1)
    for _ in range(100):
        logits = rng.normal(size=20).astype(np.float32)
        support = support_of(logits, top_k=12, top_p=rng.uniform(0.1, 1), min_p=0.1)
        assert (support.margin[: support.size] > 0).all()
        assert (support.margin[support.size :] < 0).all()


def test_greedy_takes_the_lower_id_of_equals_and_ignores_truncation_and_seed():
    logits = np.array([0.0, 2.0, 1.0, 2.0], dtype=np.float32)
    drawn = draw(logits, position=3, temperature=0, top_k=1, top_p=0.1, seed=7)
    assert (drawn.token_id, drawn.gap, drawn.border_gap) == (1, 0.0, np.inf)
    assert drawn.logprob == pytest.approx(log_softmax(logits)[1])


def test_draw_is_the_best_perturbed_score_of_the_support():
    logits = np.random.default_rng(2).normal(size=50).astype(np.float32)
    for position in range(100):
        drawn = draw(logits, position=position, temperature=0.7, top_k=5, seed=3, sample_index=4)
        scores = logits / np.float32(0.7) + gumbel(random_words(3, position, 4, 50))
        ranked = sorted(kept(logits, top_k=5), key=lambda t: -scores[t])
        assert drawn.token_id == ranked[0]
        assert drawn.gap == pytest.approx(scores[ranked[0]] - scores[ranked[1]])
        # Before truncation, at the temperature.
        assert drawn.logprob == pytest.approx(log_softmax(logits / 0.7)[ranked[0]], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_frequencies_match_softmax(temperature):
    logits = np.array([0.0, 1.5, -1.0, 0.3, 2.0, -0.5, 1.0, 0.7], dtype=np.float32)
    tokens = [
        draw(logits, position=i % 50, seed=i // 50, temperature=temperature).token_id
        for i in range(2500)
    ]
    expected = np.exp(log_softmax(logits / temperature)) * len(tokens)
    counts = np.bincount(tokens, minlength=len(logits))
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees: p = 0.001


def test_frequencies_within_a_truncated_support():
    tokens = [draw(FOUR, position=i, top_k=2, seed=11).token_id for i in range(1500)]
    counts = np.bincount(tokens, minlength=4)
    assert counts[0] == counts[2] == 0
    assert counts[1] / len(tokens) == pytest.approx(4 / 7, abs=0.04)


def test_no_move_of_a_border_within_its_gap_changes_the_token():
    rng = np.random.default_rng(4)
    gaps = []
    for position in range(300):
        logits = rng.normal(size=30).astype(np.float32)
        top_p = rng.uniform(0.3, 0.9)
        drawn = draw(logits, position=position, top_p=top_p)
        gaps.append(drawn.border_gap)
        for moved in (top_p - 0.999 * drawn.border_gap, top_p + 0.999 * drawn.border_gap):
            if 0 < moved <= 1:
                assert draw(logits, position=position, top_p=moved).token_id == drawn.token_id
    assert min(gaps) < 0.01  # the rule was put to the test


def test_border_gap_sees_a_tie_at_the_border_only_if_it_matters():
    logits = np.array([1.0, 0.5, 0.5 - 1e-6, -9.0], dtype=np.float32)
    close = {draw(logits, position=i, top_k=2).border_gap < 1e-4 for i in range(50)}
    assert close == {True, False}
    for position in range(50):
        drawn = draw(logits, position=position, top_k=2)
        swapped = draw(logits[[0, 2, 1, 3]], position=position, top_k=2)
        if drawn.border_gap > 1e-4:
            assert swapped.token_id == drawn.token_id


# -- penalties, biases, kinds ---------------------------------------------------------------


def test_processing_goes_in_the_documented_order():
    logits = np.array([2.0, -2.0, 1.0, 0.5], dtype=np.float32)
    rules = Rules(
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        logit_bias={3: 5.0, 0: 1.0},
        min_new_tokens=4,
        held_ids=frozenset({3}),
    )
    got = processed(logits, rules, prompt_ids=[0, 0], output_ids=[1, 1, 2])
    # 2 / 2 + 1; -2 * 2 - 2 * 0.25 - 0.5; 1 / 2 - 0.25 - 0.5; held back, its bias notwithstanding
    assert got.tolist() == [2.0, -5.0, -0.25, -np.inf]
    later = processed(logits, rules, prompt_ids=[0], output_ids=[1, 1, 2, 2])
    assert later[3] == 5.5 and later[2] == 0.5 - 2 * 0.25 - 0.5
    assert processed(logits, Rules(), [0, 1], [2]).tolist() == logits.tolist()


def test_each_kind_is_the_log_softmax_of_its_own_logits():
    logits = np.random.default_rng(1).normal(size=30).astype(np.float32)
    rules = {"temperature": 0.5, "top_k": 4, "logit_bias": {3: 2.0}, "seed": 1}
    drawn = {kind: draw(logits, position=2, kind=kind, **rules) for kind in KINDS}
    assert len({d.token_id for d in drawn.values()}) == 1
    biased = logits.copy()
    biased[3] += 2
    np.testing.assert_allclose(drawn["raw"].reported, log_softmax(logits))
    np.testing.assert_allclose(drawn["scaled"].reported, log_softmax(biased / 0.5), atol=1e-6)
    inside = np.isfinite(drawn["truncated"].reported)
    assert inside.sum() == 4 and np.exp(drawn["truncated"].reported).sum() == pytest.approx(1)
    for kind in KINDS:
        assert drawn[kind].logprob == drawn[kind].reported[drawn[kind].token_id]


def test_a_held_back_token_is_never_drawn_and_never_makes_a_gap_nan():
    rng = np.random.default_rng(2)
    for position in range(200):
        logits = rng.normal(size=12).astype(np.float32)
        drawn = draw(
            logits,
            position=position,
            min_new_tokens=1,
            held_ids=frozenset(range(6)),
            top_k=int(rng.integers(1, 13)),
            top_p=float(rng.uniform(0.3, 1)),
            min_p=0.01,
        )
        assert drawn.token_id >= 6
        assert not np.isnan([drawn.gap, drawn.border_gap, drawn.support_gap]).any()


def test_no_move_within_the_support_gap_changes_the_support():
    rng = np.random.default_rng(3)
    for position in range(200):
        logits = rng.normal(size=20).astype(np.float32)
        top_p = rng.uniform(0.3, 0.9)
        drawn = draw(logits, position=position, top_p=top_p, kind="truncated")
        for moved in (top_p - 0.99 * drawn.support_gap, top_p + 0.99 * drawn.support_gap):
            if 0 < moved < 1:
                other = draw(logits, position=position, top_p=moved, kind="truncated")
                np.testing.assert_array_equal(other.reported, drawn.reported)


def test_noise_scale_is_what_a_request_makes_of_an_error():
    assert Rules().noise_scale == Rules(temperature=0).noise_scale == 1
    assert Rules(temperature=0.5, repetition_penalty=0.25).noise_scale == 8
    assert Rules(temperature=2.0, repetition_penalty=3.0).noise_scale == 3
