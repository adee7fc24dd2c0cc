"""Each step runs on its own packet, wherever that lies, and a step on another's is an error."""

from typing import Any

import pytest

from dovetail.errors import InvariantError
from dovetail.exec import executor as executor_module
from dovetail.exec.device import CpuDevice, TransferBlock
from dovetail.exec.executor import Executor
from dovetail.exec.packet import NUMBER
from dovetail.exec.sim import SimDevice
from tests.support.harness import Harness, Output
from tests.support.packets import renumber_packet

PROMPTS = [[5], [9] * 20, list(range(3, 40)), [7, 8]]


def outputs(folder, **options: Any) -> list[Output]:
    harness = Harness(folder, max_running=3, chunk_size=16, capture=("experts",), **options)
    for prompt in PROMPTS:
        harness.add(prompt, max_new_tokens=9, temperature=0.0, capture=("experts",))
    found = list(harness.run().values())
    harness.close()
    return found


class Far:
    """A device that reads nothing of the host's memory: packets are copied to its own."""

    def address_of(self, host_block: object) -> None:
        return None


class FarCpu(Far, CpuDevice):
    pass


class FarSim(Far, SimDevice):
    pass


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("device", [FarCpu, lambda: FarSim(seed=3)], ids=["cpu", "sim"])
def test_packets_that_must_be_copied_give_the_same(depth, device, fx_moe_folder) -> None:
    near, far = (outputs(fx_moe_folder, depth=depth, device=d) for d in (CpuDevice(), device()))
    for ours, wanted in zip(far, near, strict=True):
        assert ours.token_ids == wanted.token_ids
        assert (ours.captured["experts"] == wanted.captured["experts"]).all()


def test_numbers_begin_again_and_nothing_changes(fx_moe_folder, monkeypatch) -> None:
    wanted = outputs(fx_moe_folder, depth=1)
    monkeypatch.setattr(executor_module, "_ROUNDS", 2)
    numbers = []
    stage = Executor._stage

    def note(self: Executor, *args: Any) -> TransferBlock:
        block = stage(self, *args)
        numbers.append((int(block.words[NUMBER]), block.index))
        return block

    monkeypatch.setattr(Executor, "_stage", note)
    ours = outputs(fx_moe_folder, depth=1)
    assert numbers[:8] == [(1, 0), (2, 1), (3, 2), (4, 0), (5, 1), (6, 2), (1, 0), (2, 1)]
    assert [o.token_ids for o in ours] == [o.token_ids for o in wanted]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_ran_on_another_packet_is_an_error(depth, fx_moe_folder, monkeypatch) -> None:
    """As if the host had written into a block that was still to be read."""
    renumber_packet(monkeypatch, 4, 7)
    with pytest.raises(InvariantError, match="the step of packet 4 ran on packet 7"):
        outputs(fx_moe_folder, depth=depth)
