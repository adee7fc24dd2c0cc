"""What tests of GPU kernels share: the device, random tensors on it, and a measure of error.

With the interpreter of Triton on the CPU small shapes run in float32 and float16 (it gets bfloat16
products wrong); tests marked ``cuda`` run real shapes in bfloat16.
"""

import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU_TOO = [pytest.mark.cuda] if DEVICE.type == "cuda" else []
"""Marks of tests that are the same in the interpreter and on a GPU, and worth their compiling."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def big_randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Made on the device, in its dtype: for tensors that a CPU would take long to fill."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_near(ours: Tensor, exact: Tensor, *, rounding: float) -> None:
    """Equal up to ``rounding``, of each element and of the largest; on average far less.

    ``rounding`` of a result that is rounded once to a dtype is half its epsilon.
    """
    assert ours.shape == exact.shape
    assert torch.isfinite(ours).all()
    ours, exact = ours.double(), exact.double()
    scale = exact.abs().max().item()
    torch.testing.assert_close(ours, exact, rtol=rounding + 4e-6, atol=rounding * scale + 1e-6)
    error = (ours - exact).norm() / exact.norm().clamp(min=1e-30)
    assert error.item() <= rounding + 4e-6
