"""The sampling ops against plain loops, and rows against themselves among other rows."""

import numpy as np
import pytest
import torch

from dovetail.kernels import api
from dovetail.kernels.ref.sampling import gumbel_noise, support_mask
from dovetail.sampling.sampler import History, draw
from dovetail.sampling.state import SamplingState
from dovetail.sched.plan import TokenTable
from tests.support import sampling as rules
from tests.support.noise import gumbel, random_words

V = 130
PLAIN = {
    "temperature": 0.8,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 77,
    "sample_index": 0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logprob_kind": 0,
    "prompt_len": 5,
    "num_biases": 0,
}
OTHERS = {
    "truncating": {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "penalised": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "biased": {"num_biases": 3},
    "raw": {"logprob_kind": 1},
    "truncated": {"logprob_kind": 2, "top_k": 3},
    "greedy": {"temperature": 0.0},
    "all of it": {
        "top_k": 9,
        "top_p": 0.9,
        "repetition_penalty": 0.7,
        "num_biases": 3,
        "logprob_kind": 1,
        "temperature": 3.0,
    },
}


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def history_of(tokens: list[list[int]], prompt_len: int):
    """A reader of given tokens, and a list of the rows that it was asked for."""
    asked: list[int] = []

    def read(rows):
        asked.extend(rows.tolist())
        lens = [len(tokens[r]) for r in rows]
        return History(
            row_S=torch.from_numpy(np.repeat(rows, lens)),
            token_S=torch.tensor([t for r in rows for t in tokens[r]]),
            is_output_S=torch.tensor(
                [i >= prompt_len for r in rows for i in range(len(tokens[r]))]
            ),
        )

    return read, asked


def state_of(rows: list[dict]) -> SamplingState:
    state = SamplingState(len(rows), device=torch.device("cpu"))
    for slot, row in enumerate(rows):
        for name, value in row.items():
            state.columns[name][slot] = value
    count = len(rows)
    for index, (token, value, until) in enumerate(((4, 8.0, 99), (9, -np.inf, 8), (4, 2.0, 99))):
        state.write_tokens(
            table=np.full(count, TokenTable.BIAS, dtype=np.int32),
            slot=np.arange(count, dtype=np.int32),
            index=np.full(count, index, dtype=np.int32),
            token_id=np.full(count, token, dtype=np.int32),
            value=np.full(count, value, dtype=np.float32),
            until=np.full(count, until, dtype=np.int32),
        )
    return state


def draw_rows(rows: list[dict], logits: torch.Tensor, tokens: list[list[int]]) -> api.Draws:
    read, _ = history_of(tokens, PLAIN["prompt_len"])
    return draw(
        state_of(rows),
        logits,
        slots_N=np.arange(len(rows)),
        positions_N=np.array([len(t) for t in tokens]),
        read_history=read,
    )


# -- a row does not see its neighbours ------------------------------------------------------


def whole(draws: api.Draws) -> api.Draws:
    """Draws of which none says "nothing was cut off" for all rows together."""
    nothing = torch.zeros_like(draws.scaled_NV, dtype=torch.bool)
    return draws._replace(outside_NV=nothing if draws.outside_NV is None else draws.outside_NV)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("mine", ["plain", *OTHERS])
@pytest.mark.parametrize("place", [0, 2])
def test_a_row_draws_the_same_bits_alone_and_beside_others(mine, other, place):
    """Which stages the neighbours need changes no bit of a row: not its id, not a logprob."""
    rows = [PLAIN | {"seed": i} | OTHERS[other] for i in range(3)]
    rows[place] = PLAIN | OTHERS.get(mine, {})
    rng = np.random.default_rng(5)
    tokens = [rng.integers(0, V, 9).tolist() for _ in rows]
    logits = random_logits(3)
    among = draw_rows(rows, logits, tokens)
    alone = draw_rows(rows[place : place + 1], logits[place : place + 1], tokens[place : place + 1])
    for together, single in zip(whole(among), whole(alone), strict=True):
        assert torch.equal(together[place], single[0])


def test_history_is_read_for_rows_with_penalties_only():
    rows = [PLAIN, PLAIN | OTHERS["penalised"], PLAIN | OTHERS["biased"]]
    read, asked = history_of([[1] * 9] * 3, 5)
    draw(
        state_of(rows),
        random_logits(3),
        slots_N=np.arange(3),
        positions_N=np.full(3, 9),
        read_history=read,
    )
    assert asked == [1]


# -- against plain loops --------------------------------------------------------------------


def test_penalties_equal_a_loop_over_tokens():
    rng = np.random.default_rng(0)
    logits = random_logits(4, seed=1)
    fields = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.7, "presence_penalty": -0.2},
        {"repetition_penalty": 0.6, "frequency_penalty": -0.3, "presence_penalty": 1.1},
        {},
    ]
    prompts = [rng.integers(0, V, 40).tolist() for _ in fields]
    outputs = [rng.integers(0, 20, 60).tolist() for _ in fields]

    def column(name: str, default: float) -> torch.Tensor:
        return torch.tensor([f.get(name, default) for f in fields], dtype=torch.float32)

    tokens = [p + o for p, o in zip(prompts, outputs, strict=True)]
    got = api.penalize(
        logits,
        row_S=torch.arange(4).repeat_interleave(100),
        token_S=torch.tensor(tokens).view(-1),
        is_output_S=(torch.arange(100) >= 40).repeat(4),
        repetition_N=column("repetition_penalty", 1.0),
        frequency_N=column("frequency_penalty", 0.0),
        presence_N=column("presence_penalty", 0.0),
    )
    for row, rule in enumerate(fields):
        want = rules.processed(logits[row].numpy(), rules.Rules(**rule), prompts[row], outputs[row])
        np.testing.assert_allclose(got[row].numpy(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(got[3], logits[3])


def test_biases_of_one_token_add_up_and_minus_infinity_wins():
    got = api.add_bias(
        torch.zeros(2, 4),
        row_B=torch.tensor([0, 0, 0, 0, 1]),
        token_B=torch.tensor([1, 1, 2, 2, 1]),
        value_B=torch.tensor([1.0, 2.0, 50.0, -torch.inf, -1.0]),
    )
    assert got.tolist() == [[0, 3, -np.inf, 0], [0, -1, 0, 0]]


def test_biases_hold_until_their_position():
    state = state_of([PLAIN | {"num_biases": 2}, PLAIN])
    both = state.biases(np.array([0, 1, 0]), np.array([7, 7, 8]))
    pairs = set(zip(both.row_B.tolist(), both.token_B.tolist(), strict=True))
    assert pairs == {(0, 4), (0, 9), (2, 4)}
    assert state.biases(np.array([1]), np.array([7])) is None


def test_noise_is_the_documented_noise():
    seeds = [0, 1, 2**63 + 5, 2**64 - 1]
    got = gumbel_noise(
        torch.from_numpy(np.array(seeds, dtype=np.uint64).view(np.int64)),
        torch.tensor([0, 7, 1000, 2**31 - 1]),
        torch.tensor([0, 1, 2, 1023]),
        vocab_size=V,
    )
    for row, (seed, position, index) in enumerate(
        zip(seeds, (0, 7, 1000, 2**31 - 1), (0, 1, 2, 1023), strict=True)
    ):
        want = gumbel(random_words(seed, position, index, V))
        np.testing.assert_allclose(got[row].numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["scaled", "raw", "truncated"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.6])
def test_what_is_reported_equals_the_written_rule(kind, temperature):
    logits = random_logits(1, seed=3)[0]
    fields = {"temperature": temperature, "top_k": 7, "top_p": 0.9}
    number = {"scaled": 0, "raw": 1, "truncated": 2}[kind]
    row = PLAIN | fields | {"logprob_kind": number, "repetition_penalty": 1.3}
    tokens = [3, 3, 8, 100, 5, 8, 9]
    got = draw_rows([row], logits[None], [tokens])
    want = rules.draw(
        logits.numpy(),
        position=7,
        prompt_ids=tokens[:5],
        output_ids=tokens[5:],
        seed=77,
        repetition_penalty=1.3,
        kind=kind,
        **fields,
    )
    assert got.ids_N.item() == want.token_id
    reported = (got.reported_NV - got.log_total_N[:, None])[0].numpy()
    np.testing.assert_allclose(reported, want.reported, rtol=0, atol=1e-5)
    assert got.logprobs_N.item() == reported[want.token_id]


# -- supports: what was drawn from is what is reported (sglang #27408, #33593) ---------------

SUPPORTS = {
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 6, "top_p": 0.85, "min_p": 0.05},
    "one": {"top_k": 1},
}
WITH_TIES = torch.log(torch.tensor([0.2, 0.15, 0.15, 0.15, 0.15, 0.1, 0.06, 0.04]))


@pytest.mark.parametrize("rule", SUPPORTS)
def test_20000_draws_fill_the_reported_support_and_nothing_else(rule):
    """Exact ties lie at the cut; each likely member is seen, nobody outside ever is."""
    count = 20_000
    fields = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | SUPPORTS[rule]
    draws = api.sample(
        WITH_TIES.expand(count, -1),
        raw_NV=WITH_TIES.expand(count, -1),
        position_N=torch.arange(count),
        temperature_N=torch.ones(count),
        seed_N=torch.full((count,), 9),
        sample_index_N=torch.zeros(count, dtype=torch.int64),
        logprob_kind_N=torch.full((count,), 2),
        **{f"{n}_N": torch.full((count,), v) for n, v in fields.items()},
    )
    support = torch.isfinite(draws.reported_NV[0]).numpy()
    want = rules.support_of(WITH_TIES.numpy(), **{"top_k": -1} | SUPPORTS[rule])
    assert sorted(want.order[: want.size]) == np.flatnonzero(support).tolist()
    counts = np.bincount(draws.ids_N.numpy(), minlength=8)
    assert not counts[~support].any()
    share = np.exp(WITH_TIES.numpy()) * support
    share /= share.sum()
    assert np.abs(counts / count - share).max() < 0.02
    np.testing.assert_allclose(
        draws.logprobs_N.numpy(), np.log(share[draws.ids_N.numpy()]), atol=1e-5
    )


def test_at_equal_probabilities_the_lower_ids_are_kept():
    one = {"top_p_N": torch.ones(1), "min_p_N": torch.zeros(1)}
    for top_k in range(1, 9):
        mask = support_mask(torch.zeros(1, 8), top_k_N=torch.tensor([top_k]), **one)
        assert mask[0].nonzero().view(-1).tolist() == list(range(top_k))


# -- statuses -------------------------------------------------------------------------------


def statuses(logits: torch.Tensor, raw: torch.Tensor, kind: int = 0, **fields: object) -> list[int]:
    count = len(logits)
    values = {n: PLAIN[n] for n in ("temperature", "top_k", "top_p", "min_p", "seed")} | fields
    draws = api.sample(
        logits,
        raw_NV=raw,
        position_N=torch.zeros(count, dtype=torch.int64),
        sample_index_N=torch.zeros(count, dtype=torch.int64),
        logprob_kind_N=torch.full((count,), kind),
        **{f"{n}_N": torch.full((count,), v) for n, v in values.items()},
    )
    assert ((draws.ids_N >= 0) & (draws.ids_N < logits.shape[1])).all()
    return draws.status_N.tolist()


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"top_k": 2, "top_p": 0.5}])
def test_each_failure_has_its_status_whatever_is_reported(kind, fields):
    good = torch.arange(6.0)
    some = good.clone()
    some[:5] = -torch.inf
    none, nan, inf = good * 0 - torch.inf, good.clone(), good.clone()
    nan[2], inf[2] = torch.nan, torch.inf
    logits = torch.stack([good, some, none, none, nan, inf])
    raw = torch.stack([good, good, good, none, nan, inf])
    assert statuses(logits, raw, kind, **fields) == [0, 0, 2, 1, 1, 1]


