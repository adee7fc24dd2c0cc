"""Copies through the CUDA driver: which way, how much, and what is done about its answers."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from dovetail.errors import DeviceError
from dovetail.exec.cuda.copies import NO_CONTEXT, DriverCopies

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

        self.cuMemcpyHtoDAsync_v2 = lambda *args: copy(*args)
        self.cuMemcpyDtoHAsync_v2 = lambda *args: copy(*args)
        self.cuCtxSetCurrent, self.cuGetErrorName = set_current, name_of


@pytest.mark.parametrize("has_context", [True, False])
def test_bytes_go_to_where_they_should_on_any_thread(has_context):
    driver = Driver(has_context=has_context)
    copies = DriverCopies(driver, CONTEXT)
    host, device = np.arange(8, dtype=np.uint8), np.zeros(8, dtype=np.uint8)
    copies.upload(host.ctypes.data, device.ctypes.data, 5, STREAM)
    assert device.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    device[:] = 9
    copies.download(device.ctypes.data + 6, host.ctypes.data + 6, 2, STREAM)
    assert host.tolist() == [0, 1, 2, 3, 4, 5, 9, 9]
    assert driver.calls == [(5, STREAM), (2, STREAM)]


def test_a_failure_is_an_error_that_names_it():
    block = np.zeros(8, dtype=np.uint8).ctypes.data
    copies = DriverCopies(Driver(code=FAILED), CONTEXT)
    with pytest.raises(DeviceError, match="CUDA_ERROR_700"):
        copies.upload(block, block, 4, STREAM)
    copies = DriverCopies(Driver(code=NO_CONTEXT), CONTEXT)  # it had one, and still
    with pytest.raises(DeviceError, match="CUDA_ERROR_201"):
        copies.download(block, block, 4, STREAM)
