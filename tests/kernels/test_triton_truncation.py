"""Truncation and shaped draws in Triton leave and draw what the plain sampler does, exactly.

Shape legend: N rows, V vocabulary.
"""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.kernels import api, masses
from dovetail.kernels.backend import Borders, Kernels, PlainDraws, ShapedLogits
from dovetail.kernels.ref.backend import RefKernels
from dovetail.kernels.ref.sampling import depths, masses_of
from dovetail.kernels.registry import load_kernels
from dovetail.kernels.triton import shaped_sampling, truncation
from dovetail.kernels.triton.ranking import mass_of
from dovetail.kernels.triton.tiles import SampleTiles, TruncateTiles
from tests.support.gpu import DEVICE, big_randn, randn

# Where a GPU gives NaN or infinity without a word, the interpreter's numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DRAW = SampleTiles(tokens=128, num_splits=2, num_warps=1)
CUT = TruncateTiles(row=DRAW, tokens=128, num_warps=1)
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logprob_kind": 0}
RULES = {
    "nothing": {},
    "greedy": {"temperature": 0.0, "top_k": 3},
    "k=1": {"top_k": 1},
    "k": {"top_k": 37, "temperature": 0.6},
    "k=V-1": {"top_k": 299},
    "k=V": {"top_k": 300},
    "k>V": {"top_k": 4000},
    "k, cold": {"top_k": 40, "temperature": 0.0001},
    "tiny p": {"top_p": 1e-30},
    "p that rounds to 0": {"top_p": 1e-300},
    "p": {"top_p": 0.7, "temperature": 1.7},
    "p near 1": {"top_p": 0.99999994},
    "min-p": {"min_p": 0.05},
    "min-p=1": {"min_p": 1.0},
    "k and p": {"top_k": 50, "top_p": 0.8},
    "k, and p that rounds to 0": {"top_k": 50, "top_p": 1e-300},
    "k, and p near 1": {"top_k": 37, "top_p": 0.9999},
    "all": {"top_k": 90, "top_p": 0.95, "min_p": 0.01, "temperature": 0.9, "logprob_kind": 2},
    "raw": {"top_p": 0.5, "logprob_kind": 1},
}