def test_a_failed_row_leaves_its_neighbours_alone():
    logits = random_logits(3)
    logits[1] = torch.nan
    rows = [PLAIN | {"seed": i} for i in range(3)]
    among = draw_rows(rows, logits, [[1] * 9] * 3)
    for place in (0, 2):
        alone = draw_rows(rows[place : place + 1], logits[place : place + 1], [[1] * 9])
        for together, single in zip(whole(among), whole(alone), strict=True):
            assert torch.equal(together[place], single[0])


def test_equal_top_logprobs_are_in_the_order_of_their_ids():
    """As the greedy draw takes the lowest id; of a logit there are two zeros."""
    logits = (random_logits(8) * 2).round() / 2
    logits[:, ::7], logits[:, 3::11] = 0.0, -0.0
    logits[1, : V // 2] = -torch.inf
    total = torch.logsumexp(logits, dim=-1)
    for num_top in (1, 2, 5, V):
        ids, values = api.top_logprobs(logits, total, num_top)
        want = torch.sort(logits, dim=-1, descending=True, stable=True)
        assert torch.equal(ids, want.indices[:, :num_top])
        assert torch.equal(values, want.values[:, :num_top] - total[:, None])
        assert torch.equal(ids[:, 0], api.sample_greedy(logits).ids_N)


def test_top_logprobs_are_sorted_and_complete():
    logits = random_logits(3)
    total = torch.logsumexp(logits, dim=-1)
    for num_top in (1, 5, V):
        ids, values = api.top_logprobs(logits, total, num_top)
        want = torch.log_softmax(logits, dim=-1)
        assert torch.equal(values, values.sort(dim=-1, descending=True).values)
        torch.testing.assert_close(values, want.gather(1, ids))
        least = want.sort(descending=True).values[:, num_top - 1]
        torch.testing.assert_close(values[:, -1], least)
