"""CUDA's virtual memory management, through the package cuda-bindings.

Owns the calls, and the question whether they work here; nothing else knows that package. Source:
CUDA driver API, section "Virtual Memory Management".
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import DeviceError
from dovetail.exec.cuda.address import bytes_at
from dovetail.exec.cuda.mapping import MappedMemory
from dovetail.exec.memory import PlainMemory, TaggedMemory

try:
    _cuda: Any = import_module("cuda.bindings.driver")
except ImportError:
    _cuda = None


class CudaDriver:
    """One GPU's ``MappingDriver``. All threads, one at a time."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)  # makes the context
        self._device = device
        location = _cuda.CUmemLocation()
        location.type = _cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device.index
        self._kind = _cuda.CUmemAllocationProp()
        self._kind.type = _cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = location
        self._access = _cuda.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = _cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = _cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(
            _done("find the granularity", _cuda.cuMemGetAllocationGranularity(self._kind, least))
        )

    def reserve(self, num_bytes: int) -> int:
        """See ``MappingDriver``."""
        return int(_done("reserve addresses", _cuda.cuMemAddressReserve(num_bytes, 0, 0, 0)))

    def free(self, address: int, num_bytes: int) -> None:
        """See ``MappingDriver``."""
        _done("free addresses", _cuda.cuMemAddressFree(address, num_bytes))

    def map(self, address: int, num_bytes: int) -> None:
        """See ``MappingDriver``."""
        handle = self._create(num_bytes)
        try:
            _done("map memory", _cuda.cuMemMap(address, num_bytes, 0, handle, 0))
        finally:
            _done("release memory", _cuda.cuMemRelease(handle))  # it lives while it is mapped
        try:
            _done("set access", _cuda.cuMemSetAccess(address, num_bytes, [self._access], 1))
        except DeviceError:
            self.unmap(address, num_bytes)
            raise

    def unmap(self, address: int, num_bytes: int) -> None:
        """See ``MappingDriver``."""
        torch.cuda.synchronize(self._device)
        _done("unmap memory", _cuda.cuMemUnmap(address, num_bytes))

    def view(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """See ``MappingDriver``."""
        return bytes_at(address, num_bytes, self._device, owner=owner)

    def _create(self, num_bytes: int) -> Any:
        error, handle = _cuda.cuMemCreate(num_bytes, self._kind, 0)
        if error == _cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # what torch keeps for later is free, too
            error, handle = _cuda.cuMemCreate(num_bytes, self._kind, 0)
        if error == _cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self._device)
            raise DeviceError(
                f"the GPU is full: {num_bytes} bytes are asked for, {free} of {total} are free"
            )
        return _done("create memory", (error, handle))


def _done(what: str, result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error != _cuda.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver cannot {what}: {error.name}")
    return values[0] if values else None


def tagged_memory(device: torch.device) -> TaggedMemory:
    """Return a GPU's memory: mapped if that is to be had, else plain, with the reason."""
    if _cuda is None:
        return PlainMemory(device, "the package cuda-bindings is not installed")
    try:
        driver = CudaDriver(device)
        address = driver.reserve(driver.granularity)
        driver.map(address, driver.granularity)
        driver.unmap(address, driver.granularity)
        driver.free(address, driver.granularity)
    except DeviceError as error:
        return PlainMemory(device, str(error))
    return MappedMemory(driver)
