"""What crosses every step, as the device sees it: where packets lie, and where results wait.

Owns its sizes. A runner has one set, at fixed addresses, before anything is recorded that reads or
writes it; the executor fills the packets and moves the results.
"""

from dataclasses import dataclass

from torch import Tensor

from dovetail.config.schema import EngineConfig
from dovetail.exec.device import Device, TransferBlock
from dovetail.exec.packet import packet_schema
from dovetail.exec.readback import num_result_words
from dovetail.exec.ring import readable_blocks

_ALIGN_BYTES = 16


@dataclass(frozen=True, slots=True)
class StepBlocks:
    """Blocks of a runner.

    Attributes:
        packets: a ring; packet ``number``, counted from 1, lies in block ``(number - 1) % blocks``.
            Before the first one they are zeroed, and so hold a packet without rows, number 0.
        results: uint8 [blocks, bytes], on the device; each step fills the one that its packet
            names.
    """

    packets: list[TransferBlock]
    results: Tensor


def step_blocks(config: EngineConfig, device: Device) -> StepBlocks:
    """Allocate the blocks of a runner."""
    num_blocks, num_bytes = num_step_blocks(config), _result_bytes(config)
    results = device.device_block(num_blocks * num_bytes).view(num_blocks, num_bytes)
    packet_bytes = packet_schema(config).num_bytes
    packets = readable_blocks(device, packet_bytes, num_blocks=num_blocks)
    for block in packets:
        block.host.zero_()
    return StepBlocks(packets, results)


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
    return _aligned(4 * num_result_words(config.max_running))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
