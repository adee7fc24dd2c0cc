"""The device's side of what crosses every step: where packets arrive, and where results wait.

Owns its sizes. A runner has one set, at fixed addresses, before anything is recorded that reads or
writes it; the executor moves it.
"""

from dataclasses import dataclass

from torch import Tensor

from dovetail.config.schema import EngineConfig
from dovetail.exec.device import Device
from dovetail.exec.packet import packet_schema
from dovetail.exec.readback import RESULT_WORDS

_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """Blocks of a runner; uint8, on the device.

    Attributes:
        packet: the plan of the step at hand. One is enough: the compute lane uploads a packet after
            the last work that reads the one before.
        results: [blocks, bytes]; each step fills the one that its packet names.
    """

    packet: Tensor
    results: Tensor


def step_blocks(config: EngineConfig, device: Device) -> StepBlocks:
    """Allocate the blocks of a runner."""
    num_blocks, num_bytes = num_step_blocks(config), _result_bytes(config)
    results = device.device_block(num_blocks * num_bytes).view(num_blocks, num_bytes)
    return StepBlocks(device.device_block(packet_schema(config).num_bytes), results)


def num_step_blocks(config: EngineConfig) -> int:
    """Those of the steps in flight, of one that is built, and of one that is read."""
    return config.depth + 2


def payload_bytes(config: EngineConfig) -> int:
    """Return the bytes of one payload block."""
    return _aligned(config.max_payload_bytes)


def transfer_bytes(config: EngineConfig) -> int:
    """Return the device memory that an executor takes beside its runner."""
    return num_step_blocks(config) * payload_bytes(config)


def _result_bytes(config: EngineConfig) -> int:
    return _aligned(4 * RESULT_WORDS * config.max_running)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
