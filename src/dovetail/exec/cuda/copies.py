"""Copies between the host and a GPU, straight through the CUDA driver.

Owns the calls. A step sends one packet and fetches one block, both at addresses that never change;
by way of torch each costs two slices, a dispatched copy and a change of the current stream, several
times the copy itself. Source: CUDA driver API, section "Memory Management".
"""

import ctypes
from typing import Any

import torch

from dovetail.errors import DeviceError

NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: what a thread is told that has not used the GPU yet."""


class DriverCopies:
    """Queues copies on streams of one GPU. All threads.

    Args:
        driver: the driver's library.
        context: of the GPU, for threads that have none.
    """

    def __init__(self, driver: Any, context: int) -> None:
        self._driver = driver
        self._context = ctypes.c_void_p(context)
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._upload = driver.cuMemcpyHtoDAsync_v2
        self._upload.argtypes = [address, pointer, size, pointer]
        self._download = driver.cuMemcpyDtoHAsync_v2
        self._download.argtypes = [pointer, address, size, pointer]

    def upload(self, host: int, device: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between two addresses.

        Raises:
            DeviceError: the GPU failed.
        """
        self._queue(self._upload, device, host, num_bytes, stream)

    def download(self, device: int, host: int, num_bytes: int, stream: int) -> None:
        """Queue a copy between two addresses.

        Raises:
            DeviceError: the GPU failed.
        """
        self._queue(self._download, host, device, num_bytes, stream)

    def _queue(self, call: Any, target: int, source: int, num_bytes: int, stream: int) -> None:
        code = call(target, source, num_bytes, stream)
        if code == NO_CONTEXT:
            _check(self._driver, self._driver.cuCtxSetCurrent(self._context))
            code = call(target, source, num_bytes, stream)
        _check(self._driver, code)


def driver_copies(device: torch.device) -> DriverCopies:
    """Return the copies of a GPU.

    The driver is called with Python's lock held: all it does is queue a copy, and whoever gives the
    lock away for that may wait longer for its return.
    """
    driver, context = ctypes.PyDLL("libcuda.so.1"), ctypes.c_void_p()  # there wherever a GPU is
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context
        _check(driver, driver.cuCtxGetCurrent(ctypes.byref(context)))
    return DriverCopies(driver, context.value or 0)


def _check(driver: Any, code: int) -> None:
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        text = (name.value or b"an error without a name").decode()
        raise DeviceError(f"the CUDA driver cannot queue a copy: {text}")
