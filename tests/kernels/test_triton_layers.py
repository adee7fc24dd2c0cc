"""Norms, activation, rotation with the write into the cache, and routing in Triton.

Shape legend: T tokens, H query heads, K KV heads or experts per token, D head dim, E experts.
"""

import pytest
import torch

from dovetail.kernels.backend import Capture
from dovetail.kernels.ref.backend import RefKernels
from dovetail.kernels.triton import activation, norm, rotary, router
from dovetail.kernels.triton.tiles import RotateTiles, RowTiles
from tests.support.gpu import DEVICE, assert_near, big_randn, ints, randn

# Where a GPU gives NaN or infinity without a word, the interpreter's numpy warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

REF = RefKernels()
TILES = RowTiles(num_warps=1)
SMALL = [torch.float32, torch.float16]
ON_GPU = pytest.param(torch.bfloat16, marks=pytest.mark.cuda)


def half_unit(dtype: torch.dtype) -> float:
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2


# -- norms and activation ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*SMALL, ON_GPU])
@pytest.mark.parametrize("shape", [(1, 1024), (3, 2, 40), (7, 130), (0, 64)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 0.01).sqrt() * weight.double()
    ours = norm.rms_norm(x, weight, 0.01, tiles=TILES)
    assert ours.dtype == dtype
    if x.numel():
        assert_near(ours, exact, rounding=half_unit(dtype))


@pytest.mark.parametrize("dtype", [*SMALL, ON_GPU])
def test_add_rms_norm_normalises_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual, weight = (randn(5, 100, dtype=dtype, seed=i) for i in range(3))
    before = x.clone(), residual.clone()
    normed, total = norm.add_rms_norm(x, residual, weight[0], 1e-6, tiles=TILES)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm.rms_norm(total, weight[0], 1e-6, tiles=TILES))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", [*SMALL, ON_GPU])
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = randn(3, 2, 2 * 1100, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    ours = activation.silu_mul(gate_up, tiles=TILES)
    assert_near(ours, gate * gate.sigmoid() * up, rounding=half_unit(dtype))


def test_silu_mul_of_large_numbers_is_finite() -> None:
    gate_up = torch.tensor([[-500.0, 500.0, 1.0, 2.0]], device=DEVICE)
    assert activation.silu_mul(gate_up, tiles=TILES).tolist() == [[0.0, 1000.0]]


# -- rotation ---------------------------------------------------------------------------------


def cos_sin(num_positions: int, dim: int) -> torch.Tensor:
    angles = torch.outer(torch.arange(num_positions), 100.0 ** (-torch.arange(0, dim, 2) / dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, cos, -sin, sin), dim=1).reshape(num_positions, 2, dim).to(DEVICE)


@pytest.mark.parametrize("dtype", [*SMALL, ON_GPU])
@pytest.mark.parametrize("heads", [(4, 2, 32), (3, 1, 64), (32, 4, 128)])
@pytest.mark.parametrize("has_norm", [True, False])
def test_rotate_and_store(has_norm: bool, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, dim = heads
    width = (num_heads + 2 * num_kv_heads) * dim
    qkv = randn(5, width + 16, dtype=dtype)[:, :width]  # rows with a gap
    norms = (randn(dim, dtype=dtype, seed=1), randn(dim, dtype=dtype, seed=2), 1e-5)
    caches = [torch.full((12, num_kv_heads, dim), 7.0, dtype=dtype, device=DEVICE) for _ in "kvkv"]
    places = {
        "qk_norm": norms if has_norm else None,
        "cos_sin_P2D": cos_sin(40, dim),
        "positions_T": ints([3, 39, 0, 11, 0]),
        "kv_slots_T": ints([4, 2, 9, 11, 11], torch.int64),  # the last two: the sink
    }
    q = rotary.rotate_and_store(
        qkv,
        **places,
        k_cache_CKD=caches[0],
        v_cache_CKD=caches[1],
        tiles=RotateTiles(heads=4, num_warps=1),
    )
    wanted = REF.rotate_and_store(qkv, **places, k_cache_CKD=caches[2], v_cache_CKD=caches[3])
    # Cancellation leaves float32 noise of the terms, and float32 may round the other way.
    near = {"rtol": 2 * half_unit(dtype) + 1e-5, "atol": 1e-5}
    torch.testing.assert_close(q, wanted, **near)
    torch.testing.assert_close(caches[0][:11], caches[2][:11], **near)
    assert torch.equal(caches[1][:11], caches[3][:11])
    assert torch.isfinite(caches[0]).all()
    untouched = [0, 1, 3, 5, 6, 7, 8, 10]
    assert caches[0][untouched].eq(7).all() and caches[1][untouched].eq(7).all()


def test_stores_into_keys_and_values_side_by_side() -> None:
    pool = torch.zeros(6, 2, 1, 32, device=DEVICE)
    apart = [torch.zeros(6, 1, 32, device=DEVICE) for _ in "kv"]
    for k_cache, v_cache in ((pool[:, 0], pool[:, 1]), apart):
        rotary.rotate_and_store(
            randn(2, 96),
            qk_norm=None,
            cos_sin_P2D=cos_sin(4, 32),
            positions_T=ints([1, 2]),
            kv_slots_T=ints([5, 3]),
            k_cache_CKD=k_cache,
            v_cache_CKD=v_cache,
            tiles=RotateTiles(heads=2, num_warps=1),
        )
    assert torch.equal(pool[:, 0], apart[0]) and torch.equal(pool[:, 1], apart[1])
    assert pool[5].abs().sum() > 0


# -- routing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*SMALL, torch.bfloat16])
@pytest.mark.parametrize(("num_experts", "k"), [(128, 8), (5, 3), (300, 6), (4, 4), (8, 1)])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_route(norm_topk_prob: bool, num_experts: int, k: int, dtype: torch.dtype) -> None:
    logits = randn(9, num_experts + 3, dtype=dtype)[:, :num_experts]  # bfloat16 has ties
    weights, ids = router.route(logits, k, norm_topk_prob, tiles=TILES)
    wanted_weights, wanted_ids = REF.route(logits, k, norm_topk_prob)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=2e-6, atol=1e-9)


def test_equal_logits_go_by_id() -> None:
    logits = torch.zeros(2, 128, device=DEVICE)
    logits[1, ::2] = -0.0
    assert router.route(logits, 8, True, tiles=TILES)[1].tolist() == [list(range(8))] * 2
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]], device=DEVICE)
    assert router.route(logits, 3, True, tiles=TILES)[1].tolist() == [[1, 3, 0]]


