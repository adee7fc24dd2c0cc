"""What a pool must leave room for: an executor's blocks beside those of its runner, to the byte."""

import pytest
import torch

from dovetail.exec.blocks import step_blocks, transfer_bytes
from dovetail.exec.device import CpuDevice
from dovetail.exec.executor import Executor
from tests.support.scripted import plain_config


@pytest.mark.parametrize("depth", [0, 2])
def test_transfer_bytes_are_those_of_the_blocks_on_the_device(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, device, sizes = plain_config(depth=depth), CpuDevice(), []

    def device_block(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    class Runner:
        blocks = step_blocks(config, device)

    monkeypatch.setattr(device, "device_block", device_block)
    Executor(config, Runner(), device)  # type: ignore[arg-type]
    assert len(sizes) == depth + 2
    assert transfer_bytes(config) == sum(sizes)
