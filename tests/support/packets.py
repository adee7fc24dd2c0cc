"""What tests do to packets on their way."""

from typing import Any

import numpy as np
from pytest import MonkeyPatch

from dovetail.exec.device import TransferBlock
from dovetail.exec.executor import Executor
from dovetail.exec.packet import NUMBER


def renumber_packet(patch: MonkeyPatch, number: int, found: int) -> None:
    """Let the device find another number in one packet, as if a later one lay in its block."""
    stage = Executor._stage

    def renumbered(self: Executor, *args: Any) -> TransferBlock:
        block = stage(self, *args)
        words = block.host.numpy().view(np.int32)
        if words[NUMBER] == number:
            words[NUMBER] = found
        return block

    patch.setattr(Executor, "_stage", renumbered)