def columns(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Parameters by name, as the device has them."""
    dtypes = {"top_k": torch.int32, "logprob_kind": torch.int32}
    return {
        f"{name}_N": torch.tensor(
            [(NEUTRAL | row)[name] for row in rows], dtype=dtypes.get(name, torch.float32)
        ).to(DEVICE)
        for name in NEUTRAL
    }


def plain_logits(logits_NV: Tensor) -> ShapedLogits:
    """Rows that nothing changed; what is never read is NaN."""
    unread = torch.full_like(logits_NV, torch.nan)
    return ShapedLogits(logits_NV, unread, logits_NV.new_zeros(len(logits_NV), dtype=torch.int32))


def draw(
    kernels: Kernels | None, logits: ShapedLogits, params: dict[str, Tensor]
) -> tuple[Borders, PlainDraws, tuple[Tensor, Tensor, Tensor]]:
    """Truncate, draw, spread; the interpreter's small tiles without ``kernels``."""
    num_rows = len(logits.raw_NV)
    index = torch.arange(num_rows, device=DEVICE)
    cuts = {name: params[name] for name in ("temperature_N", "top_k_N", "top_p_N", "min_p_N")}
    of = {"temperature_N": params["temperature_N"], "logprob_kind_N": params["logprob_kind_N"]}
    noise = {"seed_N": index * -(2**59) + 5, "position_N": index + 9, "sample_index_N": index % 3}
    out = Borders(
        torch.full((num_rows,), torch.nan, device=DEVICE),
        torch.full((num_rows,), -7, dtype=torch.int32, device=DEVICE),
    )
    work_NV = torch.empty_like(logits.raw_NV, dtype=torch.int32)
    if kernels is None:
        borders = truncation.truncate(logits, **cuts, work_NV=work_NV, out=out, tiles=CUT)
        drawn = shaped_sampling.sample_shaped(logits, borders, **of, **noise, tiles=DRAW)
        return borders, drawn, shaped_sampling.spread(logits, borders, **of)
    borders = kernels.truncate(logits, **cuts, work_NV=work_NV, out=out)
    drawn = kernels.sample_shaped(logits, borders, **of, **noise)
    return borders, drawn, kernels.spread(logits, borders, **of)


def reference(logits: ShapedLogits, params: dict[str, Tensor]) -> api.Draws:
    """The same draws by the sampler of the CPU."""
    index = torch.arange(len(logits.raw_NV), device=DEVICE)
    is_changed_N1 = logits.is_changed_N[:, None] != 0
    return api.sample(
        torch.where(is_changed_N1, logits.changed_NV, logits.raw_NV),
        raw_NV=logits.raw_NV,
        seed_N=index * -(2**59) + 5,
        position_N=index + 9,
        sample_index_N=index % 3,
        **{name: value.long() if "_k" in name else value for name, value in params.items()},
    )


def check(kernels: Kernels | None, logits: ShapedLogits, params: dict[str, Tensor]) -> api.Draws:
    """Supports, statuses and what is spread out are equal; draws and logprobs up to rounding."""
    wanted = reference(logits, params)
    _, drawn, (scaled_NV, reported_NV, outside_NV) = draw(kernels, logits, params)
    none = torch.zeros_like(outside_NV)
    assert torch.equal(outside_NV, none if wanted.outside_NV is None else wanted.outside_NV)
    for ours, theirs in ((scaled_NV, wanted.scaled_NV), (reported_NV, wanted.reported_NV)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(drawn.status_N, wanted.status_N)
    assert ((drawn.ids_N >= 0) & (drawn.ids_N < scaled_NV.shape[1])).all()
    good = wanted.status_N == 0
    same = drawn.ids_N[good] == wanted.ids_N[good]
    assert same.float().mean() > 0.98  # perturbed scores can be equal up to rounding
    slack = {"rtol": 1e-6, "atol": 1e-5}
    torch.testing.assert_close(drawn.log_total_N[good], wanted.log_total_N[good], **slack)
    torch.testing.assert_close(
        drawn.logprobs_N[good][same], wanted.logprobs_N[good][same], rtol=1e-6, atol=2e-5
    )
    return wanted


# -- masses ---------------------------------------------------------------------------------


def test_masses_fall_and_are_those_of_the_softmax() -> None:
    """Within an octave at each step, then over all octaves; the likeliest has the whole mass."""
    octave = masses_of(torch.arange((1 << masses.STEP_BITS) + 1))
    assert octave[0] == 1 << masses.MASS_BITS and octave[-1] == octave[0] // 2
    assert (octave[1:] < octave[:-1]).all()
    steps = torch.arange(0, 45 << masses.STEP_BITS, 997)
    mass = masses_of(steps)
    assert (mass[1:] <= mass[:-1]).all() and mass[-1] == 0
    exact = 2.0 ** (masses.MASS_BITS - steps.double() / 2**masses.STEP_BITS)
    near = steps < 20 << masses.STEP_BITS
    torch.testing.assert_close(mass[near].double(), exact[near], rtol=1.1e-6, atol=0)
    torch.testing.assert_close(mass.double(), exact, rtol=1e-6, atol=1.0)


def test_depths_order_as_logits_do() -> None:
    scaled = (randn(1, 4000) * 5).sort(descending=True).values
    scaled[0, -1] = -torch.inf
    depth = depths(scaled, scaled[:, 0])
    assert depth[0, 0] == 0 and (depth[0, 1:] >= depth[0, :-1]).all()
    assert depth[0, -1] == masses.DEEPEST


@triton.jit
def mass_kernel(depths_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, mass_of(tl.load(depths_ptr + place)))


def test_masses_on_the_device_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    by_chance = torch.randint(0, 60 << masses.STEP_BITS, (1 << 16,), generator=generator)
    steps = torch.cat([torch.arange(4096), by_chance, torch.full((4096,), int(masses.DEEPEST))])
    out = torch.empty(len(steps), dtype=torch.int64, device=DEVICE)
    mass_kernel[(len(steps) // 4096,)](steps.int().to(DEVICE), out, BLOCK=4096)
    assert torch.equal(out.cpu(), masses_of(steps))


# -- supports and draws ---------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_leaves_what_the_sampler_of_the_cpu_leaves(rule: str) -> None:
    """Ties at every border, few tokens that are possible, equal ones alone, two kinds of zero."""
    logits = randn(4, 300) * 3
    logits[0] = logits[0].round()  # some twenty different logits
    logits[1, torch.arange(300) % 3 > 0] = -torch.inf
    logits[2] = -4.5
    logits[3, ::2] = 0.0
    logits[3, 1::4] = -0.0
    params = columns([RULES[rule]] * 4)
    wanted = check(None, plain_logits(logits), params)
    assert wanted.status_N.tolist() == [0] * 4
    if rule in ("nothing", "greedy"):
        assert wanted.outside_NV is None
    else:
        assert wanted.outside_NV is not None
        is_cut = wanted.outside_NV.any(dim=1)
        assert is_cut.any() or rule in ("k=V", "k>V")


def test_rows_of_a_step_have_rules_of_their_own() -> None:
    """From flat to steep, and some with ever smaller differences."""
    scale = torch.tensor([0.3, 1.0, 3.0, 8.0, 1e-9, 1e-4]).repeat(4)[: len(RULES), None]
    logits = randn(len(RULES), 300, seed=3) * scale.to(DEVICE)
    check(None, plain_logits(logits), columns(list(RULES.values())))


@pytest.mark.parametrize("rule", ["nothing", "all", "raw"])
def test_spoilt_rows_have_a_status_and_hurt_nobody(rule: str) -> None:
    logits = randn(7, 200, seed=4)
    logits[1], logits[2, 150], logits[3, 7] = -torch.inf, torch.nan, torch.inf
    logits[4] = torch.nan
    logits[5, :199] = -torch.inf
    wanted = check(None, plain_logits(logits), columns([RULES[rule]] * 7))
    assert wanted.status_N.tolist() == [0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_rows_that_were_changed_are_drawn_as_they_are_now(kind: int) -> None:
    """The model's own logits are looked at for raw logprobs, and to say whose fault it is."""
    raw = randn(4, 150, seed=5)
    changed = raw - randn(4, 150, seed=6).abs()
    changed[2] = -torch.inf
    changed[1] = torch.nan  # not of this row
    is_changed = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    params = columns([{"top_p": 0.8, "temperature": 0.7, "logprob_kind": kind}] * 4)
    logits = ShapedLogits(raw, changed, is_changed)
    assert check(None, logits, params).status_N.tolist() == [0, 0, 2, 0]


def test_the_border_of_min_p_is_exact() -> None:
    """The least logit of half the greatest mass stays, whatever a border below says of ids."""
    border = torch.tensor([-0.69315])
    while depths(border[None], torch.zeros(1)).item() > 1 << masses.STEP_BITS:
        border = border.nextafter(torch.zeros(1))
    logits = torch.full((2, 40), -1.0, device=DEVICE)
    logits[:, 0] = 0.0
    logits[:, 30:32] = border.to(DEVICE)
    logits[:, 32:34] = border.nextafter(torch.full((1,), -1.0)).to(DEVICE)
    params = columns([{"min_p": 0.5}, {"min_p": 0.5, "top_k": 7}])
    wanted = check(None, plain_logits(logits), params)
    assert wanted.outside_NV is not None
    inside = [row.nonzero().view(-1).tolist() for row in ~wanted.outside_NV]
    assert inside == [[0, 30, 31]] * 2


def test_random_rows_and_rules() -> None:
    """Logits on a grid, so that ties are everywhere; rules by chance."""
    rng = np.random.default_rng(0)
    rules = [
        {
            "temperature": float(rng.choice([0.0001, 0.3, 1.0, 2.5])),
            "top_k": int(rng.choice([0, 1, 2, 9, 64, 128, 150])),
            "top_p": float(rng.choice([1.0, 0.999, 0.9, 0.5, 0.01])),
            "min_p": float(rng.choice([0.0, 1e-6, 0.1, 0.9])),
            "logprob_kind": int(rng.integers(3)),
        }
        for _ in range(12)
    ]
    grid = torch.from_numpy(rng.choice([0.001, 0.5, 2.0], (12, 1))).float().to(DEVICE)
    logits = (randn(12, 150, seed=8) * 3 / grid).round() * grid
    check(None, plain_logits(logits), columns(rules))


def test_borders_of_the_oracle_leave_the_same() -> None:
    logits = randn(len(RULES), 300, seed=9).mul(4).round()
    check(RefKernels(), plain_logits(logits), columns(list(RULES.values())))


# -- on the GPU -----------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("num_rows", [1, 32, 256])
@pytest.mark.parametrize("scale", [0.02, 3.0, 12.0])
def test_a_whole_vocabulary_on_the_gpu(num_rows: int, scale: float) -> None:
    """Every row has another rule; the logits are rounded as a model's are."""
    logits = big_randn(num_rows, 151_936, seed=num_rows).float() * scale
    rules = [rule | {"logprob_kind": i % 3} for i, rule in enumerate(RULES.values())]
    chosen = [rules[(3 + i) % len(rules)] for i in range(num_rows)]
    check(load_kernels("triton", DEVICE), plain_logits(logits), columns(chosen))


@pytest.mark.cuda
def test_the_gpu_cuts_where_the_cpu_does() -> None:
    """Bit for bit: masses are integers."""
    rules = [RULES[name] | {"temperature": 0.3 + i / 40} for i, name in enumerate([*RULES] * 4)]
    logits = big_randn(len(rules), 151_936, seed=1, dtype=torch.float32) * 2
    params = columns(rules)
    _, _, (_, _, outside_NV) = draw(load_kernels("triton", DEVICE), plain_logits(logits), params)
    theirs = ShapedLogits(*(part.cpu() for part in plain_logits(logits)))
    on_cpu = {name: value.cpu() for name, value in params.items()}
    support_NV = api.support_mask(
        theirs.raw_NV / on_cpu["temperature_N"][:, None],
        top_k_N=on_cpu["top_k_N"],
        top_p_N=on_cpu["top_p_N"],
        min_p_N=on_cpu["min_p_N"],
    )
    assert torch.equal(outside_NV.cpu(), ~support_NV)
