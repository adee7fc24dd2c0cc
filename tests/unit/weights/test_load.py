"""Loading weights: what is refused, with which words, and that nothing is copied before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.config.model import ModelConfig
from dovetail.dist.comm import LocalComm
from dovetail.errors import ConfigError
from dovetail.models.decoder import DecoderLM
from dovetail.models.registry import build_model
from dovetail.weights.load import load_weights
from tests.support.checkpoints import decoder_config, random_tensors, write_checkpoint

Tensors = dict[str, Tensor]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [],
}
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


def make_checkpoint(folder: Path, family: str = "llama", tied: bool = False) -> Path:
    config = decoder_config(family, tied=tied, **EXPERTS if family == "qwen3_moe" else {})
    return write_checkpoint(folder, config, random_tensors(config))


def make_model(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderLM:
    config = ModelConfig.from_folder(folder)
    model = build_model(config, dtype=dtype, device="cpu", comm=LocalComm())
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    return model


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def split(folder: Path) -> dict[str, str]:
    """Replace the single file by three shards; return the index's weight map."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    weight_map = {
        name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(tensors)
    }
    for shard in set(weight_map.values()):
        inside = {name: tensors[name] for name in tensors if weight_map[name] == shard}
        save_file(inside, folder / shard)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(folder: Path) -> str:
    """Return the error's text; the parameters must be untouched."""
    model = make_model(folder)
    with pytest.raises(ConfigError) as caught:
        load_weights(model, folder, comm=LocalComm())
    assert all(parameter.isnan().all() for parameter in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_filled_in_place(family: str, tied: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, tied)
    model = make_model(tmp_path, torch.bfloat16)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    progress: list[tuple[int, int]] = []
    load_weights(model, tmp_path, comm=LocalComm(), on_progress=lambda *done: progress.append(done))
    for name, parameter in model.named_parameters():
        assert not parameter.isnan().any(), name
        assert parameter.data_ptr() == addresses[name] and parameter.dtype == torch.bfloat16
    stored = load_file(tmp_path / SINGLE)
    assert progress == [(i + 1, len(stored)) for i in range(len(stored))]
    # Every element of the file is in the model once.
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    assert num_elements == sum(tensor.numel() for tensor in stored.values())


def test_fused_parameters_hold_their_parts_in_order(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    model, stored = make_model(tmp_path), load_file(tmp_path / SINGLE)
    load_weights(model, tmp_path, comm=LocalComm())
    ours = dict(model.named_parameters())
    qkv = [stored[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(ours["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(qkv))
    expert = "model.layers.1.mlp.experts.2"
    gate_up = [stored[f"{expert}.{x}_proj.weight"] for x in ("gate", "up")]
    assert torch.equal(ours["model.layers.1.mlp.experts.w_gate_up"][2], torch.cat(gate_up))
    down = stored[f"{expert}.down_proj.weight"]
    assert torch.equal(ours["model.layers.1.mlp.experts.w_down"][2], down)


def test_a_tied_head_may_be_stored_again(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tied=True)

    def store_again(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(tmp_path, store_again)
    model = make_model(tmp_path)
    load_weights(model, tmp_path, comm=LocalComm())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_head_may_not_differ(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tied=True)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    assert refused(tmp_path).startswith("lm_head.weight: differs from model.embed_tokens.weight")


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert refused(tmp_path).startswith("lm_head.weight: is missing in ")


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(8)}))
    load_weights(make_model(tmp_path), tmp_path, comm=LocalComm())


@pytest.mark.parametrize(("family", "name"), [("llama", Q_PROJ), ("qwen3_moe", EXPERT)])
def test_a_missing_tensor_is_named(family: str, name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    edit(tmp_path, lambda tensors: tensors.pop(name))
    assert refused(tmp_path).startswith(f"{name}: is missing in {tmp_path}; the model needs it")


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    names = ("model.layers.9.mlp.up_proj.weight", "x")
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(2, 3) for name in names}))
    message = refused(tmp_path)
    assert message.startswith(f"{names[0]}: with shape [2, 3] in ")
    assert message.endswith("has no place in the model (and 1 more)")


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [("llama", Q_PROJ, [64, 64]), ("qwen3_moe", EXPERT, [16, 64]), ("llama", "lm_head.weight", [])],
)
def test_a_wrong_shape_is_named(family: str, name: str, shape: list[int], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(7, 5)}))
    shape = shape or [320, 64]
    assert refused(tmp_path) == (
        f"{name}: has shape [7, 5] in {tmp_path / SINGLE}; the model needs {shape}"
    )


