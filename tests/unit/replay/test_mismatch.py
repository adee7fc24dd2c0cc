"""The measures against values worked out by hand and in another way, and their intervals."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from dovetail.replay.mismatch import measure_mismatch, ratio_interval, survival

# Two sequences, of two and three tokens that count: D = log 2, -log 2; log 4, 0, -log 2.
ROLLOUT = np.log([[0.25, 0.5, 0.9], [0.125, 0.5, 0.5]])
TRAIN = np.log([[0.5, 0.25, 0.9], [0.5, 0.5, 0.25]])
MASK = np.array([[1, 1, 0], [1, 1, 1]])
LOG2 = math.log(2)

GOLDEN = {
    # sums of D: (1 - 1 + 2 + 0 - 1) log 2
    "k1": -LOG2 / 5,
    # squares: (1 + 1 + 4 + 0 + 1) log 2 ^ 2
    "k2": 7 * LOG2**2 / 10,
    # exp(D): 2, 1/2, 4, 1, 1/2
    "k3": float(Fraction(8 - 5, 5)) - LOG2 / 5,
    "mean_abs": 5 * LOG2 / 5,
    "max_abs": 2 * LOG2,
    # exp(2 D): 4, 1/4, 16, 1, 1/4
    "chi2": float(Fraction(43, 2) / 5 - 1),
    "ess": float(Fraction(64) / (5 * Fraction(43, 2))),
    # exp(sum D): 1 and 2
    "sequence_ess": float(Fraction(9, 2 * 5)),
    "sequence_log_ratio": LOG2 / 2,
    "geometric_log_ratio": (0 + LOG2 / 3) / 2,
    "bit_mismatch": 4 / 5,
}
TAIL = {1.5: 4 / 5, 2.5: 1 / 5, 4.5: 0.0}


def test_each_measure_is_what_is_worked_out_by_hand():
    found = measure_mismatch(TRAIN, ROLLOUT, mask=MASK, taus=tuple(TAIL))
    for name, value in GOLDEN.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    assert found.tail == pytest.approx(TAIL)
    assert (found.num_tokens, found.num_sequences) == (5, 2)
    p, q = np.exp(TRAIN)[MASK == 1], np.exp(ROLLOUT)[MASK == 1]
    assert found.prob_corr == pytest.approx(np.corrcoef(p, q)[0, 1], rel=1e-12)
    assert found.value("F(2.5)") == pytest.approx(0.2)


def test_packed_tokens_are_the_same_as_rows():
    rows = measure_mismatch(TRAIN, ROLLOUT, mask=MASK)
    packed = measure_mismatch(
        TRAIN[MASK == 1], ROLLOUT[MASK == 1], sequences=np.array([7, 7, 3, 3, 3])
    )
    for name in GOLDEN:
        assert getattr(packed, name) == pytest.approx(getattr(rows, name), rel=1e-12)


def test_what_does_not_count_may_be_anything():
    train = TRAIN.copy()
    train[0, 2] = np.nan
    assert measure_mismatch(train, ROLLOUT, mask=MASK).k3 == pytest.approx(GOLDEN["k3"])


def test_a_tiny_difference_is_not_rounded_away():
    diff = 1e-8
    rollout = np.full((3, 40), -1.0)
    found = measure_mismatch(rollout + diff, rollout)
    assert found.k3 == pytest.approx(diff**2 / 2, rel=1e-3, abs=0)


def test_equal_bits_and_equal_values_are_told_apart():
    a = np.full((2, 3), np.float32(-0.3))
    b = a.copy()
    b[1, 2] = np.nextafter(b[1, 2], np.float32(0))
    assert measure_mismatch(a, a).bit_mismatch == 0
    assert measure_mismatch(a, b).bit_mismatch == pytest.approx(1 / 6)


def test_a_long_sequence_far_away_does_not_overflow():
    rollout = np.full((2, 3000), -0.5)
    found = measure_mismatch(rollout + 0.4, rollout)
    assert found.sequence_log_ratio == pytest.approx(1200)
    assert found.sequence_ess == pytest.approx(1)


def test_intervals_are_those_of_resampled_sequences():
    """Against a loop that draws sequences and measures the joined tokens afresh."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(5, 30, size=25)
    noise = [rng.normal(0, 0.05 * (1 + number % 4), size=n) for number, n in enumerate(lengths)]
    rollout = [np.log(rng.uniform(0.05, 0.9, size=n)) for n in lengths]
    train = [a + b for a, b in zip(rollout, noise, strict=True)]
    number = np.repeat(np.arange(len(lengths)), lengths)
    found = measure_mismatch(np.concatenate(train), np.concatenate(rollout), sequences=number)
    names = ("k3", "mean_abs", "F(1.1)", "ess", "max_abs", "prob_corr")
    values: list[list[float]] = []
    for _ in range(600):
        drawn = rng.integers(0, len(lengths), size=len(lengths))
        once = measure_mismatch(
            np.concatenate([train[at] for at in drawn]),
            np.concatenate([rollout[at] for at in drawn]),
            sequences=np.repeat(np.arange(len(drawn)), lengths[drawn]),
            num_resamples=1,
        )
        values.append([once.value(name) for name in names])
    for name, drawn in zip(names, np.array(values).T, strict=True):
        low, high = np.quantile(drawn, (0.025, 0.975))
        assert found.intervals[name] == pytest.approx((low, high), abs=0.2 * (high - low)), name
        assert found.intervals[name][0] <= found.value(name) <= found.intervals[name][1], name


