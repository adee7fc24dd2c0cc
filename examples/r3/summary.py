"""What runs with and without replay say of each other. Pure functions of recorded series."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Run = dict[str, Any]

WINDOW = 30  # steps of the beginning and the end that are compared
COLLAPSE_STEPS = 20
SPIKE = 10.0  # times the median gradient norm


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. Means over steps, but for ``f2``: a share of all tokens."""

    seed: int
    mean_k3: float
    median_k3: float
    first_k3: float
    last_k3: float
    f2: float
    num_extreme: int
    num_tokens: int
    max_abs: float
    max_grad_norm: float
    num_spikes: int
    first_reward: float
    last_reward: float
    collapsed_at: int | None
    train_s: float


def summarise(run: Run) -> RunSummary:
    series = run["series"]
    k3, reward, norms = series["k3"], series["reward"], series["grad_norm"]
    num_tokens, num_extreme = sum(series["num_tokens"]), sum(series["num_extreme"])
    median_norm = statistics.median(norms)
    return RunSummary(
        seed=run["seed"],
        mean_k3=statistics.fmean(k3),
        median_k3=statistics.median(k3),
        first_k3=statistics.fmean(k3[:WINDOW]),
        last_k3=statistics.fmean(k3[-WINDOW:]),
        f2=num_extreme / num_tokens,
        num_extreme=num_extreme,
        num_tokens=num_tokens,
        max_abs=max(series["max_abs"]),
        max_grad_norm=max(norms),
        num_spikes=sum(norm > SPIKE * median_norm for norm in norms),
        first_reward=statistics.fmean(reward[:WINDOW]),
        last_reward=statistics.fmean(reward[-WINDOW:]),
        collapsed_at=collapsed_at(reward),
        train_s=statistics.median(series["train_s"]),
    )


def collapsed_at(reward: Sequence[float]) -> int | None:
    """Return the first step of so many in a row whose reward is below half of the best before."""
    best, low = 0.0, 0
    for step, value in enumerate(reward):
        low = low + 1 if value < best / 2 else 0
        if low == COLLAPSE_STEPS:
            return step - COLLAPSE_STEPS + 1
        best = max(best, value)
    return None


def paired(runs: Sequence[Run], on: str, off: str) -> list[tuple[RunSummary, RunSummary]]:
    """Return (on, off) of each seed that has both arms, by seed."""
    by_arm = {arm: {r["seed"]: summarise(r) for r in runs if r["arm"] == arm} for arm in (on, off)}
    return [(by_arm[on][s], by_arm[off][s]) for s in sorted(by_arm[on].keys() & by_arm[off].keys())]


def judge_stays_low(pairs: Sequence[tuple[RunSummary, RunSummary]]) -> tuple[bool, str]:
    """Say whether the gap stays low all run, in each of three seeds or more, and in what words.

    In each pair the mean k3 and F(2) with replay are half of those without or less, and so is the
    largest |D| lower.
    """
    if len(pairs) < 3:
        return False, f"{len(pairs)} paired seeds; three are needed"
    k3 = [on.mean_k3 / off.mean_k3 for on, off in pairs]
    f2 = [on.f2 / off.f2 if off.f2 else float("nan") for on, off in pairs]
    is_lower = [on.max_abs < off.max_abs for on, off in pairs]
    words = (
        f"k3 on/off {_list(k3)}, F(2) on/off {_list(f2)}, "
        f"max |D| lower in {sum(is_lower)} of {len(pairs)} seeds"
    )
    return all(x <= 0.5 for x in (*k3, *f2)) and all(is_lower), words


def reward_words(pairs: Sequence[tuple[RunSummary, RunSummary]]) -> str:
    """Say what the rewards do, and no more than they do."""
    differences = [on.last_reward - off.last_reward for on, off in pairs]
    higher = sum(difference > 0 for difference in differences)
    collapsed = [sum(s.collapsed_at is not None for s in side) for side in zip(*pairs, strict=True)]
    spikes = [sum(s.num_spikes for s in side) for side in zip(*pairs, strict=True)]
    return (
        f"reward of the last {WINDOW} steps, on - off: {_list(differences, '+.3f')} "
        f"(higher in {higher} of {len(pairs)}); collapses on {collapsed[0]}, off {collapsed[1]}; "
        f"gradient norms above {SPIKE:g} x their median: on {spikes[0]}, off {spikes[1]}"
    )


def _list(values: Sequence[float], form: str = ".3f") -> str:
    return ", ".join(f"{value:{form}}" for value in values)
