"""The GPU as a device: lanes are streams, host blocks are pinned, faults are device errors."""

import gc
from threading import Thread

import pytest
import torch

from dovetail.errors import DeviceError, InvariantError
from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.cuda.upload import staged_copies
from dovetail.exec.device import upload
from dovetail.exec.ring import paired_blocks

pytestmark = pytest.mark.cuda


@pytest.fixture
def device():
    device = CudaDevice()
    yield device
    device.close()


def test_lanes_are_distinct_and_ordered_by_events_alone(device: CudaDevice) -> None:
    assert device.compute.stream != device.copy.stream
    target = device.device_block(64)
    host = device.host_block(64)
    for value in range(1, 50):

        def slow_write(value: int = value) -> None:
            torch.cuda._sleep(1_000_000)
            target.fill_(value)

        device.compute.submit(slow_write)
        written = device.compute.record()
        device.copy.wait(written)
        device.copy.submit(lambda: host.copy_(target, non_blocking=True))
        device.copy.record().wait()
        assert host.eq(value).all()


def test_lanes_that_are_one_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = torch.cuda.Stream()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args: stream)
    with pytest.raises(InvariantError, match="the same CUDA stream"):
        CudaDevice()


def test_an_adopted_thread_has_its_stream_back_afterwards(device: CudaDevice) -> None:
    before, seen = torch.cuda.current_stream(), []
    with device.adopt_thread():
        device.compute.submit(lambda: seen.append(torch.cuda.current_stream()))
        thread = Thread(
            target=device.compute.submit, args=(lambda: seen.append(torch.cuda.current_stream()),)
        )
        thread.start()
        thread.join()
    assert seen == [device.compute.stream] * 2  # another thread's is changed for each submission
    assert torch.cuda.current_stream() == before


def test_host_blocks_have_their_exact_size_and_copies_do_not_wait(device: CudaDevice) -> None:
    block = device.host_block(1_000_003)
    assert block.numel() == 1_000_003 and device.num_unpinned == 0
    target = device.device_block(1_000_003)
    block.fill_(7)
    device.compute.submit(lambda: torch.cuda._sleep(400_000_000))
    device.compute.submit(lambda: target.copy_(block, non_blocking=True))
    copied = device.compute.record()
    assert not copied.has_happened  # the sleep is not over, and nobody waited for it
    copied.wait()
    assert target.eq(7).all()


def test_blocks_come_home_at_once_in_order_from_any_thread(device: CudaDevice) -> None:
    """The driver's copies: they wait for their lane alone, and take a thread that is new here."""
    target = device.device_block(1_000_004)
    (block,) = paired_blocks(device, [target])
    block.host.fill_(3)

    def fetch_from_nowhere() -> None:
        device.copy.download(block, 0, 4)

    def fetch() -> None:
        device.compute.submit(torch.cuda._sleep, 400_000_000)
        device.compute.submit(target.fill_, 7)
        device.copy.wait(device.compute.record())
        device.copy.download(block, 5, 1_000_000)
        fetched.append(device.copy.record())

    fetched: list = []
    for work in (fetch_from_nowhere, fetch):
        thread = Thread(target=work)
        thread.start()
        thread.join()
    assert not fetched[0].has_happened  # the sleep is not over, and nobody waited for it
    fetched[0].wait()
    host = block.host
    assert host[:4].eq(0).all() and host[4] == 3
    assert host[5:-4].eq(7).all() and host[-4:].eq(3).all()


def test_without_pinning_the_same_calls_give_the_same_bytes(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        cudaHostRegister = staticmethod(lambda *args: 2)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refusing)
    target = device.device_block(4096)
    (block,) = paired_blocks(device, [target])
    assert device.num_unpinned == 1 and device.address_of(block.host) is None
    monkeypatch.undo()
    block.host.fill_(9)
    device.compute.submit(lambda: target.copy_(block.host, non_blocking=True))
    block.host.fill_(1)  # the copy was over when it returned
    device.compute.record().wait()
    assert target.eq(9).all()
    device.compute.submit(upload, block, 4096)
    block.host.fill_(2)
    written = device.compute.record()
    device.copy.wait(written)
    device.copy.download(block, 0, 4096)
    device.copy.record().wait()
    assert block.host.eq(1).all()


def test_memory_that_is_pinned_already_is_refused_without_harm(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is not handed to whoever launches next."""
    block, zeros = device.host_block(4096), torch.zeros
    monkeypatch.setattr(
        torch, "zeros", lambda *args, **more: zeros(*args, **more) if more.get("device") else block
    )
    assert device.host_block(4096) is block and device.num_unpinned == 1
    device.device_block(64)


def test_a_device_that_nobody_closes_lets_its_memory_go() -> None:
    block = CudaDevice().host_block(2**20)
    gc.collect()
    assert torch.cuda.cudart().cudaHostRegister(block.data_ptr(), 2**20, 0) == 0
    assert torch.cuda.cudart().cudaHostUnregister(block.data_ptr()) == 0


def test_a_full_gpu_is_a_device_error(device: CudaDevice) -> None:
    with pytest.raises(DeviceError, match="compute"):
        device.compute.submit(
            lambda: torch.empty(2**50, dtype=torch.uint8, device=device.torch_device) and None
        )


def test_staged_copies_are_the_copies(device: CudaDevice) -> None:
    """Slices of rows, a last one that is short, a row larger than a slot, strides, other dtypes."""
    shapes = [(), (5,), (1000, 3), (7, 300), (3, 2000), (64, 16)]
    sources = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    whole = torch.zeros(64, 40, dtype=torch.bfloat16, device="cuda")
    targets = [torch.zeros(s, dtype=torch.bfloat16, device="cuda") for s in shapes[:-1]]
    targets.append(whole[:, 8:24])
    with staged_copies(device, slot_bytes=2048, num_slots=2) as copy:
        for target, source in zip(targets, sources, strict=True):
            torch.cuda._sleep(10_000_000)  # what is on its way stays there for a while
            copy(target, source)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target.cpu(), source.bfloat16())
    assert whole[:, :8].eq(0).all() and whole[:, 24:].eq(0).all()
    assert not device._pinned
