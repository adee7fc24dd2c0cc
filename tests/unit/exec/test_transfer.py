"""What a pool must leave room for: the blocks of an executor, to the byte."""

import pytest
import torch

from dovetail.exec.device import CpuDevice
from dovetail.exec.executor import Executor, transfer_bytes
from tests.support.scripted import plain_config


@pytest.mark.parametrize("depth", [0, 2])
def test_transfer_bytes_are_those_of_the_blocks_on_the_device(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, device, sizes = plain_config(depth=depth), CpuDevice(), []

    def device_block(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(device, "device_block", device_block)
    Executor(config, None, device)  # type: ignore[arg-type]
    assert len(sizes) == 3 * (depth + 2)
    assert transfer_bytes(config) == sum(sizes)
