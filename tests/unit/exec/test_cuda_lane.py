"""A CUDA lane without a GPU: what it copies, and what it makes of the errors of its work."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from dovetail.errors import DeviceError
from dovetail.exec.cuda.device import CudaLane
from dovetail.exec.device import CpuDevice
from dovetail.exec.ring import paired_blocks

STREAM = 7


class CopiesAtOnce:
    """The driver's copy, of the host's own memory."""

    def download(self, device: int, host: int, num_bytes: int, stream: int) -> None:
        assert stream == STREAM
        ctypes.memmove(host, device, num_bytes)


@pytest.fixture
def lane(monkeypatch) -> CudaLane:
    """A lane whose stream is already that of this thread."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    lane = CudaLane("compute", torch.device("cuda", 0), CopiesAtOnce())
    lane._adopted = threading.get_ident()
    return lane


def test_a_block_comes_home_in_part(lane):
    device = CpuDevice()
    (block,) = paired_blocks(device, [device.device_block(12)])
    block.host.copy_(torch.arange(12))
    block.device.copy_(torch.arange(12) + 20)
    lane.download(block, 3, 9)
    assert block.host.tolist() == [0, 1, 2, 23, 24, 25, 26, 27, 28, 9, 10, 11]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    ],
)
def test_a_fault_of_the_gpu_is_a_device_error_whoever_meets_it(lane, error):
    def fail() -> None:
        raise error

    with pytest.raises(DeviceError, match="lane compute failed"):
        lane.submit(fail)


def test_a_fault_of_ours_stays_what_it_is(lane):
    def fail() -> None:
        raise RuntimeError("shape '[2]' is invalid for input of size 3")

    with pytest.raises(RuntimeError, match="shape"):
        lane.submit(fail)
