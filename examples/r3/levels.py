"""What counts as reproduced, level by level. Pure functions of measurements.

R0: a replay installs what was recorded. R1: routing is a main cause of the mismatch, and replay
removes it. R2: the rare tokens whose probability is off by a factor of two become ten times rarer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dovetail.replay.mismatch import Mismatch, ratio_interval

NOISE_SHARE = 1e-5  # of k3 that may be left where the choice alone was noisy
CONTROL_FACTOR = 100.0  # by which wrong rows must be worse
MAX_K3_RATIO, MAX_ABS_RATIO = 0.6, 0.5
MIN_TAIL, TAIL_FACTOR = 1e-4, 10.0
MIN_TOKENS = 50_000
RULE_OF_THREE = 3.0  # none of n seen: below 3 / n with 95 % confidence


@dataclass(frozen=True, slots=True)
class Verdict:
    """One condition of a level; ``passed`` is None where there are too few tokens to say."""

    level: str
    what: str
    measured: str
    wanted: str
    passed: bool | None


@dataclass(frozen=True, slots=True)
class Pair:
    """The mismatch of one rollout with the trainer: routers live, and replayed."""

    off: Mismatch
    on: Mismatch


def judge_installing(
    *, share_installed: float, is_own_equal: bool, noisy: Mapping[str, Pair]
) -> Iterable[Verdict]:
    """R0, but for the controls.

    Args:
        share_installed: of (token, layer) whose experts were called with the recorded ids.
        is_own_equal: replaying the trainer's own routes gives the same bits.
        noisy: rollouts with noise in the choice and nowhere else, by name.
    """
    yield Verdict(
        "R0",
        "experts that ran are those recorded",
        f"{share_installed:.4%}",
        "all",
        share_installed == 1.0,
    )
    yield Verdict("R0", "own routes replayed: same bits", str(is_own_equal), "True", is_own_equal)
    for name, pair in noisy.items():
        share = pair.on.k3 / pair.off.k3
        yield Verdict(
            "R0",
            f"{name}: k3 on / off",
            f"{share:.1e}",
            f"<= {NOISE_SHARE:g}",
            share <= NOISE_SHARE,
        )


def judge_controls(right: Mismatch, wrong: Mapping[str, Mismatch]) -> Iterable[Verdict]:
    """R0: rows of other places, layers and samples are far worse than the right ones."""
    for name, mismatch in wrong.items():
        factor = mismatch.k3 / right.k3
        yield Verdict(
            "R0",
            f"control, {name}: k3 by the right rows'",
            f"{factor:.0f} x",
            f">= {CONTROL_FACTOR:g} x",
            factor >= CONTROL_FACTOR,
        )


def judge_gap(arms: Mapping[str, Pair]) -> Iterable[Verdict]:
    """R1, of rollouts with small noise of the kind that engines have."""
    for name, pair in arms.items():
        is_enough = pair.off.num_tokens >= MIN_TOKENS
        ratio, (low, high) = ratio_interval("k3", pair.on, pair.off)
        yield Verdict(
            "R1",
            f"{name}: k3 on / off",
            f"{ratio:.3f} [{low:.3f}, {high:.3f}]",
            f"<= {MAX_K3_RATIO}, all below 1",
            (ratio <= MAX_K3_RATIO and high < 1) if is_enough else None,
        )
        largest = pair.on.max_abs / pair.off.max_abs
        yield Verdict(
            "R1",
            f"{name}: max |D| on / off",
            f"{largest:.3f}",
            f"<= {MAX_ABS_RATIO}",
            largest <= MAX_ABS_RATIO if is_enough else None,
        )


def judge_tail(arms: Mapping[str, Pair]) -> Iterable[Verdict]:
    """R2, of the same rollouts."""
    for name, pair in arms.items():
        off, on = pair.off.tail[2.0], pair.on.tail[2.0]
        bound = RULE_OF_THREE / pair.on.num_tokens
        is_rare = on <= off / TAIL_FACTOR if on else bound < off / 3
        yield Verdict(
            "R2",
            f"{name}: F(2) off, on",
            f"{off:.1e}, {on:.1e}" + ("" if on else f" (below {bound:.0e})"),
            f"off >= {MIN_TAIL:g}, on <= off / {TAIL_FACTOR:g}",
            (off >= MIN_TAIL and is_rare) if pair.off.num_tokens >= MIN_TOKENS else None,
        )
