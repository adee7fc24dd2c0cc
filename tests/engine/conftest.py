"""New weights for the model of ``qwen3_moe_folder``: a checkpoint, its oracle, its tensors.

Nobody writes to them, so the whole session shares them.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import checkpoints
from tests.support.oracle import Oracle


@pytest.fixture(scope="session")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.random_qwen3_moe(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="session")
def new_oracle(new_folder: Path) -> Oracle:
    return Oracle(new_folder)


@pytest.fixture(scope="session")
def new_tensors(new_folder: Path) -> dict[str, torch.Tensor]:
    return load_file(new_folder / "model.safetensors")
