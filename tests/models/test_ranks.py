"""Models that are cut over several ranks compute what a whole one does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.config.model import ModelConfig
from dovetail.errors import ConfigError
from dovetail.models.registry import build_model
from tests.support.thread_comm import ThreadComm, run_ranks
from tests.support.tiny_models import (
    PROMPT,
    load,
    max_diff,
    our_logits,
    random_llama,
    random_qwen2,
    random_qwen3,
    random_qwen3_moe,
)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (random_llama, {"attention_bias": True, "mlp_bias": True}),
        (random_qwen2, {}),
        (random_qwen3, {"tie_word_embeddings": True}),
        (random_qwen3_moe, {"mlp_only_layers": [1]}),
    ],
)
def test_two_ranks_are_equal_to_one(make: Any, options: dict[str, Any], tmp_path: Path) -> None:
    make(**options).save_pretrained(tmp_path)
    whole = load(tmp_path)
    halves = run_ranks(2, lambda comm: _load_and_run(tmp_path, comm))
    expected = our_logits(whole, PROMPT)
    for num_parameters, logits in halves:
        assert max_diff(logits, expected) < 1e-5
        assert num_parameters < 0.6 * _count(whole)


def test_experts_stored_together_are_cut_alike(tmp_path: Path) -> None:
    theirs = random_qwen3_moe()
    theirs.save_pretrained(tmp_path / "apart")
    theirs.save_pretrained(tmp_path / "together", save_original_format=False)

    def parameters_of(comm: ThreadComm) -> list[dict[str, torch.Tensor]]:
        return [load(tmp_path / name, comm=comm).state_dict() for name in ("apart", "together")]

    for apart, together in run_ranks(2, parameters_of):
        assert apart.keys() == together.keys()
        assert all(torch.equal(apart[name], together[name]) for name in apart)


@pytest.mark.parametrize(
    ("options", "size", "field"),
    [
        ({}, 4, "num_heads"),
        ({"vocab_size": 162}, 3, "num_kv_heads"),
        ({"vocab_size": 161}, 2, "161"),
        ({"intermediate_size": 81}, 2, "81"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    options: dict[str, Any], size: int, field: str, tmp_path: Path
) -> None:
    config = _config_of(random_llama(**options), tmp_path)

    def build(comm: ThreadComm) -> None:
        build_model(config, dtype=torch.float32, device="cpu", comm=comm)

    with pytest.raises(ConfigError, match=f"{field}.* cannot be divided over {size} ranks"):
        run_ranks(size, build)


def _config_of(model: Any, folder: Path) -> ModelConfig:
    model.save_pretrained(folder)
    return ModelConfig.from_folder(folder)


def _load_and_run(folder: Path, comm: ThreadComm) -> tuple[int, torch.Tensor]:
    model = load(folder, comm=comm)
    return _count(model), our_logits(model, PROMPT)


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
