"""Who computes the experts: the default of a device, and what is refused by name."""

from pathlib import Path

import pytest

from dovetail.config.gpu import Gpu
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError
from tests.support.checkpoints import random_qwen3_moe

H200 = Gpu(name="NVIDIA H200", memory_bytes=2**37, has_grouped_mm=True)
A100 = Gpu(name="NVIDIA A100", memory_bytes=2**36)


def decide(gpu: Gpu | None, **options: object) -> EngineConfig:
    return resolve(options_from(options), gpu)


def test_a_gpu_takes_triton_and_a_cpu_torch() -> None:
    for gpu, name, words in (
        (H200, "triton", "in graphs and in every dtype"),
        (None, "torch", "no other runs"),
    ):
        config = decide(gpu)
        assert config.moe_backend == name
        assert config.reasons["moe_backend"].startswith("default on a")
        assert words in config.reasons["moe_backend"]


@pytest.mark.parametrize("name", ["triton", "torch"])
def test_what_is_given_is_taken(name: str) -> None:
    config = decide(H200, moe_backend=name)
    assert (config.moe_backend, config.reasons["moe_backend"]) == (name, "given")


def test_a_model_without_experts_runs_with_either(llama_folder: Path) -> None:
    options = {"model": str(llama_folder), "dtype": "float32"}
    for gpu, given in ((H200, "torch"), (H200, "triton"), (None, "torch")):
        config = decide(gpu, moe_backend=given, **options)
        assert config.moe_backend == given
        assert config.reasons["moe_backend"] == "given, but the model has no experts"
    assert decide(H200, **options).reasons["moe_backend"] == "the model has no experts"


@pytest.mark.parametrize(
    ("gpu", "options", "words"),
    [
        (None, {"moe_backend": "triton"}, ("needs an NVIDIA GPU", "give torch")),
        (H200, {"moe_backend": "triton", "device": "cpu"}, ("needs an NVIDIA GPU",)),
        (A100, {"moe_backend": "torch"}, ("graphs on the NVIDIA A100", "--no-graphs")),
        (H200, {"moe_backend": "torch", "dtype": "float32"}, ("graphs in float32", "bfloat16")),
    ],
)
def test_what_cannot_run_is_refused_by_name(gpu, options, words) -> None:
    with pytest.raises(ConfigError) as caught:
        decide(gpu, **options)
    assert caught.value.field == "moe_backend"
    assert all(part in caught.value.message for part in words)


def test_without_graphs_torch_may_wait() -> None:
    for gpu, dtype in ((A100, "bfloat16"), (H200, "float32")):
        config = decide(gpu, moe_backend="torch", dtype=dtype, graphs=False)
        assert config.moe_backend == "torch"


def test_rows_that_torch_does_not_take_are_refused_with_the_numbers(tmp_path: Path) -> None:
    folder = random_qwen3_moe(tmp_path, hidden_size=48, expert_size=12)
    with pytest.raises(ConfigError, match=r"16 bytes.*experts of 48 to 12 numbers in bfloat16"):
        decide(H200, model=str(folder), moe_backend="torch")
    assert decide(H200, model=str(folder)).moe_backend == "triton"
    assert decide(None, model=str(folder), moe_backend="torch").moe_backend == "torch"
