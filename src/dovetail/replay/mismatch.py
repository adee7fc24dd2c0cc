# pyright: strict
"""How far trainer and rollout are apart, from the logprobs that both give the same tokens.

Owns the measures and their uncertainty. With D = log p_train - log p_rollout of a token that the
rollout sampled, k3 = mean(exp(D) - 1 - D) estimates KL(rollout, trainer) without bias and is never
negative (J. Schulman, "Approximating KL divergence", 2020); it is the measure of arXiv 2510.11370,
as is F(tau), the share of tokens whose probabilities differ by more than a factor tau. All sums
are in float64, and ``expm1`` is used: in float32 the plain form is 0 below about 1e-7.

The measures are heavy-tailed: a few tokens make most of a k3. So each has an interval, by
resampling whole *sequences*, whose tokens are not independent.

Shape legend: N tokens that count, S sequences, C sums, R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

TAUS = (1.1, 1.5, 2.0, 5.0, 10.0)
NUM_RESAMPLES = 1000

Array = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The measures of one set of tokens. Natural logarithms throughout.

    Attributes:
        num_tokens, num_sequences: that count.
        k1: mean of -D; without bias, may be negative.
        k2: half the mean of D squared.
        k3: see the module.
        mean_abs, max_abs: of D.
        bit_mismatch: share of tokens whose float32 logprobs differ in any bit; the only test of
            "bitwise", k3 = 0 is none.
        chi2: mean of exp(2 D) - 1, the variance of importance weights of tokens.
        ess: effective sample size of those weights, as a share of the tokens.
        sequence_ess: the same of whole sequences.
        prob_corr: correlation of the two probabilities; nan where either does not vary.
        sequence_log_ratio: mean over sequences of the sum of D.
        geometric_log_ratio: mean over sequences of the mean of D.
        tail: F(tau) for each tau.
        intervals: 95 % bootstrap interval of each measure above but ``bit_mismatch``, and of
            ``tail[tau]`` as ``"F(tau)"``.
    """

    num_tokens: int
    num_sequences: int
    k1: float
    k2: float
    k3: float
    mean_abs: float
    max_abs: float
    bit_mismatch: float
    chi2: float
    ess: float
    sequence_ess: float
    prob_corr: float
    sequence_log_ratio: float
    geometric_log_ratio: float
    tail: dict[float, float]
    intervals: dict[str, Interval]
    sums: "SequenceSums" = field(repr=False)

    def value(self, name: str) -> float:
        """Return a measure by its name in ``intervals``."""
        return self.sums.measures(np.ones((1, self.num_sequences)))[name][0].item()


