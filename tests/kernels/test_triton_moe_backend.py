"""A model whose experts torch computes, step by step: the tokens and rows of the CPU's own path.

On a CPU Triton's interpreter runs the kernels around the grouped product.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.config.schema import EngineConfig
from dovetail.dist.comm import LocalComm
from dovetail.errors import ConfigError
from dovetail.exec.cuda.runner import CudaRunner
from dovetail.exec.device import CpuDevice
from dovetail.exec.executor import Executor
from dovetail.kernels.ref.backend import RefKernels
from dovetail.kernels.registry import load_kernels
from dovetail.kernels.triton.backend import MOE_BACKENDS, TritonKernels
from dovetail.kernels.triton.tiles import TileTable
from dovetail.models.registry import build_model
from dovetail.weights.load import load_weights
from tests.support.checkpoints import random_qwen3_moe
from tests.support.harness import Harness, Output

REQUESTS = [
    (range(3, 12), {"max_new_tokens": 2, "temperature": 0.0}),
    ((5, 6, 7), {"max_new_tokens": 2, "sampling_seed": 2**64 - 3}),
]


class Calls(TorchDispatchMode):
    """Counts the calls of torch's grouped product."""

    def __init__(self) -> None:
        super().__init__()
        self.num_grouped = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_grouped += "_grouped_mm" in str(func)
        return func(*args, **(kwargs or {}))


def outputs_of(folder: Path, moe_backend: str | None) -> tuple[dict[Any, Output], int]:
    """Outputs, and the number of grouped products; None is the CPU's own way."""

    def make(config: EngineConfig) -> Executor:
        table, device = TileTable(4), CpuDevice()
        kernels = TritonKernels(table, MOE_BACKENDS[str(moe_backend)](table))
        model = build_model(
            config.model, dtype=torch.float32, device="cpu", comm=LocalComm(), kernels=kernels
        )
        load_weights(model, folder, comm=LocalComm(), on_progress=None)
        return Executor(config, CudaRunner(config, model, device, RefKernels()), device)

    options = {"page_size": 4, "num_pages": 33, "context_len": 64, "chunk_size": 8}
    harness = Harness(
        folder, max_running=3, capture=("experts",), **options,
        make_executor=None if moe_backend is None else make,
    )  # fmt: skip
    for prompt, fields in REQUESTS:
        harness.add(list(prompt), capture=("experts",), ignore_eos=True, **fields)
    with Calls() as calls:
        harness.run()
    return harness.outputs, calls.num_grouped


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_qwen3_moe(tmp_path_factory.mktemp("moe"), num_experts=5)


@pytest.mark.parametrize("name", MOE_BACKENDS)
def test_tokens_and_rows_are_those_of_the_cpu_whoever_computes_the_experts(name, folder) -> None:
    wanted, _ = outputs_of(folder, None)
    ours, num_grouped = outputs_of(folder, name)
    assert (num_grouped > 0) == (name == "torch")
    for key, output in wanted.items():
        assert ours[key].token_ids == output.token_ids
        np.testing.assert_allclose(ours[key].logprobs, output.logprobs, atol=3e-5)
        assert np.array_equal(ours[key].captured["experts"], output.captured["experts"])


def test_the_reference_has_torch_alone() -> None:
    cpu = torch.device("cpu")
    assert isinstance(load_kernels("ref", cpu, moe_backend="torch"), RefKernels)
    with pytest.raises(ConfigError, match="moe_backend: is 'triton'; the reference is plain torch"):
        load_kernels("ref", cpu, moe_backend="triton")
