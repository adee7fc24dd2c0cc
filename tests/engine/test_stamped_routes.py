"""FX-STAMP for experts: a row tells in which forward, for which position and layer it was written.

An expert row holds its step, its position and its layer, and a token's logprob holds the step that
drew it. So a row must carry the stamp of the very forward that sampled the token after it: a row
that was computed again and written over, is a stranger's, is shifted, or was never written shows.
Each rule is switched off once, and that must be noticed.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch

from dovetail.cache.ledger import KVLedger
from dovetail.capture.rows import StepRows
from dovetail.capture.sidecar import Sidecar
from dovetail.config.payload import sample_score_bytes
from dovetail.exec import runner
from dovetail.exec.device import CpuDevice, Device
from dovetail.exec.kv import KVStore
from dovetail.exec.runner import StepRunner
from dovetail.exec.sim import SimDevice
from dovetail.sched import captured as captured_module
from dovetail.sched.captured import CapturedColumns
from dovetail.sched.plan import PAGE_COLUMNS, PageWrites, Rows, SlotWrites, StepPlan, TokenWrites
from dovetail.sched.scheduler import Scheduler
from dovetail.wire.request import CaptureParams
from tests.support.stamps import DIGIT, LAYERS, MAX_POSITION, stamp_of, stepper_of
from tests.support.stepper import Output, Stepper

PAD_TO = 8
SEVEN_ROWS = sample_score_bytes(5) + 16 + 7 * len(LAYERS) * 4
"""A payload with room for seven rows."""
PLAIN = {"ignore_eos": True, "temperature": 0.0}
EACH_DEVICE = pytest.mark.parametrize(
    "device", [CpuDevice, lambda: SimDevice(0)], ids=["cpu", "sim"]
)


def check_rows(output: Output, prompt_len: int, *, start: int = 0) -> None:
    """Each row is of its position and layer, and of the forward that drew the token after it."""
    assert output.finish is not None and output.finish.type in ("length", "abort"), output.finish
    rows = output.captured["experts"].astype(int)
    if output.token_ids:
        assert len(rows) == max(prompt_len + len(output.token_ids) - 1 - start, 0)
    positions = np.arange(start, start + len(rows))
    np.testing.assert_array_equal(
        rows[..., 2], np.repeat(2 * DIGIT + positions[:, None], len(LAYERS), axis=1)
    )
    np.testing.assert_array_equal(
        rows[..., 3], np.repeat([[3 * DIGIT + layer for layer in range(3)]], len(rows), axis=0)
    )
    steps = rows[..., 0] * DIGIT + rows[..., 1] - DIGIT
    assert (steps == steps[:, :1]).all(), "layers of different forwards"
    for index, logprob in enumerate(output.logprobs):
        position = prompt_len + index - 1
        if position >= start:
            assert steps[position - start, 0] == stamp_of(logprob), f"position {position}"


def run_traffic(
    stepper: Stepper, *, retract_every: int = 0, abort: bool = True, interval: int = 0
) -> list[tuple[Output, int, int]]:
    """Requests with retractions and aborts; returns (output, prompt length, start)."""
    rng = np.random.default_rng(3)
    asked = []
    for i in range(10):
        prompt = rng.integers(3, 30, rng.integers(2, 24)).tolist()
        if i % 3 == 2:
            prompt = asked[0][0][:9] + prompt[:14]
        start = int(rng.integers(len(prompt))) if i % 4 == 3 else 0
        request_id = stepper.add(
            prompt,
            capture=CaptureParams(columns=("experts",), start_len=start, interval=interval),
            max_new_tokens=14 + i,
            n=1 + i % 2,
            **PLAIN,
        )
        asked.append((prompt, start, request_id))

    def interfere(step: int) -> None:
        if retract_every and step % retract_every == 0 and step < 90:
            stepper.scheduler.retract_last()
        if abort and step in (9, 30):
            stepper.abort(step // 9)

    stepper.on_step = interfere
    stepper.run()
    return [
        (output, len(prompt), start)
        for prompt, start, request_id in asked
        for output in stepper.samples[request_id]
    ]


def check_traffic(stepper: Stepper, **options) -> Counter[str]:
    seen: Counter[str] = Counter()
    for output, prompt_len, start in run_traffic(stepper, **options):
        check_rows(output, prompt_len, start=start)
        seen["retractions"] += output.usage.num_retractions
        seen["cached"] += output.usage.cached_tokens
        seen["events"] += output.num_events
        for span in output.spans["experts"]:
            seen["recomputed"] += span.num_recomputed > 0
            seen["differing"] += span.num_differing
    return seen


@pytest.mark.parametrize("interval", [0, 1, 5])
@pytest.mark.parametrize("retract_every", [0, 3, 7])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_each_row_is_of_the_forward_that_drew_the_next_token(depth, retract_every, interval):
    stepper = stepper_of(depth=depth)
    seen = check_traffic(stepper, retract_every=retract_every, interval=interval)
    assert (seen["retractions"] > 4) == (seen["recomputed"] > 0) == (retract_every > 0)
    assert seen["cached"] > 0


@pytest.mark.parametrize("num_experts", [255, 256, 300])
def test_bytes_and_words(num_experts):
    stepper = stepper_of(num_experts=num_experts)
    check_traffic(stepper, retract_every=5)
    rows = stepper.outputs[0].captured["experts"]
    assert rows.dtype == (np.uint8 if num_experts == 255 else np.uint16)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_in_any_order_of_device_work(depth, seed):
    check_traffic(stepper_of(SimDevice(seed), depth=depth), retract_every=4, interval=seed % 3)


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_that_do_not_fit_the_payload_leave_in_pieces(depth):
    """A read-out takes what room there is: a bystander never waits for all of it."""
    whole = stepper_of(depth=depth)
    pieces = stepper_of(depth=depth, max_payload_bytes=SEVEN_ROWS)
    num_readouts = Counter()
    for name, stepper in (("whole", whole), ("pieces", pieces)):
        submit = stepper.loop.executor.submit

        def count(plan, name=name, submit=submit):
            for readout in plan.readouts:
                num_readouts[name] += 1
                assert name == "whole" or readout.end - readout.start <= 7
            return submit(plan)

        stepper.loop.executor.submit = count
        check_traffic(stepper, retract_every=7)
    assert num_readouts["pieces"] > 3 * num_readouts["whole"] > 30


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_spans_count_the_rows_that_a_retraction_changed(depth):
    """Without a prefix cache every row of a stamp model differs when it is computed again."""
    stepper = stepper_of(depth=depth, prefix_cache=False)
    seen = Counter()
    for output, _, _ in run_traffic(stepper, retract_every=5, abort=False):
        rows = output.captured["experts"]
        spans = output.spans["experts"]
        assert [s.start for s in spans[1:]] == [s.end for s in spans[:-1]]
        assert sum(s.end - s.start for s in spans) == len(rows)
        for span in spans:
            again = span.end - span.start if span.num_recomputed else 0
            assert span.num_differing == again, span
            seen[min(span.num_recomputed, 3)] += 1
        assert spans[-1].num_recomputed == 0, "the last tokens were sampled after the retraction"
    assert seen[0] and seen[1] and seen[2]


def test_a_prefix_that_comes_back_from_the_cache_differs_in_nothing():
    stepper = stepper_of(depth=1)
    [output] = [o for o, _, _ in run_traffic(stepper, retract_every=0, abort=False)][:1]
    assert {span.num_recomputed for span in output.spans["experts"]} == {0}


# -- rules switched off --------------------------------------------------------------------------


def padded(slot_of_padding):
    """``unpack`` of a device whose forwards have a multiple of 8 tokens, as graphs have."""
    original = runner.unpack

    def unpack(packet, state, inputs, *, page_size):
        batch = original(packet, state, inputs, page_size=page_size)
        missing = -len(batch.kv_slots_T) % PAD_TO
        if not missing or not len(batch.kv_slots_T):
            return batch
        slots = torch.full((missing,), slot_of_padding, dtype=torch.int64)
        tail = torch.full((missing,), MAX_POSITION - 1, dtype=torch.int64)
        return type(batch)(
            **{name: getattr(batch, name) for name in batch.__slots__}
            | {
                "kv_slots_T": torch.cat([batch.kv_slots_T, slots]),
                "positions_T": torch.cat([batch.positions_T, tail]),
                "token_ids_T": torch.cat([batch.token_ids_T, tail]),
            }
        )

    return unpack


SINK = 4 * 48


def test_padding_goes_to_the_sink(monkeypatch):
    monkeypatch.setattr(runner, "unpack", padded(SINK))
    check_traffic(stepper_of(depth=1), retract_every=5)


def overwrite_committed_rows(monkeypatch) -> None:
    """A read-out after a retraction replaces what was recorded."""

    def append(self, start, rows, *, end):
        for name, values in rows.items():
            begin, stop = start - self.start, min(start + len(values), end) - self.start
            held = self._rows[name]
            parts = [held[:begin], values[: max(stop - begin, 0)], held[stop:]]
            self._rows[name] = np.concatenate(parts)
        self.recorded = max(self.recorded, stop + self.start)
        self._note_epoch(self.recorded, 0)

    monkeypatch.setattr(CapturedColumns, "append", append)


def write_padding_to_a_page(monkeypatch) -> None:
    """Padded rows are written where real ones are."""
    monkeypatch.setattr(runner, "unpack", padded(0))


def shift_layers(monkeypatch) -> None:
    """One layer's rows are stored as those of the next."""
    original = StepRows.record

    def record(self, moe_layer, ids_TK, weights_TK):
        original(self, (moe_layer + 1) % len(LAYERS), ids_TK, weights_TK)

    monkeypatch.setattr(StepRows, "record", record)


