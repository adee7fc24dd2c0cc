"""The operations of model layers against their formulas, in float64 or slot by slot.

Shape legend: T tokens, H query heads, K KV heads or experts per token, D head dim, P positions,
M model dim, E experts, I expert inner dim.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from dovetail.config.model import RopeConfig
from dovetail.kernels import api
from dovetail.layers.rotary import Rotary, rope_frequencies

DTYPES = [torch.float32, torch.bfloat16]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(ours: Tensor, exact: Tensor) -> None:
    """Equal to the float64 result, up to half a unit in the last place and float32 noise."""
    half_unit = torch.finfo(ours.dtype).eps / 2
    torch.testing.assert_close(ours.double(), exact, rtol=half_unit + 2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 192), (5, 64), (3, 4, 32)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 0.01).sqrt() * weight.double()
    assert_rounded_once(api.rms_norm(x, weight, 0.01), exact)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert api.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_normalises_the_rounded_sum(dtype: torch.dtype) -> None:
    x, residual = randn(5, 64, dtype=dtype), randn(5, 64, dtype=dtype, seed=1)
    weight = randn(64, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    normed, total = api.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, api.rms_norm(total, weight, 1e-6))
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = randn(5, 24, dtype=dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, dim=-1)
    ours = api.silu_mul(gate_up)
    # silu is rounded before the multiplication: two roundings.
    rtol = torch.finfo(dtype).eps + 2e-6
    torch.testing.assert_close(ours.double(), gate * gate.sigmoid() * up, rtol=rtol, atol=1e-6)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_pairs_by_position(dtype: torch.dtype) -> None:
    rope, dim = RopeConfig(theta=100.0), 8
    rotary = Rotary(rope, dim, 32, device=torch.device("cpu"))
    # A view, as it is where nothing normalises q and k.
    before = randn(4, 5, dim, dtype=dtype)[:, :4]
    positions = [0, 31, 5, 5]
    rotation = rotary(torch.tensor(positions))
    after = api.rotary(before, rotation.cos_T1D, rotation.sin_T1D)
    assert after.dtype == dtype and after.shape == before.shape
    exact = torch.empty(before.shape, dtype=torch.float64)
    for t, position in enumerate(positions):
        for i in range(dim // 2):
            angle = position * 100.0 ** (-2 * i / dim)
            a, b = before[t, :, i].double(), before[t, :, i + dim // 2].double()
            exact[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            exact[t, :, i + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    # Where the two products cancel, float32 noise is all that is left: hence atol.
    half_unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(after.double(), exact, rtol=half_unit + 1e-6, atol=1e-5)


def test_rope_frequencies_of_llama3_pass_smoothly_from_plain_to_slow() -> None:
    rope = RopeConfig(
        theta=10000.0,
        type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    )
    ratio = rope_frequencies(rope, 64) / rope_frequencies(RopeConfig(theta=10000.0), 64)
    assert ratio[0] == 1 and ratio[-1] == 1 / 8
    assert (ratio.diff() <= 0).all()
    assert ((ratio > 1 / 8) & (ratio < 1)).sum() >= 3


def test_rope_frequencies_of_linear_are_divided() -> None:
    slow = rope_frequencies(RopeConfig(theta=10000.0, type="linear", factor=4.0), 16)
    assert torch.equal(slow * 4, rope_frequencies(RopeConfig(theta=10000.0), 16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_router_topk(norm_topk_prob: bool, dtype: torch.dtype) -> None:
    logits_TE = randn(50, 16, dtype=dtype)
    weights_TK, ids_TK = api.router_topk(logits_TE, 4, norm_topk_prob)
    assert weights_TK.dtype == torch.float32 and ids_TK.dtype == torch.int64
    for logits, weights, ids in zip(
        logits_TE.tolist(), weights_TK.tolist(), ids_TK.tolist(), strict=True
    ):
        chosen = sorted(range(16), key=lambda expert: (-logits[expert], expert))[:4]
        assert ids == chosen
        total = math.fsum(math.exp(logits[e]) for e in (chosen if norm_topk_prob else range(16)))
        assert weights == pytest.approx([math.exp(logits[e]) / total for e in chosen], rel=1e-5)


def test_router_topk_takes_the_lower_of_equal_experts() -> None:
    _, ids_TK = api.router_topk(torch.zeros(3, 128), 8, True)
    assert ids_TK.tolist() == [list(range(8))] * 3
    _, ids_TK = api.router_topk(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), 3, True)
    assert ids_TK.tolist() == [[1, 3, 0]]


def test_router_topk_survives_large_logits() -> None:
    weights_TK, ids_TK = api.router_topk(torch.tensor([[1e4, -1e4, 1e4 - 1]]), 2, True)
    assert ids_TK.tolist() == [[0, 2]]
    assert weights_TK[0].tolist() == pytest.approx([0.7310586, 0.2689414])


def naive_moe(
    x_TM: Tensor, ids_TK: Tensor, weights_TK: Tensor, w_gate_up: Tensor, w_down: Tensor
) -> Tensor:
    out_TM = torch.zeros(x_TM.shape, dtype=torch.float64)
    for t, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (w_gate_up[expert].double() @ x_TM[t].double()).chunk(2)
            out_TM[t] += weight * (w_down[expert].double() @ (gate * gate.sigmoid() * up))
    return out_TM


@settings(deadline=None, max_examples=60)
@given(
    num_tokens=st.integers(1, 40),
    num_experts=st.integers(1, 12),
    data=st.data(),
)
def test_fused_moe(num_tokens: int, num_experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, num_experts))
    width, inner = 12, 6
    x_TM = randn(num_tokens, width, seed=1)
    w_gate_up, w_down = (
        randn(num_experts, 2 * inner, width, seed=2),
        randn(num_experts, width, inner, seed=3),
    )
    # A draw for each token: experts of which many tokens are fond, and experts without any.
    ids_TK = torch.tensor(
        [
            data.draw(st.permutations(range(num_experts)), label="experts")[:k]
            for _ in range(num_tokens)
        ]
    )
    weights_TK = randn(num_tokens, k, seed=4).abs()
    ours = api.fused_moe(x_TM, ids_TK, weights_TK, w_gate_up, w_down)
    expected = naive_moe(x_TM, ids_TK, weights_TK, w_gate_up, w_down)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 2, 30])
def test_fused_moe_in_bfloat16(num_tokens: int) -> None:
    x_TM = randn(num_tokens, 32, dtype=torch.bfloat16)
    w_gate_up = (randn(4, 32, 32, seed=1) / 6).bfloat16()
    w_down = (randn(4, 32, 16, seed=2) / 4).bfloat16()
    weights_TK, ids_TK = api.router_topk(randn(num_tokens, 4, seed=3), 2, True)
    ours = api.fused_moe(x_TM, ids_TK, weights_TK, w_gate_up, w_down)
    expected = naive_moe(x_TM, ids_TK, weights_TK, w_gate_up, w_down)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), expected, rtol=2**-6, atol=2**-6)


def test_fused_moe_sums_in_float32() -> None:
    """Two experts that all but cancel: bfloat16 weights or sums would lose the rest."""
    x_TM = torch.ones(1, 1, dtype=torch.bfloat16)
    w_gate_up = torch.ones(2, 2, 1, dtype=torch.bfloat16)
    w_down = torch.tensor([[[256.0]], [[-256.0]]], dtype=torch.bfloat16)
    weights_TK = torch.tensor([[0.5 + 2**-12, 0.5 - 2**-12]])
    ours = api.fused_moe(x_TM, torch.tensor([[0, 1]]), weights_TK, w_gate_up, w_down)
    expert = 256 * torch.sigmoid(torch.tensor(1.0)).bfloat16()
    assert ours.item() == (expert * 2**-11).bfloat16().item()
