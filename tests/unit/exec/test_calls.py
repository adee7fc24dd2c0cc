"""Calls to the CUDA driver: which way copies go, and what is done about its answers."""

import ctypes
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from dovetail.errors import DeviceError
from dovetail.exec.cuda.calls import NO_CONTEXT, NOT_READY, DriverCalls

CONTEXT, STREAM, FAILED = 77, 5, 700


class Driver(SimpleNamespace):
    """A driver whose GPU is the host; the thread has no context until it is given one."""

    def __init__(self, *, code: int = 0, has_context: bool = True) -> None:
        self.code, self.has_context, self.calls = code, has_context, []

        def copy(target, source, num_bytes, stream):
            if not self.has_context:
                return NO_CONTEXT
            self.calls.append((num_bytes, stream))
            ctypes.memmove(target, source, num_bytes)
            return self.code

        def set_current(context):
            assert context.value == CONTEXT
            self.has_context = True
            return 0

        def name_of(code, name):
            name._obj.value = b"CUDA_ERROR_%d" % code

        def query(event):
            return self.code if self.has_context else NO_CONTEXT

        self.cuEventQuery = query
        for name in ("cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuStreamWaitEvent"):
            setattr(self, name, lambda *args: self.code)

        def address_of(address, host, flags):
            if not self.has_context:
                return NO_CONTEXT
            address._obj.value = host + 2**40
            return self.code

        self.cuMemHostGetDevicePointer_v2 = address_of
        self.cuMemcpyDtoHAsync_v2 = lambda *args: copy(*args)
        self.cuCtxSetCurrent, self.cuGetErrorName = set_current, name_of


@pytest.mark.parametrize("has_context", [True, False])
def test_bytes_go_to_where_they_should_on_any_thread(has_context):
    driver = Driver(has_context=has_context)
    calls = DriverCalls(driver, CONTEXT)
    host, device = np.arange(8, dtype=np.uint8), np.full(8, 9, dtype=np.uint8)
    calls.download(device.ctypes.data + 6, host.ctypes.data + 6, 2, STREAM)
    assert host.tolist() == [0, 1, 2, 3, 4, 5, 9, 9]
    assert driver.calls == [(2, STREAM)]


@pytest.mark.parametrize("has_context", [True, False])
def test_memory_of_the_host_has_an_address_for_the_gpu(has_context):
    calls = DriverCalls(Driver(has_context=has_context), CONTEXT)
    assert calls.address_of(77) == 77 + 2**40


def test_a_failure_is_an_error_that_names_it():
    block = np.zeros(8, dtype=np.uint8).ctypes.data
    calls = DriverCalls(Driver(code=FAILED), CONTEXT)
    with pytest.raises(DeviceError, match="CUDA_ERROR_700"):
        calls.download(block, block, 4, STREAM)
    calls = DriverCalls(Driver(code=NO_CONTEXT), CONTEXT)  # it had one, and still
    with pytest.raises(DeviceError, match="CUDA_ERROR_201"):
        calls.download(block, block, 4, STREAM)


def test_no_call_is_bound_that_could_wait():
    """PyTorch's check of waiting calls does not see the driver's, so none must be there."""

    class Named:
        """A library that takes note of what it is asked for."""

        names: ClassVar[set[str]] = set()

        def __getattr__(self, name):
            self.names.add(name)
            return SimpleNamespace(argtypes=None)

    DriverCalls(Named(), CONTEXT)
    assert Named.names == {
        "cuMemcpyDtoHAsync_v2", "cuMemHostGetDevicePointer_v2", "cuEventCreate",
        "cuEventDestroy_v2", "cuEventRecord", "cuEventQuery", "cuStreamWaitEvent",
    }  # fmt: skip


@pytest.mark.parametrize("has_context", [True, False])
def test_an_event_has_happened_has_not_or_never_will(has_context):
    for code, happened in ((0, True), (NOT_READY, False)):
        driver = Driver(code=code, has_context=has_context)
        assert DriverCalls(driver, CONTEXT).has_happened(3) is happened
    with pytest.raises(DeviceError, match="CUDA_ERROR_700"):
        DriverCalls(Driver(code=FAILED, has_context=has_context), CONTEXT).has_happened(3)
