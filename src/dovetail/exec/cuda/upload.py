"""Weights on their way to a GPU, through pinned memory.

Owns the slots between file and device. A tensor goes through them in slices: while one slice is on
its way to the device, the next one is read, and converted, by the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dovetail.exec.cuda.device import CudaDevice
from dovetail.weights.mapping import Copy

SLOT_BYTES = 2**26
NUM_SLOTS = 3


class _Piece:
    def __init__(self, block: Tensor) -> None:
        self.block = block
        self.sent = torch.cuda.Event()  # an event that was never recorded has happened


@contextmanager
def staged_copies(
    device: CudaDevice, *, slot_bytes: int = SLOT_BYTES, num_slots: int = NUM_SLOTS
) -> Iterator[Copy]:
    """Yield a function that copies and converts; all has arrived when the context ends.

    Args:
        device: whose memory the parameters are in.
        slot_bytes: of one slice, if a row of a tensor is not larger.
        num_slots: slices that may be on their way, and one that is read.
    """
    slots = [_Piece(device.host_block(slot_bytes)) for _ in range(num_slots)]
    turn = 0

    def send(target: Tensor, source: Tensor) -> None:
        nonlocal turn
        slot, turn = slots[turn], (turn + 1) % num_slots
        slot.sent.synchronize()
        staged = slot.block[: target.nbytes].view(target.dtype).view(target.shape)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        slot.sent.record()

    def copy(target: Tensor, source: Tensor) -> None:
        if not target.dim():
            target, source = target[None], source[None]
        row_bytes = target[:1].nbytes
        if row_bytes > slot_bytes:
            target.copy_(source)
            return
        num_rows = max(1, slot_bytes // max(1, row_bytes))
        for start in range(0, len(target), num_rows):
            send(target[start : start + num_rows], source[start : start + num_rows])

    try:
        yield copy
    finally:
        torch.cuda.synchronize(device.torch_device)
        for slot in slots:
            device.release_host_block(slot.block)