def test_a_ratio_is_paired():
    """Two arms with the same hard sequences: the ratio is known far better than either."""
    rng = np.random.default_rng(2)
    scale = rng.exponential(size=(40, 1)) ** 2
    rollout = np.full((40, 20), -1.0)
    noise = scale * rng.normal(0, 0.01, size=rollout.shape)
    off = measure_mismatch(rollout + noise, rollout)
    on = measure_mismatch(rollout + noise / 2, rollout)
    ratio, (low, high) = ratio_interval("k2", on, off)
    assert ratio == pytest.approx(0.25) and (low, high) == pytest.approx((0.25, 0.25))
    assert off.intervals["k2"][1] > 1.3 * off.intervals["k2"][0]
    other = measure_mismatch(rollout[:20], rollout[:20])
    with pytest.raises(ValueError, match="not of the same sequences"):
        ratio_interval("k2", on, other)


def test_a_ratio_of_nothing_names_what_there_is():
    found = measure_mismatch([-1.0, -2.0], [-1.0, -2.1])
    with pytest.raises(ValueError, match=r"'K3' is no measure; give one of .*k3"):
        ratio_interval("K3", found, found)


def test_the_survival_curve_counts_tokens_at_or_above():
    size, share = survival(TRAIN, ROLLOUT, MASK)
    assert size == pytest.approx([0, LOG2, LOG2, LOG2, 2 * LOG2])
    assert share == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize("logprob", [-1.0, -0.7, -0.123])
@pytest.mark.parametrize("shape", [(1, 7), (3, 7), (8, 7), (5, 24)])
def test_probabilities_that_do_not_vary_have_no_correlation(logprob, shape):
    """Neither rounding that looks like one, nor a warning (which pytest makes an error)."""
    rollout = np.full(shape, logprob)
    for train in (rollout, rollout - 0.1, rollout - np.linspace(0, 0.3, shape[1])):
        found = measure_mismatch(train, rollout)
        assert np.isnan(found.prob_corr) and np.isnan(found.intervals["prob_corr"]).all()


def test_the_correlation_is_numpys():
    rng = np.random.default_rng(3)
    rollout = np.log(rng.uniform(0.05, 0.9, (6, 9)))
    train = rollout + rng.normal(0, 0.2, rollout.shape)
    want = np.corrcoef(np.exp(train).ravel(), np.exp(rollout).ravel())[0, 1]
    assert measure_mismatch(train, rollout).prob_corr == pytest.approx(want, rel=1e-12)


def test_tensors_may_carry_gradients_and_be_of_any_dtype():
    mask = torch.tensor(MASK).bool()
    train = torch.tensor(TRAIN, dtype=torch.float64, requires_grad=True)
    found = measure_mismatch(train, torch.tensor(ROLLOUT), mask=mask)
    assert found.k3 == measure_mismatch(TRAIN, ROLLOUT, mask=MASK).k3
    assert train.requires_grad and train.grad is None
    half = train.bfloat16()
    want = half.detach().double().numpy()
    assert measure_mismatch(half, half).k1 == measure_mismatch(want, want).k1 == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TRAIN, ROLLOUT[:1]), r"train is \(2, 3\), rollout \(1, 3\)"),
        ((TRAIN, ROLLOUT, MASK[:1]), r"mask is \(1, 3\)"),
        ((TRAIN, ROLLOUT, MASK * 0), "no token counts"),
        ((TRAIN, ROLLOUT, MASK, MASK[:1]), r"sequences is \(1, 3\)"),
        ((TRAIN * np.inf, ROLLOUT, MASK), "5 logprobs of train that count are not finite"),
        ((TRAIN, ROLLOUT * np.nan, MASK), "5 logprobs of rollout that count are not finite"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    names = ("train", "rollout", "mask", "sequences")
    with pytest.raises(ValueError, match=message):
        measure_mismatch(**dict(zip(names, arguments, strict=False)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_resamples": 0}, "num_resamples is 0"),
        ({"taus": (1.1, 1.1000001)}, "taus"),
        ({"taus": (0.0,)}, "taus"),
    ],
)
def test_options_that_measure_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        measure_mismatch([[-1.0]], [[-1.5]], **options)
