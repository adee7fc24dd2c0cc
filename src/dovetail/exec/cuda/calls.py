"""What each step asks of the CUDA driver beside its launches: copies and events.

Owns the calls. They are made with ``ctypes``: by way of torch a copy costs two slices, a dispatched
operation and a change of the current stream, several times the copy itself, and each event is made
and destroyed. Source: CUDA driver API, sections "Memory Management", "Event Management" and "Stream
Management".
"""

import ctypes
from typing import Any

import torch

from dovetail.errors import DeviceError

NO_CONTEXT = 201
"""CUDA_ERROR_INVALID_CONTEXT: what a thread is told that has not used the GPU yet."""

NOT_READY = 600
"""CUDA_ERROR_NOT_READY: what is said of an event that has not happened."""

_WITHOUT_TIMES = 2
"""CU_EVENT_DISABLE_TIMING."""


class DriverCalls:
    """Calls for one GPU. All threads; none waits for it but copies of memory that is not pinned.

    Streams, events and addresses are integers. All raise DeviceError if the GPU has failed.

    Args:
        driver: the driver's library.
        context: of the GPU, for threads that have none.
    """

    def __init__(self, driver: Any, context: int) -> None:
        self._driver = driver
        self._context = ctypes.c_void_p(context)
        address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        for name, types in (
            ("cuMemcpyDtoHAsync_v2", [pointer, address, size, pointer]),
            ("cuMemHostGetDevicePointer_v2", [pointer, pointer, ctypes.c_uint]),
            ("cuEventCreate", [pointer, ctypes.c_uint]),
            ("cuEventDestroy_v2", [pointer]),
            ("cuEventRecord", [pointer, pointer]),
            ("cuEventQuery", [pointer]),
            ("cuStreamWaitEvent", [pointer, pointer, ctypes.c_uint]),
        ):
            getattr(driver, name).argtypes = types
        self._download = driver.cuMemcpyDtoHAsync_v2
        self._record = driver.cuEventRecord
        self._query = driver.cuEventQuery
        self._wait = driver.cuStreamWaitEvent

    def download(self, device: int, host: int, num_bytes: int, stream: int) -> None:
        """Queue a copy."""
        code = self._download(host, device, num_bytes, stream)
        if code:
            self._call_again(code, self._download, host, device, num_bytes, stream)

    def address_of(self, host: int) -> int:
        """Return the address at which the GPU reads pinned memory of the host."""
        get, address = self._driver.cuMemHostGetDevicePointer_v2, ctypes.c_uint64()
        code = get(ctypes.byref(address), host, 0)
        if code:
            self._call_again(code, get, ctypes.byref(address), host, 0)
        return address.value

    def new_event(self) -> int:
        """Return an event that was never recorded."""
        create, event = self._driver.cuEventCreate, ctypes.c_void_p()
        code = create(ctypes.byref(event), _WITHOUT_TIMES)
        if code:
            self._call_again(code, create, ctypes.byref(event), _WITHOUT_TIMES)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Give an event back to the driver."""
        destroy = self._driver.cuEventDestroy_v2
        code = destroy(event)
        if code:
            self._call_again(code, destroy, event)

    def record(self, event: int, stream: int) -> None:
        """Let the event be the present end of the stream; what it was before is forgotten."""
        code = self._record(event, stream)
        if code:
            self._call_again(code, self._record, event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Let the stream wait for the event as it was recorded last."""
        code = self._wait(stream, event, 0)
        if code:
            self._call_again(code, self._wait, stream, event, 0)

    def has_happened(self, event: int) -> bool:
        """Return whether the GPU has come to the event as it was recorded last."""
        code = self._query(event)
        if code and code != NOT_READY:
            code = self._call_again(code, self._query, event)
        return code != NOT_READY

    def _call_again(self, code: int, call: Any, *args: Any) -> int:
        """Give the thread the context if that is why a call was refused, and return its new code.

        Apart from the calls themselves, which run once a step, when code has left the caches: then
        each function on the way shows.
        """
        if code == NO_CONTEXT:
            _check(self._driver, self._driver.cuCtxSetCurrent(self._context))
            code = call(*args)
        if code != NOT_READY:
            _check(self._driver, code)
        return code


def driver_calls(device: torch.device) -> DriverCalls:
    """Return the calls for a GPU.

    They keep Python's lock: all they do is queue something, and whoever gives the lock away for
    that may wait milliseconds for its return. Where memory cannot be pinned, copies of it keep the
    lock until they are done.
    """
    driver, context = ctypes.PyDLL("libcuda.so.1"), ctypes.c_void_p()  # there wherever a GPU is
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the context
        _check(driver, driver.cuCtxGetCurrent(ctypes.byref(context)))
    return DriverCalls(driver, context.value or 0)


def _check(driver: Any, code: int) -> None:
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        text = (name.value or b"an error without a name").decode()
        raise DeviceError(f"the CUDA driver cannot do what it is asked for: {text}")
