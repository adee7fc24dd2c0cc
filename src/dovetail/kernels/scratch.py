"""Memory that operations use while they run.

Owns buffers that are kept from call to call: memory that is allocated and freed in each
step costs a page fault for every 4 KiB, which on a CPU is more than the work done in it.
"""

import math

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow on demand. A buffer's content lasts until it is taken again.

    Not for several threads: one for each lane that runs operations.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return an uninitialised tensor with the dtype and device of ``like``."""
        num_elements = math.prod(shape)
        buffer = self._buffers.get((name, like.dtype))
        if buffer is None or len(buffer) < num_elements:
            # A half more than asked for: sequences grow, and so would this at each step.
            buffer = like.new_empty(num_elements + num_elements // 2)
            self._buffers[name, like.dtype] = buffer
        return buffer[:num_elements].view(shape)
