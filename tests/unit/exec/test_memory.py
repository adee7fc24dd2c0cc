"""Tagged memory: what is given back, what keeps its address, and when it is freed."""

import ctypes
import gc

import pytest
import torch
from torch import Tensor

from dovetail.errors import DeviceError, InvariantError
from dovetail.exec.cuda.mapping import MappedMemory
from dovetail.exec.memory import host_memory

PAGE = 4096
JUNK = 0xA5


class FakeDriver:
    """Addresses in the host's memory; what is unmapped is junk, and the books are checked."""

    granularity = PAGE

    def __init__(self, room: int = 64) -> None:
        self.room = room
        self.reserved: dict[int, ctypes.Array] = {}
        self.mapped: dict[int, int] = {}

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes % PAGE == 0
        block = (ctypes.c_char * num_bytes)()
        ctypes.memset(block, JUNK, num_bytes)
        self.reserved[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int, num_bytes: int) -> None:
        assert not any(address <= at < address + num_bytes for at in self.mapped)
        assert len(self.reserved.pop(address)) == num_bytes

    def map(self, address: int, num_bytes: int) -> None:
        assert num_bytes % PAGE == 0 and address not in self.mapped
        assert any(a <= address < a + len(block) for a, block in self.reserved.items())
        if (sum(self.mapped.values()) + num_bytes) // PAGE > self.room:
            raise DeviceError("the GPU is full")
        self.mapped[address] = num_bytes

    def unmap(self, address: int, num_bytes: int) -> None:
        assert self.mapped.pop(address) == num_bytes
        ctypes.memset(address, JUNK, num_bytes)

    def view(self, address: int, num_bytes: int, owner: object) -> Tensor:
        block = (ctypes.c_char * num_bytes).from_address(address)
        block.owner = owner
        return torch.frombuffer(block, dtype=torch.uint8)

    @property
    def num_pages(self) -> int:
        return sum(self.mapped.values()) // PAGE


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def memory(driver: FakeDriver) -> MappedMemory:
    return MappedMemory(driver, span_bytes=8 * PAGE)


def is_junk(tensor: Tensor) -> bool:
    return bool((tensor.view(torch.uint8) == JUNK).all())


def test_tensors_are_zeros_apart_and_mapped_as_far_as_they_reach(driver, memory) -> None:
    shapes = [(3, 5), (), (0, 4), (700,), (2, 1024)]
    tensors = [memory.zeros("kv", shape, torch.int32) for shape in shapes]
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    for value, tensor in enumerate(tensors):
        offset = tensor.data_ptr() - tensors[0].data_ptr()
        assert offset % 512 == 0 or not tensor.numel()
        assert tensor.eq(0).all()
        tensor.fill_(value)
    assert all(tensor.eq(value).all() for value, tensor in enumerate(tensors))
    assert driver.num_pages == 4 and memory.num_bytes("kv") == 4 * PAGE
    assert memory.num_bytes("weights") == 0
    assert memory.zeros("weights", (8,), torch.bfloat16).dtype == torch.bfloat16


def test_what_is_larger_than_a_span_has_one_of_its_own(driver, memory) -> None:
    small = memory.zeros("kv", (PAGE,), torch.uint8)
    large = memory.zeros("kv", (20 * PAGE,), torch.uint8)
    last = memory.zeros("kv", (PAGE,), torch.uint8)
    assert len(driver.reserved) == 2 and driver.num_pages == 22
    assert last.data_ptr() == small.data_ptr() + PAGE
    assert large.numel() == 20 * PAGE


def test_a_tag_goes_and_comes_back_at_its_addresses(driver, memory) -> None:
    weights = [memory.zeros("weights", (n,), torch.float32) for n in (10, 3000, 9000)]
    kv = memory.zeros("kv", (3000,), torch.float32).fill_(7)
    addresses = [tensor.data_ptr() for tensor in weights]
    before = memory.num_bytes("weights")
    assert memory.unmap("weights") == before == 13 * PAGE
    assert memory.num_bytes("weights") == 0 and driver.num_pages == 3
    assert memory.unmap("weights") == 0  # again: nothing is left
    assert kv.eq(7).all()
    with pytest.raises(InvariantError, match="while it is unmapped"):
        memory.zeros("weights", (1,), torch.float32)
    assert memory.map("weights") == before and memory.map("weights") == 0
    assert [tensor.data_ptr() for tensor in weights] == addresses
    assert all(is_junk(tensor) for tensor in weights)
    for value, tensor in enumerate(weights):
        tensor.fill_(value)
    assert all(tensor.eq(value).all() for value, tensor in enumerate(weights))
    assert kv.eq(7).all()


def test_memory_is_freed_when_its_last_tensor_is_gone(driver, memory) -> None:
    tensors = [memory.zeros("kv", (PAGE,), torch.uint8) for _ in range(3)]
    parameter = torch.nn.Parameter(tensors[1].view(torch.float32)[:8], requires_grad=False)
    del tensors
    gc.collect()
    assert driver.num_pages == 3
    del parameter
    gc.collect()
    assert driver.num_pages == 0 and not driver.reserved and memory.num_bytes("kv") == 0
    unmapped = memory.zeros("kv", (PAGE,), torch.uint8)
    memory.unmap("kv")
    del unmapped
    gc.collect()
    assert not driver.reserved


def test_a_full_device_is_an_error_that_leaves_things_as_they_were(driver, memory) -> None:
    weights = [memory.zeros("weights", (PAGE * n,), torch.uint8) for n in (30, 10)]
    with pytest.raises(DeviceError, match="full"):
        memory.zeros("kv", (30 * PAGE,), torch.uint8)
    memory.unmap("weights")
    kv = memory.zeros("kv", (30 * PAGE,), torch.uint8)
    with pytest.raises(DeviceError, match="full"):
        memory.map("weights")
    assert memory.num_bytes("weights") == 0
    del kv
    gc.collect()
    assert memory.map("weights") == 40 * PAGE
    assert all(is_junk(tensor) for tensor in weights)


def test_plain_memory_says_that_it_cannot() -> None:
    memory = host_memory()
    tensor = memory.zeros("weights", (4,), torch.float32).fill_(3)
    assert not memory.can_unmap and memory.reason
    assert memory.num_bytes("weights") == 16
    assert memory.unmap("weights") == memory.map("weights") == 0
    assert tensor.eq(3).all()
