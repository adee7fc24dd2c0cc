"""Logprobs under sampling masks against a full softmax over the support, row by row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.replay.masks import SamplingMask, masked_logprobs

VOCAB = 12


@st.composite
def draws(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    rows: list[list[int]] = []
    targets: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        support = draw(st.lists(st.integers(0, VOCAB - 1), unique=True, max_size=VOCAB))
        rows.append(sorted(support))
        targets.append(draw(st.sampled_from(support or range(VOCAB))))
    return rows, targets, draw(st.integers(0, 99))


@given(draws(), st.sampled_from([0.5, 1.0, 1.7]))
def test_the_logprob_is_that_of_a_softmax_over_the_support(case, temperature):
    rows, targets, seed = case
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(rows), VOCAB, generator=generator)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    mask = SamplingMask.of_rows(rows)
    found = masked_logprobs(ours, torch.tensor(targets), mask, temperature=temperature)
    want = []
    for row, (support, target) in enumerate(zip(rows, targets, strict=True)):
        ids = support or list(range(VOCAB))
        scaled = theirs[row, ids] / temperature
        want.append(scaled.log_softmax(-1)[ids.index(target)])
    want = torch.stack(want)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    weight = torch.arange(1.0, len(rows) + 1)
    (found @ weight).backward()
    (want @ weight).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)
    for row, support in enumerate(rows):
        outside = [id for id in range(VOCAB) if support and id not in support]
        assert not ours.grad[row, outside].any()


def test_a_support_of_one_token_is_certain_and_teaches_nothing():
    logits = torch.randn(1, VOCAB, requires_grad=True)
    logprob = masked_logprobs(logits, torch.tensor([3]), SamplingMask.of_rows([[3]]))
    assert logprob.tolist() == [0.0]
    logprob.sum().backward()
    assert not logits.grad.any()


def test_far_logits_do_not_overflow_and_bfloat16_is_computed_in_float32():
    logits = torch.tensor([[3e4, -3e4, 2.9e4, 0.0]])
    found = masked_logprobs(logits, torch.tensor([1]), SamplingMask.of_rows([[1, 3]]))
    assert found.tolist() == [-3e4]
    found = masked_logprobs(logits, torch.tensor([1]), SamplingMask.of_rows([[0, 1, 3]]))
    assert found.tolist() == [-6e4]
    half = torch.randn(4, VOCAB).bfloat16()
    mask = SamplingMask.of_rows([[0, 1, 2]] * 4)
    targets = torch.tensor([0, 1, 2, 0])
    assert torch.equal(
        masked_logprobs(half, targets, mask), masked_logprobs(half.float(), targets, mask)
    )


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_rows_without_ids_leave_no_nan_for_autograd_to_find():
    logits = torch.randn(2, VOCAB, requires_grad=True)
    mask = SamplingMask.of_rows([[], [1, 2]])
    with torch.autograd.detect_anomaly():
        masked_logprobs(logits, torch.tensor([0, 1]), mask).sum().backward()
    assert bool(logits.grad.isfinite().all())


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5), st.data())
def test_rows_may_be_chosen_in_any_order(rows, data):
    numbers = st.integers(-1, len(rows) - 1)
    chosen = data.draw(st.lists(numbers, max_size=7))
    mask = SamplingMask.of_rows(rows).select(torch.tensor(chosen, dtype=torch.int64))
    want = SamplingMask.of_rows([rows[at] if at >= 0 else [] for at in chosen])
    assert mask.ids_Z.tolist() == want.ids_Z.tolist()
    assert mask.offsets.tolist() == want.offsets.tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda logits, mask: masked_logprobs(logits, torch.tensor([0, 5]), mask),
            "the token of row 1, 5, is not in its support",
        ),
        (
            lambda logits, mask: masked_logprobs(logits, torch.tensor([0]), mask),
            "2 rows of logits, 1 targets, a mask of 2",
        ),
        (
            lambda logits, mask: masked_logprobs(logits[:, :4], torch.tensor([0, 4]), mask),
            "the mask has id 4; 4 logits",
        ),
        (
            lambda logits, mask: masked_logprobs(
                logits, torch.tensor([0, 4]), mask, temperature=0.0
            ),
            "temperature is 0.0",
        ),
        (
            lambda logits, mask: masked_logprobs(
                logits, torch.tensor([0, 4]), mask, temperature=float("nan")
            ),
            "temperature is nan",
        ),
        (
            lambda logits, mask: masked_logprobs(
                logits, torch.tensor([0, 4]), SamplingMask.of_rows([[], [4, -1]])
            ),
            "the mask has id -1; 12 logits",
        ),
        (
            lambda logits, mask: masked_logprobs(logits[None], torch.tensor([[0, 4]]), mask),
            r"logits of shape \[1, 2, 12\].*flatten a batch",
        ),
        (
            lambda logits, mask: SamplingMask(mask.ids_Z, mask.offsets[:-1]),
            "offsets must ascend from 0 to 3",
        ),
        (
            lambda logits, mask: SamplingMask(mask.ids_Z, torch.tensor([0, 3, 1, 3])),
            "offsets must ascend",
        ),
    ],
)
def test_masks_of_other_draws_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(2, VOCAB), SamplingMask.of_rows([[], [1, 3, 4]]))