def release_before_the_gather(monkeypatch) -> None:
    """Pages are given up when the end is decided, and read after that."""
    original, release = Scheduler._decide_finish, KVLedger.release
    publish = KVLedger.publish

    def decide(self, sequence, reason):
        holding = sequence.holding
        events = original(self, sequence, reason)
        if holding is not None and sequence.needs_readout:
            release(self._ledger, holding)
        return events

    def release_once(self, holding):
        if holding.tables:
            release(self, holding)

    def publish_held(self, holding, *args):
        if holding.tables:
            publish(self, holding, *args)

    monkeypatch.setattr(Scheduler, "_decide_finish", decide)
    monkeypatch.setattr(KVLedger, "release", release_once)
    monkeypatch.setattr(KVLedger, "publish", publish_held)


def read_rows_of_the_forward_before(monkeypatch) -> None:
    """The fixed buffer is stored before the forward has written it."""
    original = StepRunner.run_packet

    def run(self, packet, layout, result, payload):
        kept = {name: buffer.clone() for name, buffer in self._rows.buffers.items()}
        keep = self._keep_rows

        def keep_old(batch):
            self._rows.buffers, new = kept, self._rows.buffers
            keep(batch)
            self._rows.buffers = new

        self._keep_rows = keep_old
        original(self, packet, layout, result, payload)
        self._keep_rows = keep

    monkeypatch.setattr(StepRunner, "run_packet", run)


