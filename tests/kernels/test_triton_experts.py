"""The experts' MLPs in Triton: against plain loops in float64, and the sort by itself.

Shape legend: T tokens, K experts per token, E experts, M model dim, I expert inner dim, S slots.
"""

from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dovetail.kernels.ref.backend import RefKernels
from dovetail.kernels.registry import load_kernels
from dovetail.kernels.triton import experts
from dovetail.kernels.triton.grouped_mm import torch_grouped_moe
from dovetail.kernels.triton.tiles import GemmTiles, GroupedTiles, RowTiles, SlotwiseTiles
from tests.support.gpu import DEVICE, assert_near, big_randn, ints, randn

SLOTWISE = SlotwiseTiles(up_columns=16, up_depth=32, down_columns=32, down_depth=16, num_warps=1)
GEMM = GemmTiles(columns=32, depth=32, num_warps=4, num_stages=2)
GROUPED = GroupedTiles(rows=16, up=GEMM, down=GEMM)
WAYS: dict[str, Callable[..., Tensor]] = {
    "slotwise": partial(experts.slotwise_moe, tiles=SLOTWISE),
    "grouped": partial(experts.grouped_moe, tiles=GROUPED),
    "torch": partial(torch_grouped_moe, tiles=RowTiles(num_warps=1)),
}


