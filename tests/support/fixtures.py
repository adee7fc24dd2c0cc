"""Session fixtures: folders of tiny checkpoints, and one oracle for each.

``X_folder`` is a checkpoint folder, ``X_oracle`` its oracle, made when first asked for and shared
by the whole session, for an oracle remembers what it computed. Torch and transformers are imported
by the fixtures, not by this file: tests that need neither start in no time.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY_MOE = Path(__file__).resolve().parents[2] / "src" / "dovetail" / "assets" / "tiny-moe"


def _folder(name: str, module: str, maker: str, **arguments: Any) -> Callable[..., Path]:
    """A fixture that writes a checkpoint with ``tests.support.<module>.<maker>``."""

    @pytest.fixture(scope="session", name=name)
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        make = getattr(importlib.import_module(f"tests.support.{module}"), maker)
        return make(tmp_path_factory.mktemp(name), **arguments)

    return folder


def _oracle(name: str, folder_name: str) -> Callable[..., Any]:
    """A fixture that loads the oracle of another fixture's folder."""

    @pytest.fixture(scope="session", name=name)
    def oracle(request: pytest.FixtureRequest) -> Any:
        from tests.support.oracle import Oracle

        return Oracle(request.getfixturevalue(folder_name))

    return oracle


@pytest.fixture(scope="session")
def tiny_moe_folder() -> Path:
    """The checkpoint that the package carries, found by its place in the repository."""
    assert (TINY_MOE / "config.json").is_file(), "the package lacks its tiny-moe checkpoint"
    return TINY_MOE


llama_folder = _folder("llama_folder", "checkpoints", "random_llama")
qwen3_folder = _folder("qwen3_folder", "checkpoints", "random_qwen3")
qwen3_moe_folder = _folder("qwen3_moe_folder", "checkpoints", "random_qwen3_moe")
fx_count_folder = _folder("fx_count_folder", "handmade", "fx_count")
fx_tag_folder = _folder("fx_tag_folder", "handmade", "fx_tag")
fx_moe_folder = _folder("fx_moe_folder", "handmade", "fx_moe")
fx_moe_wide_folder = _folder("fx_moe_wide_folder", "handmade", "fx_moe", num_experts=272)

llama_oracle = _oracle("llama_oracle", "llama_folder")
qwen3_oracle = _oracle("qwen3_oracle", "qwen3_folder")
qwen3_moe_oracle = _oracle("qwen3_moe_oracle", "qwen3_moe_folder")
tiny_moe_oracle = _oracle("tiny_moe_oracle", "tiny_moe_folder")
fx_count_oracle = _oracle("fx_count_oracle", "fx_count_folder")
fx_tag_oracle = _oracle("fx_tag_oracle", "fx_tag_folder")
fx_moe_oracle = _oracle("fx_moe_oracle", "fx_moe_folder")
fx_moe_wide_oracle = _oracle("fx_moe_wide_oracle", "fx_moe_wide_folder")
