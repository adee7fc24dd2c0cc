"""One launch copies the rows of all read-outs, one those of a snapshot: bit for bit torch's own.

The other way is what it replaces: cache slots worked out by arithmetic on a page table, and an
``index_select`` for each.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.capture.sidecar import Sidecar
from dovetail.config.capture import ColumnSpec
from dovetail.exec.cuda.rows import RowCopies
from dovetail.exec.packet import PacketWriter, packet_schema
from dovetail.exec.readback import PayloadLayout, payload_layout
from dovetail.sched.plan import Readout
from tests.support.gpu import DEVICE, ON_GPU_TOO
from tests.unit.exec.test_packet import decode_plan

pytestmark = ON_GPU_TOO

NUM_SLOTS, NUM_PAGES = 5, 40
TOKENS = ColumnSpec(np.dtype(np.int32), (), -1)


def spec(dtype: str, *shape: int) -> ColumnSpec:
    return ColumnSpec(np.dtype(dtype), shape, float("nan") if "float" in dtype else 255)


COLUMNS = {
    "bytes": {"tokens": TOKENS, "experts": spec("uint8", 48, 8)},
    "odd bytes": {"tokens": TOKENS, "experts": spec("uint8", 3, 1)},
    "dense layers left out": {"tokens": TOKENS, "experts": spec("uint8", 26, 6)},
    "words": {"tokens": TOKENS, "experts": spec("uint16", 5, 2)},
    "odd words": {"tokens": TOKENS, "experts": spec("uint16", 3, 3)},
    "ints": {"tokens": TOKENS, "experts": spec("int32", 40, 8)},
    "weights": {
        "tokens": TOKENS,
        "experts": spec("uint8", 7, 3),
        "expert_weights": spec("float32", 7, 3),
    },
}


class Memory:
    """Sidecars full of noise, and page tables that lead through it in any order."""

    def __init__(self, columns: Mapping[str, ColumnSpec], page_size: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.page_size = page_size
        self.columns = dict(columns)
        # The packet has room for these columns, whatever the model's are.
        self.schema = packet_schema(
            SimpleNamespace(
                max_running=NUM_SLOTS,
                max_page_writes=13,
                max_step_tokens=64,
                columns=self.columns,
            )  # type: ignore[arg-type]
        )
        self.sidecars: dict[str, Sidecar] = {}
        for name, column in columns.items():
            num_bytes = (NUM_PAGES * page_size + 1) * column.row_bytes
            noise = torch.from_numpy(rng.integers(0, 256, num_bytes, dtype=np.uint8))
            rows = torch.empty(
                NUM_PAGES * page_size + 1,
                *column.shape,
                dtype=torch.from_numpy(np.empty(0, dtype=column.dtype)).dtype,
                device=DEVICE,
            )
            self.sidecars[name] = Sidecar(column, rows)
            rows.view(-1).view(torch.uint8).copy_(noise)
        pages = rng.permutation(NUM_PAGES).reshape(NUM_SLOTS, -1).astype(np.int32)
        self.page_table_SB = torch.from_numpy(pages).to(DEVICE)
        self.packet = torch.zeros(self.schema.num_bytes // 4, dtype=torch.int32, device=DEVICE)
        self.copies = RowCopies(self.packet, self.schema, self, self.sidecars, page_size=page_size)  # type: ignore[arg-type]

    def slots_of(self, readout: Readout) -> Tensor:
        positions = torch.arange(readout.start, readout.end, device=DEVICE)
        pages = self.page_table_SB[readout.slot].long()[positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def bits_at(self, name: str, slots: Tensor) -> np.ndarray:
        rows = self.sidecars[name].rows
        return rows.view(len(rows), -1).view(torch.uint8).index_select(0, slots).cpu().numpy()


def read_out(memory: Memory, readouts: tuple[Readout, ...]) -> tuple[PayloadLayout, np.ndarray]:
    """Return the layout and the payload block of a plan with these read-outs."""
    plan = replace(decode_plan(), readouts=readouts)
    layout = payload_layout(plan, memory.columns)
    words = np.zeros(memory.schema.num_bytes // 4, dtype=np.int32)
    PacketWriter(memory.schema).write(plan, words, number=1, result=0, copies=layout.copies)
    memory.packet.copy_(torch.from_numpy(words))
    payload = torch.full((-(-layout.num_bytes // 16) * 16 + 64,), 0xA5, dtype=torch.uint8).to(
        DEVICE
    )
    memory.copies.read_out(layout, payload)
    return layout, payload.cpu().numpy()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_read_outs_are_those_of_torch(columns, page_size):
    memory = Memory(columns, page_size, seed=page_size)
    rng = np.random.default_rng(1)
    longest = NUM_PAGES // NUM_SLOTS * page_size
    everything, few = tuple(columns), tuple(columns)[1:]
    readouts = []
    for slot in (3, 0, 4):
        start, end = sorted(rng.integers(0, longest + 1, 2).tolist())
        readouts.append(Readout(slot, 1, start, end, few if slot % 2 else everything))
    readouts += [Readout(2, 1, 0, longest, everything), Readout(1, 1, 3, 3, everything)]
    layout, block = read_out(memory, tuple(readouts))
    assert block[layout.num_bytes :].tolist() == [0xA5] * (len(block) - layout.num_bytes)
    at = dict.fromkeys(columns, 0)
    for readout in readouts:
        for name in readout.columns:
            count, row_bytes = readout.end - readout.start, columns[name].row_bytes
            want = memory.bits_at(name, memory.slots_of(readout))
            begin = layout.readouts[name].offset + at[name] * row_bytes
            got = block[begin : begin + count * row_bytes].reshape(count, row_bytes)
            np.testing.assert_array_equal(got, want)
            at[name] += count


@pytest.mark.parametrize("num_tokens", [1, 7, 64])
@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_a_snapshot_is_that_of_torch(columns, num_tokens):
    memory = Memory(columns, 4, seed=num_tokens)
    num_slots = NUM_PAGES * memory.page_size
    kv_slots_T = torch.from_numpy(np.random.default_rng(2).integers(0, num_slots, num_tokens))
    kv_slots_T = kv_slots_T.to(DEVICE)
    for asked in (tuple(columns), tuple(columns)[1:], tuple(columns)[:1]):
        plan = replace(decode_plan(num_tokens), snapshot=asked)
        layout = payload_layout(plan, memory.columns)
        payload = torch.full((layout.num_bytes + 64,), 0xA5, dtype=torch.uint8).to(DEVICE)
        memory.copies.snapshot(kv_slots_T, layout.snapshot, payload)
        block = payload.cpu().numpy()
        assert (block[layout.num_bytes :] == 0xA5).all()
        np.testing.assert_array_equal(
            layout.snapshot["kv_slots"].view(block), kv_slots_T.cpu().numpy()
        )
        for name in asked:
            item = layout.snapshot[name]
            got = block[item.offset : item.offset + item.num_bytes].reshape(num_tokens, -1)
            np.testing.assert_array_equal(got, memory.bits_at(name, kv_slots_T))


def test_a_long_read_out_is_shared_by_programs():
    """More units than all programs of a copy take in one turn."""
    memory = Memory(COLUMNS["ints"], 64, seed=5)
    longest = NUM_PAGES // NUM_SLOTS * 64
    readout = Readout(1, 1, 5, longest, ("experts",))
    layout, block = read_out(memory, (readout,))
    got = block[: layout.num_bytes].reshape(longest - 5, -1)
    np.testing.assert_array_equal(got, memory.bits_at("experts", memory.slots_of(readout)))
