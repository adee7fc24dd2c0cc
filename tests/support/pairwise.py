"""Pairwise covering arrays: every two values of two axes meet in some case."""

import itertools
import random
from collections.abc import Mapping, Sequence


def all_pairs(axes: Mapping[str, Sequence[object]], *, seed: int = 0) -> list[dict[str, object]]:
    """Return cases that together hold every pair of values of every two axes.

    Greedy: of a few random full cases the one with the most new pairs is taken.
    """
    rng = random.Random(seed)
    names = list(axes)
    open_pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
    }
    cases: list[dict[str, object]] = []
    while open_pairs:
        best: dict[str, object] = {}
        best_new: set[object] = set()
        seed_pair = min(open_pairs, key=repr)
        for _ in range(30):
            case = {name: rng.choice(list(axes[name])) for name in names} | dict(seed_pair)
            new = set(itertools.combinations([(n, case[n]) for n in names], 2)) & open_pairs
            if len(new) > len(best_new):
                best, best_new = case, new
        cases.append(best)
        open_pairs -= best_new
    return cases


def product(axes: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Return every case."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def label(case: Mapping[str, object]) -> str:
    """Return a test id such as ``model=llama-depth=0``."""
    return "-".join(f"{name}={value}" for name, value in case.items())
