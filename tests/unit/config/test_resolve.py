"""What ``config.resolve`` decides about a model's context, and that each decision has a reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError


def decide(folder: Path, fields: dict[str, Any], **options: Any) -> EngineConfig:
    raw = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": 256,
    }
    (folder / "config.json").write_text(json.dumps(raw | fields))
    return resolve(options_from({"model": str(folder), **options}))


def test_a_context_ends_with_the_window(tmp_path: Path) -> None:
    config = decide(tmp_path, {"sliding_window": 64})
    assert config.context_len == 64
    assert "sliding_window" in config.reasons["context_len"]
    assert "not there yet" in config.reasons["context_len"]


@pytest.mark.parametrize("context_len", [63, 64])
def test_a_context_within_the_window_may_be_asked_for(context_len: int, tmp_path: Path) -> None:
    config = decide(tmp_path, {"sliding_window": 64}, context_len=context_len)
    assert config.context_len == context_len
    assert config.reasons["context_len"].startswith("given")


def test_a_context_beyond_the_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^context_len: is 65.*window of 64.*at most 64"):
        decide(tmp_path, {"sliding_window": 64}, context_len=65)


@pytest.mark.parametrize("window", [None, 256, 300])
def test_a_window_that_holds_all_positions_changes_nothing(
    window: int | None, tmp_path: Path
) -> None:
    config = decide(tmp_path, {"sliding_window": window})
    assert config.context_len == 256
    assert config.reasons["context_len"] == "the model's max_position_embeddings"
    with pytest.raises(ConfigError, match=r"^context_len: is 257, .* 256 positions"):
        decide(tmp_path, {"sliding_window": window}, context_len=257)


@pytest.mark.parametrize("options", [{}, {"context_len": 32, "num_pages": 9, "chunk_size": -1}])
def test_every_decided_value_has_a_reason(options: dict[str, Any], tmp_path: Path) -> None:
    config = decide(tmp_path, {}, **options)
    decided = set(config.__struct_fields__) - {"model", "reasons"}
    assert set(config.reasons) == decided
    assert all(config.reasons.values())
    for name in options:
        assert config.reasons[name].startswith("given")
