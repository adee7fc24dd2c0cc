"""A CUDA lane without a GPU: what it makes of the errors of its work."""

import threading
from types import SimpleNamespace

import pytest
import torch

from dovetail.errors import DeviceError
from dovetail.exec.cuda.device import CudaLane


@pytest.fixture
def lane(monkeypatch) -> CudaLane:
    """A lane whose stream is already that of this thread."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=1))
    lane = CudaLane("compute", torch.device("cuda", 0), SimpleNamespace())
    lane._adopted = threading.get_ident()
    return lane


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