@pytest.mark.parametrize(
    "mutate",
    [
        overwrite_committed_rows,
        write_padding_to_a_page,
        shift_layers,
        release_before_the_gather,
        read_rows_of_the_forward_before,
    ],
    ids=lambda mutate: mutate.__name__,
)
@EACH_DEVICE
def test_a_rule_that_is_switched_off_is_noticed(device, mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        for retract_every in (3, 7):
            # Read-outs in pieces, so that steps come in between.
            stepper = stepper_of(device(), depth=1, num_pages=24, max_payload_bytes=SEVEN_ROWS)
            check_traffic(stepper, retract_every=retract_every)


@EACH_DEVICE
def test_the_rules_hold_where_they_are_switched_off(device):
    """The control: the same traffic, pool and payload, with every rule on."""
    for retract_every in (3, 7):
        stepper = stepper_of(device(), depth=1, num_pages=24, max_payload_bytes=SEVEN_ROWS)
        check_traffic(stepper, retract_every=retract_every)


# -- rows that nobody wrote ----------------------------------------------------------------------


def lose_rows(monkeypatch) -> None:
    """A fault: now and then the rows of a forward do not get to their slots."""
    original, count = Sidecar.write, Counter()

    def write(self, slots_T, rows_T):
        count["steps"] += self.spec.shape != ()
        if count["steps"] % 9 != 8:
            original(self, slots_T, rows_T)

    monkeypatch.setattr(Sidecar, "write", write)


def skip_a_layer(monkeypatch) -> None:
    """A fault: now and then a router does not record."""
    original, count = StepRows.record, Counter()

    def record(self, moe_layer, ids_TK, weights_TK):
        count["layers"] += 1
        if count["layers"] % 25 != 24:
            original(self, moe_layer, ids_TK, weights_TK)

    monkeypatch.setattr(StepRows, "record", record)


def check_faulty_traffic(device: Device | None = None) -> int:
    """A request with a missing row ends with an error, has no rows, and hurts nobody else."""
    stepper = stepper_of(device, depth=1, num_pages=24)
    num_failed = 0
    for output, prompt_len, start in run_traffic(stepper, retract_every=7):
        if output.finish.type == "error":
            assert "column experts has no row for position" in output.finish.message
            assert not output.captured
            num_failed += 1
        else:
            check_rows(output, prompt_len, start=start)
    output = stepper.outputs[stepper.add([3, 4], max_new_tokens=3, **PLAIN)]
    stepper.run()
    assert output.finish.type == "length"
    return num_failed


@pytest.mark.parametrize("fault", [lose_rows, skip_a_layer])
@EACH_DEVICE
def test_a_missing_row_is_an_error_of_its_request_alone(device, fault, monkeypatch):
    fault(monkeypatch)
    assert check_faulty_traffic(device()) > 3


def serve_poison_as_zero(monkeypatch) -> None:
    def zeroed(name, rows, spec, start):
        rows.setflags(write=True)
        rows[rows == spec.poison] = 0

    monkeypatch.setattr(captured_module, "_expect_written", zeroed)


def do_not_poison_pages(monkeypatch) -> None:
    monkeypatch.setattr(KVStore, "poison", lambda self, pages: None)


def do_not_poison_the_buffer(monkeypatch) -> None:
    monkeypatch.setattr(StepRows, "begin", lambda self, num_tokens: None)


@pytest.mark.parametrize(
    ("fault", "mutate"),
    [
        (lose_rows, serve_poison_as_zero),
        (skip_a_layer, serve_poison_as_zero),
        (lose_rows, do_not_poison_pages),
        (skip_a_layer, do_not_poison_the_buffer),
    ],
)
@EACH_DEVICE
def test_poison_that_is_switched_off_is_noticed(device, fault, mutate, monkeypatch):
    fault(monkeypatch)
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_faulty_traffic(device())


@EACH_DEVICE
def test_pages_are_poisoned_in_a_step_without_rows(device):
    """As when a newcomer's pages are told beside read-outs that leave no room for its rows."""
    stepper = stepper_of(device())
    executor, sidecar = stepper.executor, stepper.executor._runner._kv.sidecars["experts"]
    sidecar.rows.fill_(7)
    none = {"token_ids": np.zeros(0, "i4")}
    for name, table in (("rows", Rows), ("slot_writes", SlotWrites), ("token_writes", TokenWrites)):
        dtypes = {"seed": "i8", "value": "f4"}
        none[name] = table(
            **{f.name: np.zeros(0, dtypes.get(f.name, "i4")) for f in dataclasses.fields(table)}
        )
    page = {"group": 0, "slot": 0, "index": 0, "page": 3, "is_fresh": 1}
    writes = PageWrites(np.array([[page[name]] for name in PAGE_COLUMNS], "i4"))
    executor.submit(StepPlan(step_id=0, epoch=0, page_writes=writes, **none)).result()
    is_poison = (sidecar.rows == sidecar.spec.poison).flatten(1).all(1).tolist()
    assert is_poison == [12 <= slot < 16 for slot in range(len(is_poison))]
    executor.close()