def exact_moe(
    x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    """Expert by expert, in float64."""
    out_TM = torch.zeros(x_TM.shape, dtype=torch.float64, device=x_TM.device)
    for expert in range(len(w_down)):
        tokens, ranks = (ids_TK == expert).nonzero(as_tuple=True)
        gate, up = (x_TM[tokens].double() @ w_gate_up[expert].double().T).chunk(2, dim=1)
        y = (gate * gate.sigmoid() * up) @ w_down[expert].double().T
        out_TM.index_add_(0, tokens, y * weights_TK[tokens, ranks, None].double())
    return out_TM


def inputs(
    ids: list[list[int]],
    *,
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """x, ids, weights, w_gate_up, w_down; ``shape`` = (E, I, M)."""
    num_experts, inner, width = shape
    return (
        randn(len(ids), width, dtype=dtype),
        ints(ids),
        randn(len(ids), len(ids[0]), seed=1).abs(),
        (randn(num_experts, 2 * inner, width, seed=2) / width**0.5).to(dtype),
        (randn(num_experts, width, inner, seed=3) / inner**0.5).to(dtype),
    )


@st.composite
def choices(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Some experts of which all tokens are fond, and some without any."""
    num_experts = draw(st.integers(1, 9))
    k = draw(st.integers(1, min(num_experts, 4)))
    num_tokens = draw(st.integers(1, 20))
    permutations = st.permutations(range(num_experts)).map(lambda order: order[:k])
    return num_experts, draw(st.lists(permutations, min_size=num_tokens, max_size=num_tokens))


@pytest.mark.parametrize("way", ["slotwise", "grouped"])
@settings(deadline=None, max_examples=6)
@given(choice=choices())
def test_equals_plain_loops(way: str, choice: tuple[int, list[list[int]]]) -> None:
    num_experts, ids = choice
    args = inputs(ids, shape=(num_experts, 24, 40))
    assert_near(WAYS[way](*args), exact_moe(*args), rounding=2e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_aligned_shapes(way: str, ids_dtype: torch.dtype) -> None:
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(20)]).tolist()
    x, ids_TK, *rest = inputs(ids, shape=(6, 32, 64))
    ours = WAYS[way](x, ids_TK.to(ids_dtype), *rest)
    assert_near(ours, exact_moe(x, ids_TK, *rest), rounding=2e-6)


@pytest.mark.parametrize("way", ["slotwise", "grouped"])
def test_expert_outputs_are_rounded_and_then_summed_in_float32(way: str) -> None:
    """Two experts that all but cancel: rounding anything else would lose the rest."""
    x_TM = torch.ones(1, 16, dtype=torch.float16, device=DEVICE)
    w_gate_up = torch.full((2, 32, 16), 1 / 16, dtype=torch.float16, device=DEVICE)
    w_down = torch.full((2, 16, 16), 16.02, dtype=torch.float16, device=DEVICE)
    w_down[1] = -15.97
    weights_TK = torch.tensor([[0.5 + 2**-12, 0.5 - 2**-12]], device=DEVICE)
    ours = WAYS[way](x_TM, ints([[0, 1]]), weights_TK, w_gate_up, w_down)
    hidden = torch.sigmoid(torch.tensor(1.0)).half().double()
    y0, y1 = ((16 * hidden * w_down[i, 0, 0].item()).half().double() for i in (0, 1))
    wanted = y0 * (0.5 + 2**-12) + y1 * (0.5 - 2**-12)
    assert ours.tolist() == [[wanted.half().item()] * 16]


def test_rows_of_other_tokens_do_not_leak() -> None:
    """A token of NaN spoils itself alone, though it shares a run with others."""
    x, ids, *rest = inputs([[0, 1]] * 5, shape=(3, 24, 40))
    before = WAYS["grouped"](x, ids, *rest)
    x[2] = torch.nan
    after = WAYS["grouped"](x, ids, *rest)
    assert after[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(after[others], before[others])


@settings(deadline=None, max_examples=40)
@given(choice=choices(), rows=st.sampled_from([1, 2, 4, 16]))
def test_runs_cover_every_slot_once(choice: tuple[int, list[list[int]]], rows: int) -> None:
    num_experts, ids = choice
    order, runs, counts = experts.sort_slots(ints(ids), num_experts, rows=rows)
    flat = [expert for row in ids for expert in row]
    assert sorted(order.tolist()) == list(range(len(flat)))
    assert counts.tolist() == [flat.count(expert) for expert in range(num_experts)]
    seen: list[int] = []
    for expert, first, num_rows in runs.tolist():
        if num_rows:
            assert 0 < num_rows <= rows
            mine = order[first : first + num_rows].tolist()
            assert all(flat[slot] == expert for slot in mine)
            seen += mine
    assert sorted(seen) == list(range(len(flat)))


def test_sort_of_more_slots_than_one_program_takes() -> None:
    ids = torch.stack([torch.randperm(300)[:8] for _ in range(100)])
    order, runs, _ = experts.sort_slots(ids.to(DEVICE, torch.int32), 300, rows=4)
    assert order.sort().values.tolist() == list(range(800))
    by_place = ids.flatten()[order.cpu().long()]
    assert torch.equal(by_place, by_place.sort().values)
    assert runs[:, 2].sum() == 800


def test_slots_are_added_in_their_order() -> None:
    """In float32 2**24 + 1 is 2**24: what comes out tells which two were added first."""
    big = 2.0**24
    y_TKM = torch.tensor([[big, 1.0, -big], [big, -big, 1.0], [1.0, big, -big]], device=DEVICE)
    y_SM = y_TKM.reshape(9, 1).expand(9, 64).contiguous()
    got = experts.combine(y_SM, torch.ones(3, 3, device=DEVICE))
    assert got.tolist() == [[0.0] * 64, [1.0] * 64, [0.0] * 64]


# -- on the GPU -------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 32, 128, 256, 700, 2048])
def test_experts_on_the_gpu(num_tokens: int) -> None:
    """Shapes of 30b-a3b, through the table, in bfloat16 against float32."""
    ours = load_kernels("triton", DEVICE)
    x = big_randn(num_tokens, 2048)
    weights, ids = ours.route(big_randn(num_tokens, 128, dtype=torch.float32), 8, True)
    w_gate_up = big_randn(128, 2 * 768, 2048, seed=1).mul_(2048**-0.5)
    w_down = big_randn(128, 2048, 768, seed=2).mul_(768**-0.5)
    args = (x, ids, weights, w_gate_up, w_down)
    got = ours.fused_moe(*args)
    exact = exact_moe(*args)
    # Hidden states and expert outputs are rounded on the way to the result.
    assert_near(got, exact, rounding=2**-7)
    assert ((got.double() - exact).norm() / exact.norm()).item() < 4e-3
    assert torch.equal(ours.fused_moe(*args), got), "the same inputs give the same bits"
    by_torch = torch_grouped_moe(*args, tiles=RowTiles(num_warps=4))
    assert_near(by_torch, exact, rounding=2**-7)


@pytest.mark.cuda
def test_reference_on_the_gpu_agrees_with_loops() -> None:
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(40)]).tolist()
    args = inputs(ids, shape=(6, 32, 64))
    assert_near(RefKernels().fused_moe(*args), exact_moe(*args), rounding=1e-3)
