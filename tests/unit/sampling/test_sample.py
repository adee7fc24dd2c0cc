"""The sampler against the oracle's: the same token for every row, whoever shares its batch."""

from dataclasses import asdict, dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from dovetail.kernels import api
from dovetail.kernels.ref.sampling import gumbel_noise, philox4x32
from dovetail.sched.plan import LogprobKindId
from tests.support.noise import gumbel, random_words
from tests.support.sampling import draw, log_softmax

OK, NON_FINITE = 0, 1
WORST = (7, 156033, 180)  # seed, position and token of a word that is at least 2^32 - 128
TIE = 2e-6  # rounding of probabilities and scores; a choice this close may fall either way


@dataclass(frozen=True)
class Row:
    """How one row samples."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 1
    sample_index: int = 0
    kind: str = "scaled"


def sample(logits: np.ndarray, rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw for all rows in one call of the op."""
    seeds = np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64)
    draws = api.sample(
        torch.from_numpy(logits),
        raw_NV=torch.from_numpy(logits),
        temperature_N=torch.tensor([row.temperature for row in rows]),
        top_k_N=torch.tensor([max(row.top_k, 0) for row in rows]),
        top_p_N=torch.tensor([row.top_p for row in rows]),
        min_p_N=torch.tensor([row.min_p for row in rows]),
        seed_N=torch.from_numpy(seeds),
        position_N=torch.tensor([row.position for row in rows]),
        sample_index_N=torch.tensor([row.sample_index for row in rows]),
        logprob_kind_N=torch.tensor([LogprobKindId[row.kind.upper()] for row in rows]),
    )
    is_good = draws.status_N == OK
    drawn_N = draws.reported_NV.gather(1, draws.ids_N[:, None]).view(-1)
    assert torch.equal((drawn_N - draws.log_total_N)[is_good], draws.logprobs_N[is_good])
    log_total_N = torch.logsumexp(draws.reported_NV, dim=-1)
    torch.testing.assert_close(log_total_N[is_good], draws.log_total_N[is_good])
    return draws.ids_N.numpy(), draws.logprobs_N.numpy(), draws.status_N.numpy()