def test_far_apart_logits_are_still_ordered() -> None:
    """Their probabilities are all 0 but one."""
    logits = torch.tensor([[-3e4, 1e4, -1e4, 0.0, -torch.inf]], device=DEVICE)
    weights, ids = router.route(logits, 4, True, tiles=TILES)
    assert ids.tolist() == [[1, 3, 2, 0]]
    assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_ids_are_legal_whatever_the_logits_are() -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[nan] * 4, [1, nan, -inf, 2], [-inf] * 4, [nan, inf, nan, 0]])
    weights, ids = router.route(logits.to(DEVICE), 4, True, tiles=TILES)
    wanted = [[0, 1, 2, 3], [3, 0, 2, 1], [0, 1, 2, 3], [1, 3, 0, 2]]
    assert ids.tolist() == wanted == REF.route(logits, 4, True)[1].tolist()
    assert weights.isnan().any(dim=-1).all(), "a spoilt row must show"
    five = torch.full((1, 5), nan, device=DEVICE)
    assert router.route(five, 5, True, tiles=TILES)[1].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(("dtype", "num_experts"), [(torch.uint8, 255), (torch.uint16, 400)])
def test_route_records_at_the_slot_and_layer(dtype: torch.dtype, num_experts: int) -> None:
    logits = randn(3, num_experts)
    logits[0, num_experts - 1] = 99.0
    both = []
    for run in (lambda *a, **o: router.route(*a, **o, tiles=TILES), REF.route):
        routes = torch.zeros(7, 3, 4, dtype=torch.int16, device=DEVICE).to(dtype)
        capture = Capture(routes, ints([5, 2, 6], torch.int64), moe_layer=1)
        _, ids = run(logits, 4, True, capture=capture)
        both.append(routes.cpu().to(torch.int64))
        assert both[-1][[5, 2, 6], 1].tolist() == ids.tolist()
    assert torch.equal(*both)
    assert both[0][[0, 1, 3, 4]].eq(0).all() and both[0][:, [0, 2]].eq(0).all()
    assert both[0][5, 1, 0] == num_experts - 1


# -- on the GPU -------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 256, 4096])
def test_layers_on_the_gpu(num_tokens: int) -> None:
    """Shapes of 30b-a3b, through the table."""
    from dovetail.kernels.registry import load_kernels

    ours = load_kernels("triton", DEVICE)
    x, residual, weight = (big_randn(num_tokens, 2048, seed=i) for i in range(3))
    normed, total = ours.add_rms_norm(x, residual, weight[0], 1e-6)
    assert torch.equal(total, x + residual)
    wanted = REF.rms_norm(total.float(), weight[0].float(), 1e-6)
    assert_near(normed, wanted, rounding=2**-9)
    gate_up = big_randn(num_tokens, 2 * 3072)
    assert_near(ours.silu_mul(gate_up), REF.silu_mul(gate_up.float()), rounding=2**-9)
    logits = big_randn(num_tokens, 128)
    weights, ids = ours.route(logits, 8, True)
    assert torch.equal(ids, REF.route(logits, 8, True)[1])
    torch.testing.assert_close(weights, REF.route(logits, 8, True)[0], rtol=2e-6, atol=1e-9)


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 256, 4096])
def test_rotation_on_the_gpu(num_tokens: int) -> None:
    """The same shapes: 32 heads, 4 of keys, norms of both."""
    from dovetail.kernels.registry import load_kernels

    num_heads, num_kv_heads, dim, num_slots = 32, 4, 128, 8192
    qkv = big_randn(num_tokens, (num_heads + 2 * num_kv_heads) * dim)
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0))
    caches = [
        torch.zeros(num_slots + 1, num_kv_heads, dim, dtype=torch.bfloat16, device=DEVICE)
        for _ in "kvkv"
    ]
    places = {
        "qk_norm": (big_randn(dim, seed=1), big_randn(dim, seed=2), 1e-6),
        "cos_sin_P2D": cos_sin(40_960, dim),
        "positions_T": ints([(7919 * i) % 40_960 for i in range(num_tokens)]),
        "kv_slots_T": order[:num_tokens].to(DEVICE),
    }
    kernels = load_kernels("triton", DEVICE)
    q = kernels.rotate_and_store(qkv, **places, k_cache_CKD=caches[0], v_cache_CKD=caches[1])
    wanted = REF.rotate_and_store(qkv, **places, k_cache_CKD=caches[2], v_cache_CKD=caches[3])
    near = {"rtol": 2 * half_unit(torch.bfloat16) + 1e-5, "atol": 1e-5}
    torch.testing.assert_close(q, wanted, **near)
    torch.testing.assert_close(caches[0], caches[2], **near)
    assert torch.equal(caches[1], caches[3])
