"""What leaves each step is a copy that the step owns, whatever runs beside its transfer.

The routers write one fixed buffer, which the next forward writes over. A step that is asked to
packs its rows into its own block before that; without the packing, the copy lane reads the rows of
another step, and only at depth 0 does that not show.
"""

import dataclasses

import numpy as np
import pytest

from dovetail.exec.executor import Executor
from dovetail.exec.pending import PendingStep
from dovetail.exec.runner import StepRunner
from dovetail.exec.sim import SimDevice
from dovetail.sched.plan import StepPlan
from tests.explore.mutants import after
from tests.support.stamps import DIGIT, LAYERS, stepper_of
from tests.support.stepper import Stepper

SEEDS = range(12)


class SnapshotEveryStep:
    """An executor around another one: each step's rows leave with its result, and are checked."""

    def __init__(self, stepper: Stepper) -> None:
        self._executor = stepper.executor
        self._page_size = stepper.config.page_size
        self.num_forwards = 0
        self.num_checked = 0

    def submit(self, plan: StepPlan) -> PendingStep:
        plan = dataclasses.replace(plan, snapshot=("tokens", "experts"))
        self.num_forwards += len(plan.rows) > 0
        number, pending = self.num_forwards, self._executor.submit(plan)

        def collect():
            result = pending.result()
            self._check(plan, number, result.snapshot)
            return result

        return PendingStep(plan, collect, pending.readouts)

    def _check(self, plan: StepPlan, number: int, snapshot: dict[str, np.ndarray]) -> None:
        experts = snapshot["experts"].astype(int)
        assert experts.shape == (plan.num_tokens, len(LAYERS), 4)
        steps = experts[..., 0] * DIGIT + experts[..., 1] - DIGIT
        assert (steps == number).all(), f"rows of step {np.unique(steps)} left with step {number}"
        offsets = snapshot["kv_slots"] % self._page_size
        positions = experts[:, 0, 2] - 2 * DIGIT
        np.testing.assert_array_equal(offsets, positions % self._page_size)
        uploaded = snapshot["tokens"][plan.num_tokens - len(plan.token_ids) :]
        np.testing.assert_array_equal(uploaded, plan.token_ids)
        self.num_checked += plan.num_tokens

    def close(self) -> None:
        self._executor.close()


def run(seed: int, depth: int) -> SnapshotEveryStep:
    stepper = stepper_of(SimDevice(seed), depth=depth)
    watched = stepper.loop.executor = SnapshotEveryStep(stepper)
    for i in range(4):
        prompt = [(5 * i + j) % 29 + 3 for j in range(4 * i + 3)]
        stepper.add(prompt, capture=("experts",), max_new_tokens=9, temperature=0.0)
    stepper.run()
    return watched


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_each_step_takes_its_own_rows_away(depth):
    assert all(run(seed, depth).num_checked > 50 for seed in SEEDS)


def skip_the_snapshot(monkeypatch) -> None:
    """The copy lane fetches the routers' buffer itself."""
    waiting = {}

    def remember(self, batch, layout, payload):
        waiting[payload.ctypes.data] = self._rows, layout, len(batch.kv_slots_T)
        for column in ("tokens", "kv_slots"):
            rows = batch.token_ids_T if column == "tokens" else batch.kv_slots_T
            layout.snapshot[column].view(payload)[...] = rows.numpy()

    def fetch(block, begin):
        address = block.device.numpy().ctypes.data
        if address in waiting and waiting[address][1].readout_bytes == begin:
            rows, layout, num_tokens = waiting.pop(address)
            out = layout.snapshot["experts"].view(block.host.numpy())
            out[...] = rows.buffers["experts"].numpy()[:num_tokens]

    def fetch_too(_, self, block, begin, end):
        self._device.copy.submit(fetch, block, begin)

    monkeypatch.setattr(StepRunner, "_pack_snapshot", remember)
    after(monkeypatch, Executor, "_download", fetch_too)


def test_without_the_snapshot_a_step_leaves_with_the_rows_of_another(monkeypatch):
    skip_the_snapshot(monkeypatch)
    caught = 0
    for seed in SEEDS:
        try:
            run(seed, depth=1)
        except AssertionError as error:
            assert "left with step" in str(error)
            caught += 1
    assert caught > len(SEEDS) // 3
    for seed in SEEDS:  # nothing is in flight, so there is nobody to write over it
        run(seed, depth=0)


def test_a_buffer_that_the_copy_lane_reads_is_refused():
    """The fixed buffer is engine state: work of the copy lane that names it does not start."""
    device = SimDevice(0)
    stepper = stepper_of(device)
    buffer = stepper.executor._runner._rows.buffers["experts"]
    with pytest.raises(Exception, match="lane copy touches engine state"):
        device.copy.submit(lambda: None, reads=(buffer,))
