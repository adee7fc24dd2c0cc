"""A difference counts unless a choice on the way to it was a tie."""

import numpy as np
import pytest

from tests.support.compare import (
    assert_follows,
    assert_logprobs,
    assert_same_routes,
    assert_same_tokens,
    assert_top,
)
from tests.support.oracle import OracleGeneration, Routing

IDS = (5, 6, 7, 8)


def generation(*, temperature=0.0, **at_two: float) -> OracleGeneration:
    """Four tokens without ties but, at token 2, those named."""
    columns = {
        name: (1.0, 1.0, at_two.get(name, 1.0), 1.0)
        for name in ("gaps", "border_gaps", "router_gaps")
    }
    return OracleGeneration((1, 2, 3), temperature, IDS, (0.0,) * 4, **columns)


def test_equal_ids():
    assert assert_same_tokens(list(IDS), generation(), noise=0) == 4


def test_a_difference_is_told():
    with pytest.raises(AssertionError, match=r"chunk 4: token 2 \(position 5\) is 9 instead of 7"):
        assert_same_tokens((5, 6, 9, 8), generation(), context="chunk 4")


@pytest.mark.parametrize("which", ["gaps", "border_gaps", "router_gaps"])
def test_a_tie_ends_the_comparison(which):
    assert assert_same_tokens((5, 6, 9, 0), generation(**{which: 1e-6})) == 2
    with pytest.raises(AssertionError, match="token 1"):
        assert_same_tokens((5, 9, 7, 8), generation(**{which: 1e-6}))


def test_low_temperature_magnifies_noise():
    assert assert_same_tokens((5, 6, 9), generation(temperature=0.1, gaps=5e-4)) == 2
    with pytest.raises(AssertionError):
        assert_same_tokens((5, 6, 9), generation(temperature=1.0, gaps=5e-4))


@pytest.mark.parametrize("ids", [IDS[:3], (*IDS, 9), ()])
def test_a_wrong_length_is_never_excused(ids):
    with pytest.raises(AssertionError, match=f"{len(ids)} tokens instead of 4"):
        assert_same_tokens(ids, generation(gaps=0.0))


def test_logprobs():
    assert_logprobs([-1.0, -2.0], (-1.00005, -2.0))
    with pytest.raises(AssertionError, match=r"1 of 2 .* number 1"):
        assert_logprobs([-1.0, -2.0], (-1.0, -2.001))
    with pytest.raises(AssertionError, match="number 0"):
        assert_logprobs([float("nan")], [-1.0])
    with pytest.raises(AssertionError, match="shape"):
        assert_logprobs([-1.0], [-1.0, -2.0])


def test_routes():
    ids = np.array([[[0, 1]], [[2, 3]]])

    def routing(gap: float, order_gap: float) -> Routing:
        return Routing(ids, np.array([[1.0], [gap]]), np.array([[1.0], [order_gap]]))

    assert_same_routes(ids, routing(1, 1))
    swapped, other = np.array([[[0, 1]], [[3, 2]]]), np.array([[[0, 1]], [[2, 4]]])
    assert_same_routes(swapped, routing(1, 1e-7))
    assert_same_routes(other, routing(1e-7, 1))
    for wrong, tie in ((swapped, routing(1e-7, 1)), (other, routing(1, 1e-7))):
        with pytest.raises(AssertionError, match=r"1 of 2 expert rows .* token 1, MoE layer 0"):
            assert_same_routes(wrong, tie)
    with pytest.raises(AssertionError, match="shape"):
        assert_same_routes(ids[:1], routing(1, 1))


def test_follows_excuses_each_tie_and_nothing_else():
    want = OracleGeneration(
        (1, 2), 1.0, (5, 6, 7), (0.0,) * 3, (1e-6, 1.0, 1e-6), (np.inf,) * 3, (np.inf,) * 3
    )
    assert assert_follows([5, 6, 7], want) == []
    assert assert_follows([9, 6, 9], want) == [0, 2]
    with pytest.raises(AssertionError, match="token 1"):
        assert_follows([9, 9, 9], want)
    with pytest.raises(AssertionError):
        assert_follows([5, 6], want)


def test_top_lists_may_swap_what_rounding_can_swap():
    row = np.array([-1.0, -2.0, -2.00001, -5.0])
    assert_top([0, 2], [-1.0, -2.0], row, num_top=2)
    for ids, values in (
        ([0, 3], [-1.0, -5.0]),  # not the likeliest
        ([0, 0], [-1.0, -1.0]),  # twice
        ([1, 0], [-2.0, -1.0]),  # out of order
        ([0, 1], [-1.0, -2.1]),  # another number
        ([0], [-1.0]),  # too few
    ):
        with pytest.raises(AssertionError):
            assert_top(ids, values, row, num_top=2)


def test_minus_infinity_is_equal_to_itself_alone():
    assert_logprobs([-np.inf, -1.0], [-np.inf, -1.0])
    for wrong in ([-1.0], [np.inf], [np.nan]):
        with pytest.raises(AssertionError):
            assert_logprobs(wrong, [-np.inf])
