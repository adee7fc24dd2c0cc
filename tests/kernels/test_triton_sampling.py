"""The plain sampler in Triton: the documented noise bit by bit, and draws against the plain one.

Shape legend: N rows, V vocabulary.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.kernels.backend import PlainDraws
from dovetail.kernels.ref.backend import RefKernels
from dovetail.kernels.ref.sampling import gumbel_noise
from dovetail.kernels.registry import load_kernels
from dovetail.kernels.triton.sampling import gumbel, random_words, sample_plain, uniform
from dovetail.kernels.triton.tiles import SampleTiles
from tests.support import noise
from tests.support.gpu import DEVICE, randn

# Where a GPU gives NaN or infinity without a word, the interpreter's numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

REF = RefKernels()
TILES = SampleTiles(tokens=128, num_splits=3, num_warps=1)
LEAST_GAP = 1e-4
"""Of perturbed scores; nearer ones may change places by rounding."""


@triton.jit
def words_kernel(out_ptr, seed_ptr, position, sample_index, first, BLOCK: tl.constexpr):
    words = random_words(tl.load(seed_ptr), position, sample_index, first, BLOCK)
    tl.store(out_ptr + tl.arange(0, BLOCK), words.to(tl.int64))


@triton.jit
def gumbel_kernel(words_ptr, out_ptr, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + lane, gumbel(uniform(tl.load(words_ptr + lane).to(tl.uint32))))


@pytest.mark.parametrize("seed", [0, 1, 77, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize(("position", "sample_index"), [(0, 0), (131071, 3), (2**31 - 1, 1023)])
def test_words_are_the_documented_words(seed: int, position: int, sample_index: int) -> None:
    out = torch.empty(256, dtype=torch.int64, device=DEVICE)
    seeds = torch.from_numpy(np.array([seed], dtype=np.uint64).view(np.int64)).to(DEVICE)
    words_kernel[(1,)](out, seeds, position, sample_index, 1024, BLOCK=256)
    wanted = noise.random_words(seed, position, sample_index, 1024 + 256)[1024:]
    assert out.tolist() == wanted.tolist()


def test_noise_of_all_kinds_of_words() -> None:
    """Relative precision where u is small: those are the draws that win."""
    edges = [0, 1, 2, 3, 100, 127, 128, 255, 2**16, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 200]
    words = np.concatenate(
        [
            np.array(edges, dtype=np.uint64),
            np.random.default_rng(0).integers(0, 2**32, 499, dtype=np.uint64),
            2 ** np.random.default_rng(1).uniform(0, 32, 512),
        ]
    ).astype(np.uint32)
    out = torch.empty(1024, dtype=torch.float32, device=DEVICE)
    source = torch.from_numpy(words.astype(np.int64)).to(DEVICE)
    gumbel_kernel[(16,)](source, out, BLOCK=64)
    u = (words.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    exact = -np.log(-np.log1p(-u.astype(np.float64)))
    np.testing.assert_allclose(out.cpu().numpy(), exact, rtol=2e-6, atol=2e-6)


def test_the_largest_words_have_finite_noise() -> None:
    words = torch.full((64,), 2**32 - 1, dtype=torch.int64, device=DEVICE)
    out = torch.empty(64, dtype=torch.float32, device=DEVICE)
    gumbel_kernel[(1,)](words, out, BLOCK=64)
    assert out.unique().tolist() == [torch.finfo(torch.float32).min]


def rows(count: int, **columns: object) -> dict[str, Tensor]:
    defaults = {
        "temperature_N": torch.full((count,), 0.7),
        "seed_N": torch.arange(count) * -(2**59) + 5,
        "position_N": torch.arange(count) * 1000 + 9,
        "sample_index_N": torch.arange(count) % 3,
    }
    return {name: columns.get(name, value).to(DEVICE) for name, value in defaults.items()}


def assert_same_draws(ours: PlainDraws, logits_NV: Tensor, params: dict[str, Tensor]) -> None:
    """Equal to the plain sampler; where ids differ, their perturbed scores hardly do."""
    wanted = REF.sample_plain(logits_NV, **params)
    assert [x.dtype for x in ours] == [x.dtype for x in wanted]
    assert torch.equal(ours.status_N, wanted.status_N) and wanted.status_N.eq(0).all()
    torch.testing.assert_close(ours.log_total_N, wanted.log_total_N, rtol=1e-6, atol=1e-5)
    divisor = torch.where(params["temperature_N"] == 0, 1.0, params["temperature_N"])
    scaled = logits_NV.double() / divisor[:, None]
    noise_NV = gumbel_noise(
        params["seed_N"],
        params["position_N"],
        params["sample_index_N"],
        vocab_size=logits_NV.shape[1],
    )
    scores = scaled + noise_NV * (params["temperature_N"] > 0)[:, None]
    gap = scores.gather(1, wanted.ids_N[:, None]) - scores.gather(1, ours.ids_N[:, None])
    assert gap.abs().max() < LEAST_GAP
    assert (ours.ids_N == wanted.ids_N).float().mean() > 0.98
    logprobs = scaled.log_softmax(-1).gather(1, ours.ids_N[:, None]).view(-1)
    # Scores are float32: of large ones the last place alone is more than 1e-5.
    slack = 1e-5 + scaled.abs().max().item() * 2**-23
    torch.testing.assert_close(ours.logprobs_N.double(), logprobs, rtol=0, atol=slack)


@pytest.mark.parametrize("vocab_size", [1, 5, 128, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_draws_equal_those_of_the_plain_sampler(dtype: torch.dtype, vocab_size: int) -> None:
    temperature = torch.tensor([0.7, 0.0, 1.0, 1.6, 0.05, 0.0, 1.0, 1.0])
    logits = (randn(8, vocab_size + 7) * 4).to(dtype)[:, :vocab_size]  # rows with a gap
    params = rows(8, temperature_N=temperature)
    assert_same_draws(sample_plain(logits, **params, tiles=TILES), logits, params)


def test_a_row_draws_the_same_bits_however_it_is_divided() -> None:
    logits, params = randn(2, 500), rows(2)
    draws = [
        sample_plain(logits, **params, tiles=SampleTiles(tokens=t, num_splits=s, num_warps=1))
        for t, s in ((64, 1), (64, 8), (256, 2))
    ]
    for other in draws[1:]:
        assert torch.equal(other.ids_N, draws[0].ids_N)
        torch.testing.assert_close(other.logprobs_N, draws[0].logprobs_N, rtol=0, atol=2e-6)


def test_greedy_takes_the_lower_of_equal_ids() -> None:
    logits = torch.zeros(2, 300, device=DEVICE)
    logits[1, [290, 70, 200]] = 3.0
    params = rows(2, temperature_N=torch.zeros(2))
    for num_splits in (1, 3):  # 70 and 198 meet in one lane, or two programs
        logits[1, 198] = 3.0
        tiles = SampleTiles(tokens=128, num_splits=num_splits, num_warps=1)
        assert sample_plain(logits, **params, tiles=tiles).ids_N.tolist() == [0, 70]


def test_a_token_that_is_the_only_one_left_is_drawn() -> None:
    logits = torch.full((4, 200), -torch.inf, device=DEVICE)
    left = [199, 0, 64, 127]
    logits[range(4), left] = torch.tensor([0.0, -1e30, 50.0, 3.0], device=DEVICE)
    draws = sample_plain(logits, **rows(4), tiles=TILES)
    assert draws.ids_N.tolist() == left
    assert draws.logprobs_N.tolist() == [0.0] * 4 and draws.status_N.tolist() == [0] * 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_spoilt_rows_have_a_status_and_hurt_nobody(temperature: float) -> None:
    logits = randn(6, 200)
    params = rows(6, temperature_N=torch.full((6,), temperature))
    before = sample_plain(logits, **params, tiles=TILES)
    logits[1], logits[3, 150], logits[4, 7] = -torch.inf, torch.nan, torch.inf
    after = sample_plain(logits, **params, tiles=TILES)
    assert after.status_N.tolist() == [0, 1, 0, 1, 1, 0]
    assert ((after.ids_N >= 0) & (after.ids_N < 200)).all()
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[[0, 2, 5]], y[[0, 2, 5]])


@pytest.mark.parametrize("scale", [0.01, 8.0, 1e6])
def test_leaving_out_noise_changes_no_draw(scale: float) -> None:
    """Programs of one turn leave out nothing; of many turns, most noise."""
    logits = randn(16, 512) * scale
    logits[::5, 400] += 40.0  # a late winner, beside flat rows and steep ones
    params = rows(16, temperature_N=torch.full((16,), 1.0))
    in_one, in_many = (
        sample_plain(logits, **params, tiles=SampleTiles(tokens=t, num_splits=1, num_warps=1))
        for t in (512, 64)
    )
    assert torch.equal(in_one.ids_N, in_many.ids_N)
    assert_same_draws(in_many, logits, params)


# -- on the GPU -------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 32, 256])
def test_draws_on_the_gpu(num_rows: int, dtype: torch.dtype) -> None:
    logits = (randn(num_rows, 151_936) * 3).to(dtype)
    temperature = torch.linspace(0.0, 1.5, num_rows)
    params = rows(num_rows, temperature_N=temperature)
    ours = load_kernels("triton", DEVICE).sample_plain(logits, **params)
    assert_same_draws(ours, logits, params)


@pytest.mark.cuda
def test_shares_of_100000_draws_are_the_probabilities() -> None:
    count = 100_000
    probabilities = torch.tensor([0.2, 0.15, 0.15, 0.15, 0.15, 0.1, 0.06, 0.04], device=DEVICE)
    logits = probabilities.log().expand(count, -1)
    params = rows(
        count,
        temperature_N=torch.ones(count),
        seed_N=torch.full((count,), 9),
        position_N=torch.arange(count),
        sample_index_N=torch.zeros(count, dtype=torch.int64),
    )
    draws = load_kernels("triton", DEVICE).sample_plain(logits, **params)
    share = torch.bincount(draws.ids_N, minlength=8) / count
    assert (share - probabilities).abs().max() < 0.008
