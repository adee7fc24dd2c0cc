"""GPU memory as a tensor that does not own it, by its address."""

import torch
from torch import Tensor

from dovetail.errors import InvariantError


class _DeviceArray:
    """Memory as ``torch.as_tensor`` takes it; the tensor keeps this object, and so the owner."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def bytes_at(address: int, num_bytes: int, device: torch.device, *, owner: object) -> Tensor:
    """Return memory as a tensor, uint8; ``owner`` lives as long as it or a view of it.

    Raises:
        InvariantError: it is no memory of this device.
    """
    tensor = torch.as_tensor(_DeviceArray(address, num_bytes, owner), device=device)
    if tensor.data_ptr() != address:
        raise InvariantError("torch copied memory that it was to look at")
    return tensor


def view_of(tensor: Tensor) -> Tensor:
    """Return a tensor at the same place that does not keep its memory.

    Raises:
        InvariantError: it is not contiguous.
    """
    if not tensor.is_contiguous():
        raise InvariantError("only a contiguous tensor is an address and a shape")
    data = bytes_at(tensor.data_ptr(), tensor.nbytes, tensor.device, owner=None)
    return data.view(tensor.dtype).view(tensor.shape)
