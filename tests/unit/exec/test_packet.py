"""Whatever plan is written into a packet is what the device reads, field by field."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dovetail.errors import InvariantError
from dovetail.exec.packet import NUM_WORDS, PacketWriter, packet_schema, read_packet
from dovetail.exec.readback import COPY_COLUMNS, payload_layout
from dovetail.sched.plan import (
    FROM_DEVICE,
    MAX_BIASES,
    PAGE_COLUMNS,
    PageWrites,
    Readout,
    Rows,
    SlotWrites,
    StepPlan,
    TokenWrites,
)
from tests.support.scripted import plain_config

CONFIG = plain_config(context_len=32, page_size=4, chunk_size=8, max_running=4)
SCHEMA = packet_schema(CONFIG)
MAX_PAGES = CONFIG.max_page_writes
ROW_FIELDS = Rows.__dataclass_fields__
SLOT_FIELDS = SlotWrites.__dataclass_fields__
TOKEN_FIELDS = TokenWrites.__dataclass_fields__
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
SLOT_DTYPES = dict.fromkeys(FLOATS, "f4") | {"seed": "u8"}
TOKEN_DTYPES = {"value": "f4"}
MAX_TOKEN_WRITES = 2 * MAX_BIASES


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Any plan within the limits: the sizes are drawn, and the words are any bits."""
    num_rows = draw(st.integers(0, CONFIG.max_running))
    num_pages = draw(st.integers(0, MAX_PAGES))
    num_slots = draw(st.integers(0, CONFIG.max_running))
    num_tokens = draw(st.integers(0, CONFIG.max_step_tokens))
    num_token_writes = draw(st.sampled_from([0, 1, 5, MAX_TOKEN_WRITES]))
    num_targets = draw(st.integers(0, CONFIG.max_step_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def bits(num: int, dtype: str = "i4") -> np.ndarray:
        return np.frombuffer(rng.bytes(num * np.dtype(dtype).itemsize), dtype=dtype).copy()

    rows = {name: bits(num_rows) for name in ROW_FIELDS}
    rows["width"] = rng.integers(1, 4 if num_tokens else 2, num_rows, dtype=np.int32)
    return StepPlan(
        step_id=0,
        epoch=0,
        rows=Rows(**rows),
        token_ids=bits(num_tokens),
        page_writes=PageWrites(bits(len(PAGE_COLUMNS) * num_pages).reshape(len(PAGE_COLUMNS), -1)),
        slot_writes=SlotWrites(
            **{name: bits(num_slots, SLOT_DTYPES.get(name, "i4")) for name in SLOT_FIELDS}
        ),
        token_writes=TokenWrites(
            **{name: bits(num_token_writes, TOKEN_DTYPES.get(name, "i4")) for name in TOKEN_FIELDS}
        ),
        targets=bits(num_targets),
    )


def token_zeros(num: int = 0) -> TokenWrites:
    """As many writes of zeros."""
    return TokenWrites(
        **{name: np.zeros(num, dtype=TOKEN_DTYPES.get(name, "i4")) for name in TOKEN_FIELDS}
    )


def page_zeros(num: int = 0) -> PageWrites:
    """As many writes of zeros."""
    return PageWrites(np.zeros((len(PAGE_COLUMNS), num), dtype=np.int32))


def decode_plan(num_rows: int = 3) -> StepPlan:
    """A steady step: decode rows, and nothing new."""
    rows = {name: np.ones(num_rows, dtype=np.int32) for name in ROW_FIELDS}
    rows |= {"slot": np.arange(num_rows, dtype=np.int32)}
    rows |= {"start": np.full(num_rows, FROM_DEVICE, dtype=np.int32)}
    empty = {name: np.zeros(0, dtype=SLOT_DTYPES.get(name, "i4")) for name in SLOT_FIELDS}
    return StepPlan(
        step_id=0,
        epoch=0,
        rows=Rows(**rows),
        token_ids=np.zeros(0, dtype=np.int32),
        page_writes=page_zeros(),
        slot_writes=SlotWrites(**empty),
        token_writes=token_zeros(),
    )


def block() -> np.ndarray:
    """Fresh host memory: junk, as a ring hands it out."""
    return np.full(SCHEMA.num_bytes // 4, -0x5A5A5A5B, dtype=np.int32)


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return got.tobytes() == want.tobytes()  # NaN too


@given(st.lists(plans(), min_size=1, max_size=4))
def test_a_plan_is_read_as_it_was_written(written):
    writer, known = PacketWriter(SCHEMA), {}
    for result, plan in enumerate(plan for plan in written for _ in range(2)):
        words = block()
        num_words = writer.write(plan, words, number=result + 7, result=result)
        assert words[NUM_WORDS] == num_words
        words[num_words:] = 0x0BADBEEF  # where nobody looks
        packet = read_packet(SCHEMA, words)
        assert (packet.num_rows, packet.num_tokens) == (len(plan.rows), plan.num_tokens)
        assert (packet.result, packet.number) == (result, result + 7)
        assert same_bits(packet.fields["token_ids"], plan.token_ids)
        for name in PAGE_COLUMNS:
            assert same_bits(packet.fields[f"pages.{name}"], plan.page_writes.column(name))
        for name in SLOT_FIELDS:
            field = "seeds" if name == "seed" else f"slots.{name}"
            assert same_bits(packet.fields[field], getattr(plan.slot_writes, name))
        for name in TOKEN_FIELDS:
            assert same_bits(packet.fields[f"tokens.{name}"], getattr(plan.token_writes, name))
        assert same_bits(packet.fields["targets"], plan.targets)
        for name in ROW_FIELDS:
            if len(packet.fields[f"rows.{name}"]):
                known[name] = packet.fields[f"rows.{name}"]
            if len(plan.rows):
                assert same_bits(known[name], getattr(plan.rows, name))


@given(plans())
def test_nothing_is_left_of_the_packet_that_was_in_the_block_before(plan):
    writer, words = PacketWriter(SCHEMA), block()
    writer.write(plan, words, number=1, result=1)
    writer.write(decode_plan(), words, number=1, result=0)
    left = {n: len(f) for n, f in read_packet(SCHEMA, words).fields.items() if len(f)}
    assert left == {f"rows.{name}": 3 for name in ROW_FIELDS}


def test_what_is_read_out_is_read_as_it_was_written():
    readouts = (
        Readout(2, 9, 3, 17, ("tokens",)),
        Readout(0, 1, 0, 8, ("tokens",)),
        Readout(3, 4, 5, 5, ("tokens",)),
    )
    plan, words = dataclasses.replace(decode_plan(), readouts=readouts), block()
    layout = payload_layout(plan, CONFIG.columns)
    PacketWriter(SCHEMA).write(plan, words, number=1, result=0, copies=layout.copies)
    fields = read_packet(SCHEMA, words).fields
    assert {name: fields[f"copies.{name}"].tolist() for name in COPY_COLUMNS} == {
        "column": [0, 0, 0],
        "slot": [2, 0, 3],
        "start": [3, 0, 5],
        "count": [14, 8, 0],
        "first": [0, 14, 22],
    }


@given(plans())
def test_tables_are_aligned_and_columns_do_not_overlap(plan):
    words = block()
    num_words = PacketWriter(SCHEMA).write(plan, words, number=1, result=0)
    base = words.__array_interface__["data"][0]
    spans = []
    for field in read_packet(SCHEMA, words).fields.values():
        if len(field):
            start = field.__array_interface__["data"][0] - base
            spans.append((start, start + field.nbytes))
    assert all(words[head] % 4 == 0 for head in SCHEMA.heads.values())  # 16 bytes
    spans.sort()
    ends = [SCHEMA.header_words * 4, *(end for _, end in spans)]
    assert all(end <= start for end, (start, _) in zip(ends, spans, strict=False))
    assert ends[-1] <= 4 * num_words <= SCHEMA.num_bytes


def sent_columns(writer: PacketWriter, plan: StepPlan) -> set[str]:
    """Write a plan, and return which columns of its rows are in the packet."""
    words = block()
    writer.write(plan, words, number=1, result=0)
    fields = read_packet(SCHEMA, words).fields
    return {name for name in ROW_FIELDS if len(fields[f"rows.{name}"])}


def test_a_steady_decode_step_sends_its_header_alone():
    writer, plan, words = PacketWriter(SCHEMA), decode_plan(), block()
    assert writer.write(plan, block(), number=1, result=0) > SCHEMA.header_words
    assert writer.write(plan, words, number=1, result=0) == SCHEMA.header_words
    packet = read_packet(SCHEMA, words)
    assert packet.num_rows == packet.num_tokens == 3
    assert not any(len(field) for field in packet.fields.values())


def test_rows_that_got_pages_send_those_alone():
    writer, plan, words = PacketWriter(SCHEMA), decode_plan(), block()
    assert sent_columns(writer, plan) == set(ROW_FIELDS)
    pages = PageWrites(np.arange(len(PAGE_COLUMNS) * 2, dtype=np.int32).reshape(-1, 2))
    writer.write(dataclasses.replace(plan, page_writes=pages), words, number=1, result=0)
    sent = {name for name, field in read_packet(SCHEMA, words).fields.items() if len(field)}
    assert sent == {f"pages.{name}" for name in PAGE_COLUMNS}


def test_read_outs_alone_leave_the_rows_that_the_device_has():
    writer, plan = PacketWriter(SCHEMA), decode_plan()
    assert sent_columns(writer, plan) == set(ROW_FIELDS)
    assert sent_columns(writer, decode_plan(0)) == set()
    assert sent_columns(writer, plan) == set()


def test_other_rows_are_sent_and_so_are_those_that_come_back():
    writer, plan = PacketWriter(SCHEMA), decode_plan(3)
    for each in (plan, decode_plan(2), plan):
        assert sent_columns(writer, each) == set(ROW_FIELDS)


@pytest.mark.parametrize(
    ("field", "too_many"),
    [
        ("rows", CONFIG.max_running + 1),
        ("token_ids", CONFIG.max_step_tokens + 1),
        ("page_writes", MAX_PAGES + 1),
        ("slot_writes", CONFIG.max_running + 1),
        ("token_writes", MAX_TOKEN_WRITES + 1),
        ("targets", CONFIG.max_step_tokens + 1),
    ],
)
def test_a_plan_that_is_too_large_is_our_own_fault(field, too_many):
    parts = {
        "rows": Rows(**{n: np.ones(too_many, dtype=np.int32) for n in ROW_FIELDS}),
        "token_ids": np.zeros(too_many, dtype=np.int32),
        "page_writes": page_zeros(too_many),
        "slot_writes": SlotWrites(
            **{n: np.zeros(too_many, dtype=SLOT_DTYPES.get(n, "i4")) for n in SLOT_FIELDS}
        ),
        "token_writes": token_zeros(too_many),
        "targets": np.zeros(too_many, dtype=np.int32),
    }
    steady = decode_plan(1)
    kept = {name: getattr(steady, name) for name in parts if name != field}
    plan = StepPlan(step_id=0, epoch=0, **kept, **{field: parts[field]})
    with pytest.raises(InvariantError, match=f"has {too_many}|has {2 * too_many}"):
        PacketWriter(SCHEMA).write(plan, block(), number=1, result=0)


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": np.zeros(3, dtype=np.int64)},
        {"samples": np.ones(1, dtype=np.int32)},
        {name: np.zeros(3, dtype=np.int64) for name in ROW_FIELDS},
    ],
    ids=["a wide column", "a short column", "all wide"],
)
def test_rows_that_would_shift_others_are_our_own_fault(changed):
    plan = decode_plan(3)
    plan = dataclasses.replace(plan, rows=dataclasses.replace(plan.rows, **changed))
    with pytest.raises(InvariantError, match=r"words of rows are not 5 x 3"):
        PacketWriter(SCHEMA).write(plan, block(), number=1, result=0)


def test_plans_are_frozen():
    plan = decode_plan()
    arrays = (
        plan.rows.slot,
        plan.token_ids,
        plan.page_writes.columns,
        plan.slot_writes.seed,
        plan.token_writes.value,
        plan.targets,
    )
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
