"""The engine on a GPU gives the CPU engine's tokens and rows, with graphs and without."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dovetail.config.hub import EMBEDDED_MODEL
from dovetail.core.engine import Engine
from dovetail.exec.cuda.runner import CudaRunner
from dovetail.exec.executor import Executor
from dovetail.wire.request import LogprobParams, SamplingParams
from tests.support.checkpoints import random_qwen3_moe
from tests.support.compare import assert_same_generations
from tests.support.gpu_engine import let_pytorch_watch

pytestmark = pytest.mark.cuda

PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 16, 33, 120)] + [[9] * 40, [5, 6, 7]]
OPTIONS = {"dtype": "float32", "max_running": 6, "chunk_size": 48, "context_len": 512}
COLUMNS = ("experts", "expert_weights")
SAMPLING = [
    SamplingParams(
        max_new_tokens=20 + i, temperature=(0.0, 0.8)[i % 2], sampling_seed=2**63 + i,
        ignore_eos=True,
    )
    for i in range(len(PROMPTS))
]  # fmt: skip
SHAPED = SamplingParams(
    max_new_tokens=16, temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, sampling_seed=5,
    repetition_penalty=1.1, presence_penalty=0.1, logit_bias={7: -5.0}, ignore_eos=True,
)  # fmt: skip


def outputs(sampling=SAMPLING, logprobs=None, **options):
    with Engine(**OPTIONS | options, capture=COLUMNS) as engine:
        first = engine.generate(PROMPTS, sampling, capture=COLUMNS, logprobs=logprobs)
        return first + engine.generate(PROMPTS, sampling, capture=COLUMNS, logprobs=logprobs)


@pytest.fixture(scope="module")
def wanted():
    return outputs(device="cpu", depth=1)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_logprobs_and_experts_are_those_of_the_cpu(depth, graphs, wanted) -> None:
    assert_same_generations(outputs(device="cuda", depth=depth, graphs=graphs), wanted)


@pytest.mark.parametrize("page_size", [1, 64])
def test_small_and_large_pages_change_nothing(page_size, wanted) -> None:
    assert_same_generations(outputs(device="cuda", page_size=page_size), wanted)


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_of_more_than_255_experts_are_words(graphs, tmp_path_factory) -> None:
    folder = random_qwen3_moe(
        tmp_path_factory.mktemp("experts"), num_experts=300, experts_per_token=4
    )

    def answers(device: str) -> list:
        options = OPTIONS | {"context_len": 160, "device": device, "graphs": graphs}
        with Engine(folder, **options, capture=COLUMNS) as engine:
            return engine.generate(PROMPTS, SAMPLING, capture=COLUMNS)

    ours, theirs = answers("cuda"), answers("cpu")
    assert all(out.routes.ids.dtype == np.uint16 for out in ours)
    assert max(int(out.routes.ids.max()) for out in ours) > 255
    assert_same_generations(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.routes.spans == b.routes.spans


@pytest.mark.parametrize("graphs", [False, True])
def test_new_weights_are_those_of_a_cpu_engine_that_got_them(graphs) -> None:
    """Graphs read the parameters at the addresses that they were recorded with."""
    tensors = load_file(EMBEDDED_MODEL / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: tensor.float() * (1 + 0.05 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in tensors.items()
    }

    def after_refit(device: str) -> list:
        with Engine(**OPTIONS, capture=COLUMNS, device=device, graphs=graphs) as engine:
            engine.generate(PROMPTS, SAMPLING, capture=COLUMNS)
            assert engine.refit({name: tensor.to(device) for name, tensor in noisy.items()}) == 1
            return engine.generate(PROMPTS, SAMPLING, capture=COLUMNS)

    ours = after_refit("cuda")
    assert {version for g in ours for version in g.weight_versions} == {1}
    assert_same_generations(ours, after_refit("cpu"))


def test_a_draw_that_is_shaped_is_that_of_the_cpu() -> None:
    logprobs = LogprobParams(logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=(5,))
    ours, theirs = (outputs(SHAPED, logprobs, device=name) for name in ("cuda", "cpu"))
    assert_same_generations(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.prompt_logprobs[1:], b.prompt_logprobs[1:], atol=2e-4)


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each watched step: those of a GPU, once all is compiled and recorded."""

    def is_ready(executor: Executor) -> bool:
        return isinstance(executor._runner, CudaRunner) and bool(executor._runner._graphs._graphs)

    return let_pytorch_watch(monkeypatch, when=is_ready)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_submitting_waits_for_nothing(wanted, submissions: list[int]) -> None:
    assert_same_generations(outputs(device="cuda"), wanted)
    assert len(submissions) > 40


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", ["scaled", "raw", "truncated"])
def test_submitting_shaped_draws_waits_for_nothing(kind, submissions: list[int]) -> None:
    """Truncation, penalties, biases, top lists, asked ids, masks."""
    logprobs = LogprobParams(
        kind=kind, top_logprobs_num=3, token_ids_logprob=(5,), sampling_mask=True,
        logprob_start_len=-1 if kind == "truncated" else 0,
    )  # fmt: skip
    sampling = [SHAPED, SAMPLING[0], SAMPLING[1], SHAPED, SHAPED, SAMPLING[1], SHAPED]
    assert len(sampling) == len(PROMPTS)
    ours, theirs = (outputs(sampling, logprobs, device=name) for name in ("cuda", "cpu"))
    assert_same_generations(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.sampling_mask == b.sampling_mask
    assert len(submissions) > 40


def test_bfloat16_runs(wanted) -> None:
    ours = outputs(device="cuda", dtype="bfloat16")
    assert all(np.isfinite(output.logprobs).all() for output in ours)
    num_same = sum(a.token_ids[0] == b.token_ids[0] for a, b in zip(ours, wanted, strict=True))
    assert num_same >= len(ours) - 4
