"""``dovetail config explain`` shows what an engine would run with, and counts right."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dovetail.cli import main
from dovetail.cli.explain import decisions
from dovetail.cli.facts import device_means, model_facts
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig
from dovetail.exec.device import CpuDevice
from dovetail.exec.kv import KVStore
from dovetail.kernels.choices import kernel_choices

Capture = pytest.CaptureFixture[str]


def explain(capsys: Capture, *words: str) -> str:
    assert main(["config", "explain", *words]) == 0
    return capsys.readouterr().out


def test_json_has_every_value_with_its_reason(capsys: Capture) -> None:
    said = json.loads(explain(capsys, "--json", "--context-len", "64", "--policy", "priority"))
    config = resolve(options_from({"context_len": 64, "policy": "priority"}))
    assert said["config"] == json.loads(json.dumps(decisions(config)))
    assert set(said["config"]) == set(EngineConfig.__struct_fields__) - {"model", "reasons"}
    assert said["config"]["context_len"] == {"value": 64, "reason": "given"}
    assert said["config"]["policy"] == {"value": "priority", "reason": "given"}
    assert said["model"] == model_facts(config)
    assert {row["what"]: row["by"] for row in said["device"]} == {
        "layers, one token in float32": "numpy",
        "all else": "torch",
        "memory of weights and KV": "torch",
        "memory of a step": "torch",
    }


def test_the_table_has_them_too(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = explain(capsys, "--dtype", "bfloat16")
    for words in ("dtype", "bfloat16", "given", "default: overlap", "kv_pool_tokens", "4,976,448"):
        assert words in said


def test_a_pool_that_is_not_measured_yet_says_so(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    words = "at least; decided when the engine starts"
    said = explain(capsys, "--device", "cuda")
    assert said.count(words) == 3 and "memory_fraction 0.9 decides when" in said
    assert words not in explain(capsys, "--device", "cuda", "--kv-memory", "1GiB")


@pytest.mark.parametrize("name", ["tiny_moe", "llama", "qwen3"])
def test_parameters_are_those_of_the_files(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(f"{name}_folder")
    config = resolve(options_from({"model": str(folder), "kv_memory": "4MiB", "context_len": 64}))
    facts = model_facts(config)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        sizes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    total = active = 0
    for key, shape in sizes.items():
        size = 1
        for length in shape:
            size *= length
        total += size
        if ".experts." in key and config.model.moe is not None:
            moe = config.model.moe
            size = size * moe.num_experts_per_tok // moe.num_experts
        active += size
    assert facts["num_params"] == total
    assert facts["num_params_per_token"] == active
    assert facts["weight_bytes"] == 4 * total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pool_has_the_bytes_that_are_allocated(dtype: str, tiny_moe_folder: Path) -> None:
    options = {"num_pages": 9, "context_len": 100, "dtype": dtype, "capture": ("experts",)}
    config = resolve(options_from(options))
    facts = model_facts(config)
    store = KVStore(config, CpuDevice())
    rows = (sidecar.rows[: sidecar.sink] for sidecar in store.sidecars.values())
    pools = (pool[:, :-1] for pool in (store.k_LCKD, store.v_LCKD))
    tensors = (*pools, *rows)
    assert facts["kv_pool_bytes"] == sum(tensor.nbytes for tensor in tensors)
    assert facts["kv_pool_tokens"] == 9 * 16
    assert facts["kv_token_bytes"] * facts["kv_pool_tokens"] == facts["kv_pool_bytes"]
    assert facts["kv_pool_contexts"] == 1.44


def test_a_wrong_option_is_an_error(capsys: Capture) -> None:
    assert main(["config", "explain", "--context-len", "1"]) == 2
    assert "context_len: is 1; the legal range" in capsys.readouterr().err


def test_on_a_gpu_each_operation_is_named_with_its_reason() -> None:
    config = resolve(options_from({"device": "cuda"}))
    means = {row["what"]: row for row in device_means(config)}
    assert means["fused_moe"]["by"] == "triton" and means["fused_moe"]["reason"]
    assert len(means) == len(kernel_choices("cuda", "triton")) + 2


def test_without_a_gpu_it_is_not_known_what_memory_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    means = {row["what"]: row for row in device_means(resolve(options_from({"device": "cuda"})))}
    for what in ("memory of weights and KV", "memory of a step"):
        assert means[what]["by"] == "not known" and "no GPU answers" in means[what]["reason"]


def test_optional_backends_are_named_with_what_was_chosen_and_why(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    flags = ("--device", "cuda", "--moe-backend", "torch")
    said = json.loads(explain(capsys, "--json", *flags))
    assert said["config"]["moe_backend"] == {"value": "torch", "reason": "given"}
    chosen = {row["name"]: row["is_chosen"] for row in said["optional_backends"]}
    assert chosen == {"FlashAttention": False, "FlashInfer": False, "torch grouped_mm": True}
    assert all(row["reason"] for row in said["optional_backends"])
    means = {row["what"]: row["by"] for row in said["device"]}
    assert means["fused_moe"] == "torch" and means["route"] == "triton"
    table = explain(capsys, *flags)
    for words in ("optional backends", "FlashInfer", "there is no adapter", "as moe_backend says"):
        assert words in table
