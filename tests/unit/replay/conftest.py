"""A tiny model with experts, and a session on it: what tests of sessions share."""

import pytest
from torch import nn

from dovetail.replay.session import ReplaySession
from tests.support.moe_families import tiny_model


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("qwen3_moe")


@pytest.fixture
def session(model) -> ReplaySession:
    model.gradient_checkpointing_disable()
    return ReplaySession(model)
