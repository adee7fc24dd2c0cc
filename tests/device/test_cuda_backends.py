"""Experts by torch's grouped product, memory that cannot be mapped, and what a start tells."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu_steps import prompt_counts, steady_counts
from benchmarks.stepped import SteppedEngine
from dovetail.cli import main
from dovetail.core.engine import Engine
from dovetail.errors import DeviceError
from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.cuda.driver import CudaDriver
from dovetail.exec.cuda.graphs import decode_tiers, token_tiers
from dovetail.exec.memory import PlainMemory
from dovetail.kernels.triton.experts import TritonExperts
from dovetail.kernels.triton.grouped_mm import TorchExperts
from dovetail.wire.request import SamplingParams
from tests.support.compare import assert_same_generations
from tests.support.gpu_engine import gpu_harness
from tests.support.oracle import Oracle
from tests.support.traffic import Asked, logprob_errors, mixed_traffic

pytestmark = pytest.mark.cuda

PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 33, 120)]
SAMPLING = [
    SamplingParams(
        max_new_tokens=12 + 5 * i, temperature=(0.0, 0.8)[i % 2], sampling_seed=i, ignore_eos=True
    )
    for i in range(len(PROMPTS))
]  # fmt: skip
OPTIONS = {"context_len": 512, "max_running": 3, "chunk_size": 48, "capture": ("experts",)}


def outputs(**options: object) -> list:
    with Engine(**OPTIONS | {"kv_memory": "64MiB", "dtype": "float32"} | options) as engine:
        return engine.generate(PROMPTS, SAMPLING, capture=("experts",))


# -- experts by torch -------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_in_float32_torch_gives_the_tokens_and_rows_of_the_cpu(depth: int) -> None:
    options = {"moe_backend": "torch", "graphs": False, "depth": depth}
    assert_same_generations(outputs(device="cuda", **options), outputs(device="cpu"))


def errors_of(moe_backend: str, folder: Path, oracle: Oracle) -> np.ndarray:
    harness = gpu_harness(
        folder, dtype="bfloat16", moe_backend=moe_backend, context_len=128, num_pages=96,
        max_running=33, chunk_size=96,
    )  # fmt: skip
    experts = harness.executor._runner._model.model.layers[-1].mlp.experts
    kind = {"torch": TorchExperts, "triton": TritonExperts}[moe_backend]
    assert isinstance(experts._kernels._fused_moe, kind)
    asked: list[Asked] = mixed_traffic(harness, 120, seed=5)
    harness.close()
    oracle.prepare([one.ids for one in asked], device="cuda")
    return logprob_errors(asked, oracle)


def test_in_bfloat16_and_graphs_torch_is_as_near_to_float32_as_triton(tiny_moe_folder) -> None:
    oracle = Oracle(tiny_moe_folder, experts="eager")
    ours, tritons = (errors_of(name, tiny_moe_folder, oracle) for name in ("torch", "triton"))
    for quantile in (0.5, 0.9):
        found = [float(np.quantile(errors, quantile)) for errors in (ours, tritons)]
        print(quantile, found)
        assert 0 < found[0] <= 1.3 * found[1]


def test_graphs_hold_torchs_product_and_wait_for_nothing() -> None:
    engine = SteppedEngine(
        device="cuda", moe_backend="torch", max_running=9, context_len=512, chunk_size=128,
        num_pages=512,
    )  # fmt: skip
    engine.fill(8, 64, max_new_tokens=300)
    found = steady_counts(engine, 50)
    assert found["graph launches"] == 50 and 49 <= found["DtoH"] <= 51
    assert found["kernel launches"] == 0
    assert found["allocations"] == found["allocating calls"] == found["pageable"] == 0
    assert found["waiting calls"] <= 2 and 0 <= found["waits"] <= 2  # stopping the profile waits
    found = prompt_counts(engine, 8)
    engine.executor.close()
    assert found["waiting calls"] <= 2 and 0 <= found["waits"] <= 2


# -- memory that cannot be mapped --------------------------------------------------------------


def test_an_engine_whose_memory_cannot_be_mapped_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pool measured, graphs recorded; what is refused is named where people look."""

    def run(device: CudaDevice) -> tuple[list, int, int]:
        """Return outputs, and the bytes of weights and of KV while the engine has them."""
        options = OPTIONS | {"device": "cuda", "kv_memory": None, "dtype": "float32"}
        with Engine(**options, on_device=device) as engine:
            found = engine.generate(PROMPTS, SAMPLING, capture=("experts",))
            return found, device.memory.num_bytes("weights"), device.memory.num_bytes("kv")

    device = CudaDevice()
    assert device.memory.can_unmap
    wanted, mapped_bytes, _ = run(device)

    def refuse(self: CudaDriver, address: int, num_bytes: int) -> None:
        raise DeviceError("the CUDA driver cannot map memory: NOT_PERMITTED")

    monkeypatch.setattr(CudaDriver, "map", refuse)
    device = CudaDevice()
    assert isinstance(device.memory, PlainMemory)
    assert device.memory.reason.endswith("NOT_PERMITTED")
    found, weight_bytes, kv_bytes = run(device)
    assert_same_generations(found, wanted)
    assert 0 < weight_bytes <= mapped_bytes and kv_bytes > 0
    for tag in ("weights", "kv"):
        assert not device.memory.can_unmap and device.memory.unmap(tag) == 0


# -- what a start tells ------------------------------------------------------------------------


def test_recording_tells_how_far_it_is() -> None:
    """One call a graph, from the first to the last, while memory is measured and for good."""
    told = defaultdict(list)

    def on_progress(what: str, num_done: int, num_total: int) -> None:
        told[what].append((num_done, num_total))

    with Engine(device="cuda", on_progress=on_progress, **OPTIONS) as engine:
        assert engine.config.memory_fraction is not None
    least = len(decode_tiers(3)) + len(token_tiers(3, 51))
    for what in ("measuring memory", "recording graphs"):
        left = told[what]
        assert left[0][1] >= least
        while left:  # kinds of graphs come one after the other, each with a count of its own
            num_total = left[0][1]
            assert num_total > 0
            counted = [(num_done, num_total) for num_done in range(1, num_total + 1)]
            assert left[:num_total] == counted
            left = left[num_total:]
    torch.cuda.synchronize()


def test_a_trace_times_the_graph_of_each_step(tmp_path: Path, capsys) -> None:
    words = ("trace", "--device", "cuda", "--steps", "6", "--batch", "3", "--input-len", "20")
    said = []
    for more in ((), ("--no-graphs",)):
        assert main([*words, *more, "--context-len", "512", "--out", str(tmp_path / "t.json")]) == 0
        said.append(capsys.readouterr().out)
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        replays = [event for event in events if event["name"] == "replay"]
        works = {e["args"]["step"]: e for e in events if e["name"] == "run"}
        assert len(works) == 6 and len(replays) == (0 if more else 6)
        for replay in replays:
            run = works[replay["args"]["step"]]
            assert run["ts"] - 1 <= replay["ts"]
            assert 0 < replay["dur"] <= run["dur"] + 1
    assert "GPU idle" in said[0] and "GPU idle" not in said[1]
