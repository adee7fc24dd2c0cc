"""The numpy forms for a single token against the reference, and where each of the two is taken.

Shape legend: as in ``kernels.cpu.one_token``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.attention.backend import QkNorm, Rotation
from dovetail.attention.one_token import OneTokenAttention
from dovetail.attention.paged import AttentionRows, DecodeGroup, PagedAttention
from dovetail.kernels import api
from dovetail.kernels.cpu import layers, one_token
from dovetail.kernels.scratch import Scratch

assert_close = partial(torch.testing.assert_close, rtol=2e-6, atol=2e-6)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_unchanged_and_close(
    ours: Callable[..., Any], reference: Callable[..., Any], *inputs: Tensor
) -> None:
    """Both give the same, up to rounding, and leave their inputs alone."""
    before = [x.clone() for x in inputs]
    got, expected = ours(*inputs), reference(*inputs)
    for x, kept in zip(inputs, before, strict=True):
        assert torch.equal(x, kept)
    assert_close(got, expected)


@pytest.mark.parametrize("bias", [None, randn(24, seed=3)])
def test_linear(bias: Tensor | None) -> None:
    weight = randn(24, 16, seed=1) / 4
    assert_unchanged_and_close(
        lambda x: one_token.linear(x, weight, bias),
        lambda x: api.linear(x, weight, bias),
        randn(1, 16),
    )


@pytest.mark.parametrize("name", ["rms_norm", "silu_mul"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_of_one_input(name: str, scale: float) -> None:
    extra = (randn(48, seed=2), 1e-3) if name == "rms_norm" else ()
    with np.errstate(all="ignore"):
        assert_unchanged_and_close(
            lambda x: getattr(one_token, name)(x, *extra) / scale,
            lambda x: getattr(api, name)(x, *extra) / scale,
            randn(1, 48) * scale,
        )


def test_add_rms_norm() -> None:
    weight = randn(48, seed=2)
    assert_unchanged_and_close(
        lambda x, residual: one_token.add_rms_norm(x, residual, weight, 1e-6),
        lambda x, residual: api.add_rms_norm(x, residual, weight, 1e-6),
        randn(1, 48),
        randn(1, 48, seed=1),
    )


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_router(norm_topk_prob: bool, seed: int) -> None:
    assert_unchanged_and_close(
        lambda logits: one_token.router_topk(logits, 3, norm_topk_prob),
        lambda logits: api.router_topk(logits, 3, norm_topk_prob),
        randn(1, 16, seed=seed),
    )


def test_of_equal_experts_the_lower_id_goes_first() -> None:
    _, ids = one_token.router_topk(torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0, 1.0]]), 4, True)
    assert ids.tolist() == [[1, 3, 0, 2]]


def test_logits_that_are_no_numbers_give_legal_experts() -> None:
    logits = torch.tensor([[1.0, float("nan"), 2.0, 0.0]])
    with np.errstate(all="ignore"):
        weights, ids = one_token.router_topk(logits, 2, True)
    assert len(set(ids[0].tolist())) == 2 and ids.min() >= 0 and ids.max() < 4
    assert weights.isnan().all()


def test_fused_moe() -> None:
    up, down = randn(6, 2 * 8, 16, seed=1) / 4, randn(6, 16, 8, seed=2) / 4
    ids, weights = torch.tensor([[4, 1, 5]]), torch.tensor([[0.5, 0.3, 0.2]])
    assert_unchanged_and_close(
        lambda x: one_token.fused_moe(x, ids, weights, up, down),
        lambda x: api.fused_moe(x, ids, weights, up, down),
        randn(1, 16),
    )


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_cached", [1, 2, 17, 40])
def test_attention(num_cached: int, has_norm: bool) -> None:
    num_heads, num_kv_heads, dim, num_slots = 6, 2, 8, 64
    slots_S = torch.randperm(num_slots, generator=torch.Generator().manual_seed(5))[:num_cached]
    norm = QkNorm(randn(dim, seed=8), randn(dim, seed=9), 1e-6) if has_norm else None
    angles = randn(dim // 2, seed=4)
    cos_D, sin_D = angles.cos().repeat(2), torch.cat((-angles.sin(), angles.sin()))
    cos_sin_T2D = torch.stack((cos_D, sin_D))[None]
    rotation = Rotation(cos_sin_T2D[:, :1], cos_sin_T2D[:, 1:], cos_sin_T2D)
    qkv_TF = randn(1, (num_heads + 2 * num_kv_heads) * dim, seed=6)
    k, v = (randn(2, num_slots, num_kv_heads, dim, seed=seed) for seed in (1, 2))
    their_k, their_v = k.clone(), v.clone()
    rows = AttentionRows(
        kv_slots_T=slots_S[-1:],
        decode_groups=(DecodeGroup(torch.tensor([0]), slots_S[None], torch.tensor([num_cached])),),
        prefill_rows=(),
    )
    assert rows.is_one_token
    got = OneTokenAttention(k, v, slots_S).attend(1, qkv_TF, norm, rotation)
    paged = PagedAttention(their_k, their_v, rows, dtype=torch.float32, scratch=Scratch())
    assert_close(got, paged.attend(1, qkv_TF, norm, rotation))
    assert_close((k, v), (their_k, their_v))


def test_numpy_is_for_one_token_in_float32() -> None:
    assert layers.is_one_token(randn(1, 4))
    assert not layers.is_one_token(randn(2, 4))
    assert not layers.is_one_token(randn(1, 4).bfloat16())


@pytest.mark.parametrize("x", [randn(1, 16), randn(3, 16), randn(1, 16).bfloat16()])
def test_layers_take_any_number_of_tokens(x: Tensor) -> None:
    dtype = x.dtype
    weight, up, down = (
        randn(*shape, seed=1).to(dtype) for shape in ((8, 16), (8, 2 * 4, 16), (8, 16, 4))
    )
    logits = layers.linear(x, weight)
    weights, ids = layers.route(logits, 2, True)
    assert_close((weights, ids), api.route(logits, 2, True))
    assert_close(logits, api.linear(x, weight))
    ours = layers.fused_moe(x, ids, weights, up, down)
    torch.testing.assert_close(ours, api.fused_moe(x, ids, weights, up, down), rtol=1e-5, atol=1e-5)
    assert ours.dtype == dtype