rows = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 0.7, 1.0, 1.7, 100.0]),
    top_k=st.sampled_from([-1, -1, 1, 2, 5, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(1, 2**20),
    sample_index=st.integers(0, 7),
    kind=st.sampled_from(["scaled", "scaled", "raw", "truncated"]),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[Row]]:
    """Logits of a few rows; half of them are on a coarse grid, so ties abound."""
    params = draw(st.lists(rows, min_size=1, max_size=6))
    vocab_size = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(
        scale=draw(st.sampled_from([0.0, 1.0, 8.0])), size=(len(params), vocab_size)
    )
    if draw(st.booleans()):
        logits = np.round(logits)
    return logits.astype(np.float32), params


@settings(max_examples=200, deadline=None)
@given(batches())
def test_every_row_gets_the_oracle_s_token(batch):
    logits, params = batch
    ids, logprobs, status = sample(logits, params)
    assert (status == OK).all()
    for r, row in enumerate(params):
        want = draw(logits[r], **asdict(row))
        tie = TIE * max(1.0, float(np.abs(logits[r]).max()) / (row.temperature or 1.0))
        if min(want.gap, want.border_gap) > tie or row.temperature == 0:
            assert ids[r] == want.token_id, row
        is_support_sure = row.kind != "truncated" or want.support_gap > tie
        if ids[r] == want.token_id and is_support_sure:
            assert logprobs[r] == pytest.approx(want.logprob, rel=1e-5, abs=max(1e-5, tie))


@pytest.mark.parametrize(
    ("rules", "size"),
    [
        ({"top_k": 3}, 3),
        ({"top_p": 0.3}, 3),
        ({"top_p": 0.5}, 4),  # half lies before the fifth: not less than half
        ({"top_k": 4, "top_p": 0.7}, 3),
        ({"min_p": 1.0}, 8),  # none is less likely than the likeliest
        ({"temperature": 0.0}, 1),
    ],
)
def test_of_equals_the_lower_ids_are_kept(rules, size):
    """Equal logits are exactly equal, so the border is no matter of rounding."""
    equal, num_draws = np.zeros(8, dtype=np.float32), 100
    params = [Row(position=position, **rules) for position in range(num_draws)]
    ids, _, _ = sample(np.tile(equal, (num_draws, 1)), params)
    assert ids.tolist() == [draw(equal, **asdict(row)).token_id for row in params]
    assert set(ids.tolist()) == set(range(size))


@settings(max_examples=60, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_a_row_draws_the_same_alone_and_in_any_company(batch, random):
    logits, params = batch
    ids, logprobs, status = sample(logits, params)
    order = list(range(len(params)))
    random.shuffle(order)
    mixed = sample(logits[order], [params[r] for r in order])
    for got, want in zip(mixed, (ids, logprobs, status), strict=True):
        assert got.tobytes() == want[order].tobytes()
    for r, row in enumerate(params):
        alone = sample(logits[r : r + 1], [row])
        assert [got[0].tobytes() for got in alone] == [
            ids[r].tobytes(),
            logprobs[r].tobytes(),
            status[r].tobytes(),
        ]


@pytest.mark.parametrize("spoil", ["nan", "inf", "all -inf", "one nan"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked_and_disturbs_nobody(spoil, temperature):
    logits = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)
    params = [
        Row(temperature=temperature, top_k=5, top_p=0.9, min_p=0.01, seed=seed) for seed in range(3)
    ]
    good = sample(logits, params)
    spoilt = logits.copy()
    match spoil:
        case "nan":
            spoilt[1] = np.nan
        case "inf":
            spoilt[1, 3] = np.inf
        case "all -inf":
            spoilt[1] = -np.inf
        case "one nan":
            spoilt[1, 7] = np.nan
    ids, logprobs, status = sample(spoilt, params)
    assert status.tolist() == [OK, NON_FINITE, OK]
    assert 0 <= ids[1] < 20, "even then the id is legal: it is fed back before the host knows"
    for got, want in ((ids, good[0]), (logprobs, good[1])):
        assert got[[0, 2]].tobytes() == want[[0, 2]].tobytes()


def test_masked_tokens_are_legal_and_never_drawn():
    logits = np.full((1, 16), -np.inf, dtype=np.float32)
    logits[0, [3, 11]] = 0.0
    for row in (Row(), Row(top_k=9), Row(top_p=0.99), Row(min_p=0.1), Row(temperature=0)):
        drawn = set()
        for position in range(50):
            ids, logprobs, status = sample(logits, [Row(**asdict(row) | {"position": position})])
            assert status[0] == OK
            assert logprobs[0] == pytest.approx(np.log(0.5), abs=1e-6)
            drawn.add(int(ids[0]))
        assert drawn <= {3, 11} and (row.temperature == 0 or drawn == {3, 11})


def test_the_only_token_left_is_drawn_even_with_the_worst_noise():
    """One word in 2^25 is so large that u rounds to 1 and the noise to minus infinity."""
    seed, position, token = WORST
    assert gumbel(random_words(seed, position, 0, token + 1))[token] == -np.inf
    logits = np.zeros((1, token + 3), dtype=np.float32)
    logits[0, token] = 9.0
    for rule in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        ids, _, status = sample(logits, [Row(seed=seed, position=position, **rule)])
        assert (ids[0], status[0]) == (token, OK)
    ids, _, status = sample(logits, [Row(seed=seed, position=position)])
    assert status[0] == OK and ids[0] != token, "with others to choose from it is not"


# -- noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    """The vectors of the authors' kat_vectors file."""
    got = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(word) for word in got] == words


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    sample_index=st.integers(0, 2**31 - 1),
    vocab_size=st.integers(1, 50),
)
@settings(max_examples=50, deadline=None)
def test_noise_is_the_documented_one(seed, position, sample_index, vocab_size):
    seed_N = torch.from_numpy(np.array([seed], dtype=np.uint64).view(np.int64))
    got = gumbel_noise(
        seed_N, torch.tensor([position]), torch.tensor([sample_index]), vocab_size=vocab_size
    )
    want = gumbel(random_words(seed, position, sample_index, vocab_size))
    np.testing.assert_allclose(got[0].numpy(), want, rtol=1e-5, atol=1e-6)


# -- statistics -----------------------------------------------------------------------------


@pytest.mark.parametrize("varies", ["position", "seed", "sample_index"])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_draws_follow_softmax(varies, temperature):
    num_draws = 4000
    logits = np.array([0.0, 1.5, -1.0, 0.3, 2.0, -0.5, 1.0, 0.7], dtype=np.float32)
    params = [Row(temperature=temperature, **{varies: i}) for i in range(num_draws)]
    ids, _, _ = sample(np.tile(logits, (num_draws, 1)), params)
    expected = np.exp(log_softmax(logits / temperature)) * num_draws
    counts = np.bincount(ids, minlength=len(logits))
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square, 7 degrees: p = 0.001


def test_draws_of_neighbouring_positions_are_independent():
    num_draws = 4000
    ids, _, _ = sample(
        np.zeros((num_draws + 1, 4), dtype=np.float32),
        [Row(position=i) for i in range(num_draws + 1)],
    )
    pairs = np.bincount(ids[:-1] * 4 + ids[1:], minlength=16)
    assert ((pairs - num_draws / 16) ** 2 / (num_draws / 16)).sum() < 37.7  # 15 degrees: p = 0.001


def test_draws_within_a_truncated_support_are_renormalised():
    num_draws = 3000
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3])).astype(np.float32)
    ids, _, _ = sample(
        np.tile(logits, (num_draws, 1)), [Row(top_k=2, position=i) for i in range(num_draws)]
    )
    counts = np.bincount(ids, minlength=4)
    assert counts[0] == counts[2] == 0
    assert counts[1] / num_draws == pytest.approx(4 / 7, abs=0.03)