def measure_mismatch(
    train: ArrayLike,
    rollout: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    sequences: ArrayLike | None = None,
    taus: Sequence[float] = TAUS,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Mismatch:
    """Compare the logprobs of trainer and rollout.

    Args:
        train, rollout: log-probabilities of the same tokens, of any one shape, as arrays or
            tensors; gradients are left alone. Both at the same temperature and over the same
            support: under a sampling mask ``Generation.mask_logprobs``, not its ``logprobs``.
        mask: of that shape, what counts; None is everything. Response tokens alone, as a rule.
        sequences: of that shape, the number of each token's sequence; None: a row is a sequence.
        taus: factors of ``tail``, above 1.
        num_resamples: of sequences, for the intervals.
        seed: of the resampling.

    Raises:
        ValueError: shapes differ, no token counts, a logprob that counts is not finite, or an
            option measures nothing.
    """
    _expect(num_resamples > 0, f"num_resamples is {num_resamples}")
    is_told_apart = len({f"{tau:g}" for tau in taus}) == len(taus)
    _expect(
        is_told_apart and all(tau > 1 for tau in taus), f"taus are {taus}; give some above 1, once"
    )
    chosen = _Tokens.of(train, rollout, mask, sequences)
    diff = chosen.train - chosen.rollout
    sums = SequenceSums.of(chosen, diff, tuple(taus))
    once = sums.measures(np.ones((1, sums.num_sequences)))
    value = {name: float(values[0]) for name, values in once.items()}
    draws = sums.resample(num_resamples, seed)
    bits = chosen.train.astype(np.float32).view(np.uint32)
    return Mismatch(
        num_tokens=len(diff),
        num_sequences=sums.num_sequences,
        bit_mismatch=float((bits != chosen.rollout.astype(np.float32).view(np.uint32)).mean()),
        tail={tau: value.pop(f"F({tau:g})") for tau in taus},
        intervals={name: _interval(values) for name, values in draws.items()},
        sums=sums,
        **value,
    )


def as_array(values: ArrayLike) -> Array:
    """Return the numbers as float64; tensors may carry gradients and be on any device."""
    tensor: Any = values
    if hasattr(tensor, "detach"):  # torch's; it is not imported for those who have arrays
        tensor = tensor.detach().cpu().double()
    return np.asarray(tensor, dtype=np.float64)


def ratio_interval(
    name: str, numerator: Mismatch, denominator: Mismatch, *, seed: int = 0
) -> tuple[float, Interval]:
    """Return the ratio of a measure of two arms on the same sequences, and its 95 % interval.

    Both are resampled together, so what makes a sequence hard cancels. For "replay brings k3 to
    x of what it was" give ``("k3", on, off)``.

    Raises:
        ValueError: the arms are not of the same sequences, or there is no such measure.
    """
    if name not in numerator.intervals:
        raise ValueError(f"{name!r} is no measure; give one of {', '.join(numerator.intervals)}")
    a, b = numerator.sums, denominator.sums
    if not np.array_equal(a.num_tokens, b.num_tokens):
        raise ValueError("the arms are not of the same sequences, so they cannot be paired")
    once = np.ones((1, a.num_sequences))
    draws = (
        a.resample(NUM_RESAMPLES, seed)[name],
        b.resample(NUM_RESAMPLES, seed)[name],
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(a.measures(once)[name][0] / b.measures(once)[name][0])
        return ratio, _interval(draws[0] / draws[1])


def survival(
    train: ArrayLike, rollout: ArrayLike, mask: ArrayLike | None = None
) -> tuple[Array, Array]:
    """Return the curve of |D|: values ascending [N], and the share of tokens at or above each [N].

    Raises:
        ValueError: see ``measure_mismatch``.
    """
    chosen = _Tokens.of(train, rollout, mask, None)
    size = np.sort(np.abs(chosen.train - chosen.rollout))
    return size, 1 - np.arange(len(size)) / len(size)


# -- tokens that count ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tokens:
    train: Array
    rollout: Array
    sequence: NDArray[np.intp]  # dense numbers

    @classmethod
    def of(
        cls,
        train: ArrayLike,
        rollout: ArrayLike,
        mask: ArrayLike | None,
        sequences: ArrayLike | None,
    ) -> "_Tokens":
        a, b = as_array(train), as_array(rollout)
        _expect(a.shape == b.shape, f"train is {a.shape}, rollout {b.shape}; they must be alike")
        keep = np.ones(a.shape, dtype=bool) if mask is None else as_array(mask).astype(bool)
        _expect(keep.shape == a.shape, f"mask is {keep.shape}, the logprobs are {a.shape}")
        if sequences is None:
            rows = a.shape[0] if a.ndim > 1 else 1
            numbers: NDArray[Any] = np.arange(rows).repeat(a.size // max(rows, 1)).reshape(a.shape)
        else:
            numbers = as_array(sequences)
        _expect(numbers.shape == a.shape, f"sequences is {numbers.shape}, logprobs {a.shape}")
        _expect(bool(keep.any()), "no token counts; the mask is empty")
        for name, values in (("train", a), ("rollout", b)):
            bad = ~np.isfinite(values[keep])
            _expect(not bad.any(), f"{int(bad.sum())} logprobs of {name} that count are not finite")
        _, sequence = np.unique(numbers[keep], return_inverse=True)
        return cls(a[keep], b[keep], sequence)


# -- sums of sequences, and what they say ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceSums:
    """What each sequence adds to the measures, so that resampling is one matrix product.

    Attributes:
        columns: name -> [S] sums over the tokens of each sequence.
        max_abs: [S], largest |D| of each.
        taus: of the tail.
    """

    columns: dict[str, Array]
    max_abs: Array
    taus: tuple[float, ...]

    @classmethod
    def of(cls, tokens: _Tokens, diff: Array, taus: tuple[float, ...]) -> "SequenceSums":
        """Add up."""
        count = int(tokens.sequence.max()) + 1

        def total(values: Array) -> Array:
            return np.bincount(tokens.sequence, weights=values, minlength=count).astype(np.float64)

        size, weight = np.abs(diff), np.exp(diff)
        # Less those of the first token: sums of what does not vary are 0 then, and no rounding.
        p, q = (
            np.exp(logprobs) - np.exp(logprobs[0]) for logprobs in (tokens.train, tokens.rollout)
        )
        each = {
            "n": np.ones_like(diff),
            "diff": diff,
            "square": diff * diff,
            "k3": np.expm1(diff) - diff,
            "size": size,
            "weight": weight,
            "weight2": weight * weight,
            "chi2": np.expm1(2 * diff),
            "p": p,
            "q": q,
            "pp": p * p,
            "qq": q * q,
            "pq": p * q,
        } | {f"F({tau:g})": (size > np.log(tau)).astype(np.float64) for tau in taus}
        columns = {name: total(values) for name, values in each.items()}
        # Only the proportions of these matter, and a long sequence's exp may be out of range.
        columns["ratio"] = np.exp(columns["diff"] - columns["diff"].max())
        columns["ratio2"] = columns["ratio"] ** 2
        columns["mean_diff"] = columns["diff"] / columns["n"]
        columns["s"] = np.ones(count)
        largest = np.zeros(count)
        np.maximum.at(largest, tokens.sequence, size)
        return cls(columns, largest, taus)

    @property
    def num_sequences(self) -> int:
        """Sequences with a token that counts (S)."""
        return len(self.max_abs)

    @property
    def num_tokens(self) -> Array:
        """Tokens of each sequence that count, [S]."""
        return self.columns["n"]

    def measures(self, counts_RS: Array) -> dict[str, Array]:
        """Return each measure [R] of samples that have sequence s ``counts_RS[r, s]`` times."""
        names = list(self.columns)
        table = np.stack([self.columns[name] for name in names], axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            sums = dict(zip(names, (counts_RS @ table).T, strict=True))
            n, s = sums["n"], sums["s"]
            var_p = _variation(sums["p"], sums["pp"], n)
            var_q = _variation(sums["q"], sums["qq"], n)
            covariance = sums["pq"] - sums["p"] * sums["q"] / n
            return {
                "k1": -sums["diff"] / n,
                "k2": sums["square"] / n / 2,
                "k3": sums["k3"] / n,
                "mean_abs": sums["size"] / n,
                "max_abs": np.where(counts_RS > 0, self.max_abs, 0.0).max(axis=1),
                "chi2": sums["chi2"] / n,
                "ess": sums["weight"] ** 2 / (n * sums["weight2"]),
                "sequence_ess": sums["ratio"] ** 2 / (s * sums["ratio2"]),
                "prob_corr": covariance / np.sqrt(var_p * var_q),
                "sequence_log_ratio": sums["diff"] / s,
                "geometric_log_ratio": sums["mean_diff"] / s,
            } | {f"F({tau:g})": sums[f"F({tau:g})"] / n for tau in self.taus}

    def resample(self, num_resamples: int, seed: int) -> dict[str, Array]:
        """Return each measure [R] of samples of S sequences, drawn with replacement."""
        rng = np.random.default_rng(seed)
        count = self.num_sequences
        at_once = max(1, (1 << 22) // count)  # counts of 32 MiB
        parts: list[dict[str, Array]] = []
        for begin in range(0, num_resamples, at_once):
            rows = min(at_once, num_resamples - begin)
            counts = rng.multinomial(count, np.full(count, 1 / count), size=rows)
            parts.append(self.measures(counts.astype(np.float64)))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _variation(sums: Array, squares: Array, count: Array) -> Array:
    """Return ``count`` times the variance; nan where it is no more than rounding."""
    around_mean = squares - sums**2 / count
    return np.where(around_mean > 1e-12 * squares, around_mean, np.nan)


def _interval(values: Array) -> Interval:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
