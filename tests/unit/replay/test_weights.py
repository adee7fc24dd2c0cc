"""Importance weights against plain loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dovetail.replay.weights import masked_weights, truncated_weights

LEVELS = ("token", "sequence", "geometric")


def log_ratios(diff: list[list[float]], mask: list[list[int]], level: str) -> list[list[float]]:
    """One token at a time."""
    out: list[list[float]] = []
    for row, kept in zip(diff, mask, strict=True):
        inside = [d for d, m in zip(row, kept, strict=True) if m]
        whole = sum(inside) if level == "sequence" else sum(inside) / max(len(inside), 1)
        out.append([max(-20, min(20, d if level == "token" else whole)) for d in row])
    return out


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]]]:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    number = st.integers(-24, 24).map(lambda n: n / 8)
    diff = [[draw(number) for _ in range(columns)] for _ in range(rows)]
    mask = [[draw(st.integers(0, 1)) for _ in range(columns)] for _ in range(rows)]
    return diff, mask


@given(batches(), st.sampled_from(LEVELS))
def test_weights_are_those_of_a_loop(batch, level):
    diff, mask = batch
    rollout = torch.full((len(diff), len(diff[0])), -3.0, dtype=torch.float64)
    train, kept = rollout + torch.tensor(diff, dtype=torch.float64), torch.tensor(mask)
    tis = truncated_weights(train, rollout, kept, cap=1.7, level=level)
    mis = masked_weights(train, rollout, kept, bounds=(0.6, 1.7), level=level, veto=0.1)
    for row, line in enumerate(log_ratios(diff, mask, level)):
        vetoed = any(math.exp(d) < 0.1 for d, m in zip(diff[row], mask[row], strict=True) if m)
        for column, log_ratio in enumerate(line):
            ratio = math.exp(log_ratio) if mask[row][column] else 0.0
            assert float(tis[row, column]) == pytest.approx(min(ratio, 1.7))
            inside = 0.6 <= ratio <= 1.7 and not vetoed
            assert float(mis[row, column]) == pytest.approx(ratio if inside else 0.0)


@given(batches(), st.sampled_from(LEVELS), st.randoms(use_true_random=False))
def test_packed_sequences_weigh_what_rows_weigh(batch, level, random):
    diff, mask = (torch.tensor(part) for part in batch)
    number = torch.arange(len(diff))[:, None].expand(diff.shape) * 3 + 1
    order = torch.tensor(random.sample(range(diff.numel()), diff.numel()))

    def packed(values: Tensor) -> Tensor:
        return values.flatten()[order][None]

    for weigh in (truncated_weights, masked_weights):
        rows = weigh(diff.double(), torch.zeros_like(diff).double(), mask, level=level)
        flat = weigh(
            packed(diff).double(),
            torch.zeros_like(packed(diff)).double(),
            packed(mask),
            level=level,
            sequences=packed(number),
        )
        torch.testing.assert_close(flat, packed(rows))


def test_weights_carry_no_gradient_and_ignore_what_is_masked_out():
    train = torch.tensor([[0.1, float("nan")]], requires_grad=True)
    rollout, mask = torch.tensor([[0.0, float("-inf")]]), torch.tensor([[1, 0]])
    for weigh in (truncated_weights, masked_weights):
        for level in LEVELS:
            weights = weigh(train, rollout, mask, level=level)
            assert not weights.requires_grad
            assert weights.tolist() == [[pytest.approx(math.exp(0.1)), 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_huge_ratio_is_outside_in_any_dtype(dtype):
    train, rollout = torch.tensor([[-1.0, -1.0]], dtype=dtype), torch.tensor([[-14.0, -1.0]])
    mask = torch.ones(1, 2)
    assert masked_weights(train, rollout, mask).tolist() == [[0.0, 1.0]]
    assert truncated_weights(train, rollout, mask).tolist() == [[2.0, 1.0]]


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_masked_out_weighs_nothing_beside_a_token_that_is_no_number(level):
    train, rollout = torch.tensor([[math.nan, -1.0]]), torch.full((1, 2), -1.0)
    for weigh in (truncated_weights, masked_weights):
        assert weigh(train, rollout, torch.tensor([[1, 0]]), level=level)[0, 1] == 0


def test_a_huge_ratio_is_clamped_before_it_overflows():
    train = torch.full((1, 5000), 0.5)
    weights = truncated_weights(
        train, torch.zeros_like(train), torch.ones_like(train), cap=1e30, level="sequence"
    )
    assert float(weights[0, 0]) == pytest.approx(math.exp(20), rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: truncated_weights(a, a[:1], a), "different shapes"),
        (lambda a: masked_weights(a, a, a, sequences=a[:1]), "different shapes"),
        (lambda a: truncated_weights(a, a, a, cap=0.0), "cap is 0"),
        (lambda a: masked_weights(a, a, a, bounds=(2.0, 0.5)), r"bounds are \(2.0, 0.5\)"),
        (lambda a: truncated_weights(a, a, a, level="row"), "level is 'row'"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, 3))