def test_experts_stored_together_must_not_be_transposed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    prefix = "model.layers.0.mlp.experts"

    def store_together(tensors: Tensors) -> None:
        for projection in ("gate", "up", "down"):
            for expert in range(4):
                tensors.pop(f"{prefix}.{expert}.{projection}_proj.weight")
        tensors[f"{prefix}.gate_up_proj"] = torch.ones(4, 64, 32)
        tensors[f"{prefix}.down_proj"] = torch.ones(4, 64, 16)

    edit(tmp_path, store_together)
    assert refused(tmp_path).startswith(f"{prefix}.gate_up_proj: has shape [4, 64, 32]")


def test_a_quantised_tensor_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)}))
    assert refused(tmp_path).startswith(f"{Q_PROJ}: is stored as I8")


def test_no_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / SINGLE).unlink()
    assert f"{tmp_path} has no weights: neither {SINGLE} nor {INDEX}" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 500, -1, -1000])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / SINGLE
    file.write_bytes(file.read_bytes()[:keep])
    assert f"{file} is truncated or damaged (" in refused(tmp_path)


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / SINGLE
    data = bytearray(file.read_bytes())
    data[20:30] = b"\x00" * 10
    file.write_bytes(data)
    assert f"{file} is truncated or damaged (" in refused(tmp_path)


def test_shards_load(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    whole, shards = make_model(tmp_path), make_model(tmp_path)
    load_weights(whole, tmp_path, comm=LocalComm())
    split(tmp_path)
    load_weights(shards, tmp_path, comm=LocalComm())
    for ours, theirs in zip(shards.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    shard = tmp_path / split(tmp_path)[Q_PROJ]
    shard.unlink()
    assert f"{shard} is missing, though {INDEX} names it" in refused(tmp_path)


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    shard = tmp_path / split(tmp_path)[Q_PROJ]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard} is truncated or damaged (" in refused(tmp_path)


def test_an_index_that_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    weight_map = split(tmp_path)
    other = next(shard for shard in weight_map.values() if shard != weight_map[Q_PROJ])
    write_index(tmp_path, weight_map | {Q_PROJ: other})
    assert refused(tmp_path).startswith(f"{Q_PROJ}: is not in {tmp_path / other}, where {INDEX}")
    write_index(tmp_path, weight_map | {"ghost": other})
    assert refused(tmp_path).startswith(f"ghost: is not in {tmp_path / other}")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    weight_map = split(tmp_path)
    other = tmp_path / next(shard for shard in weight_map.values() if shard != weight_map[Q_PROJ])
    save_file(load_file(other) | {Q_PROJ: torch.ones(64, 64)}, other)
    assert refused(tmp_path).startswith(f"{Q_PROJ}: is both in ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        (
            '{"weight_map": {"a": "../a.safetensors"}}',
            "gives a no file name but '../a.safetensors'",
        ),
        ('{"weight_map": {"a": 1}}', "gives a no file name but 1"),
    ],
)
def test_a_damaged_index_is_named(text: str, message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    split(tmp_path)
    (tmp_path / INDEX).write_text(text)
    refusal = refused(tmp_path)
    assert str(tmp_path / INDEX) in refusal and message in refusal
