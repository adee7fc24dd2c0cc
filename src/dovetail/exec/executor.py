"""Runs plans on a device: stage, run, copy out.

Owns the lanes and the transfer rings. ``submit`` queues a step and returns; nothing in
it waits for a forward. A step's data crosses to the device in one packet, which the compute
lane takes, and comes back on the copy lane in one result block, with one payload block beside
it if the plan asks for more than tokens. Must not know what a device's memory looks
like: that is the business of its ``Runner``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from dovetail.config.schema import EngineConfig
from dovetail.errors import InvariantError
from dovetail.exec.blocks import StepBlocks, num_step_blocks, payload_bytes
from dovetail.exec.device import Device, Event, TransferBlock, upload
from dovetail.exec.packet import PacketWriter, packet_schema
from dovetail.exec.pending import PendingStep
from dovetail.exec.readback import Bytes, PayloadLayout, payload_layout, read_result, read_rows
from dovetail.exec.ring import BlockRing, paired_blocks
from dovetail.sched.plan import ReadRows, StepPlan, StepResult

_ROUNDS = 2**20
"""Of the ring of packets, after which their numbers begin again at 1."""


class Graphs(Protocol):
    """Recorded steps."""

    def replay(self, padded: Any) -> object | None:
        """Run what was recorded for a shape; None if nothing was."""
        ...


class Runner(Protocol):
    """The compute lane's part of a step. Owns the device memory; each device has its own.

    All methods run as work of the compute lane, in order. Blocks are uint8, on the device. Each
    ``run`` takes the next packet, also one without rows, and ``read_out`` leaves it for that.

    Attributes:
        blocks: what packets are taken from, in turn, and what results are packed into.
        graphs: the steps that are recorded; None where each is launched by itself.
    """

    blocks: StepBlocks

    @property
    def graphs(self) -> Graphs | None:
        """See above."""
        ...

    def read_out(self, plan: StepPlan, layout: PayloadLayout, payload: Tensor) -> None:
        """Gather the columns of the packet's read-outs into the payload block.

        Runs before ``run``, which may give the memory that is read to somebody else.
        """
        ...

    def run(
        self, plan: StepPlan, layout: PayloadLayout, result: Tensor, payload: Tensor | None
    ) -> None:
        """Forward the rows of the packet, draw, and pack what leaves the step.

        Args:
            plan: what the packet says, too: who launches work needs its shape, and the packet may
                be on the device alone.
            layout: of the payload block.
            result: the one of ``blocks.results`` that the packet names; see ``exec.readback``.
            payload: None if the plan asks for tokens alone.
        """
        ...


class Executor:
    """The device side of the engine.

    Invariants: engine state is touched inside compute-lane work only; a step's blocks
    come from rings and are handed out again only after the step has retired.
    Loop thread only.
    """

    def __init__(self, config: EngineConfig, runner: Runner, device: Device) -> None:
        self._config = config
        self._device = device
        self._runner = runner
        self._columns = config.columns
        self._schema = packet_schema(config)
        self._writer = PacketWriter(self._schema)
        num_blocks, blocks = num_step_blocks(config), runner.blocks
        payloads = [device.device_block(payload_bytes(config)) for _ in range(num_blocks)]
        ring = partial(BlockRing, device)
        self._staging = ring(blocks.packets)
        self._last_number, self._max_number = 0, _ROUNDS * len(blocks.packets)
        self._results = ring(paired_blocks(device, blocks.results))
        self._payloads = ring(paired_blocks(device, payloads))

    @property
    def graphs(self) -> Graphs | None:
        """See ``Runner``."""
        return self._runner.graphs

    def submit(self, plan: StepPlan) -> PendingStep:
        """Queue one step; see ``StepExecutor``."""
        compute, copy = self._device.compute, self._device.copy
        layout = payload_layout(plan, self._columns)
        payload = self._payloads.acquire() if layout.num_bytes else None
        result = self._results.acquire()
        number = self._last_number = self._last_number % self._max_number + 1
        staged = self._stage(plan, number, result, layout)
        read = self._submit_readouts(plan, staged, layout, payload)
        compute.submit(
            self._run,
            plan,
            layout,
            result,
            payload,
            reads=(staged.device,),
            writes=(result.device,),
        )
        retired = compute.record()
        self._staging.release(staged, fence=retired)
        copy.wait(retired)
        self._download(result, 0, result.num_bytes)
        if payload is not None and layout.readout_bytes < layout.num_bytes:
            self._download(payload, layout.readout_bytes, layout.num_bytes)
        copied = copy.record()
        return PendingStep(
            plan,
            partial(self._collect, plan, number, copied, staged, retired, result, payload, layout),
            partial(self._read, plan, read, payload, layout),
        )

    def update(self, work: Callable[[], None]) -> None:
        """Change the model's parameters on the compute lane; see ``StepExecutor``."""
        self._device.compute.submit(work)
        self._device.compute.record().wait()

    def adopt_thread(self) -> AbstractContextManager[None]:
        """Let the calling thread submit all steps meanwhile; see ``Device``."""
        return self._device.adopt_thread()

    def close(self) -> None:
        """End the device's lanes."""
        self._device.close()

    # -- host side -----------------------------------------------------------------------

    def _stage(
        self, plan: StepPlan, number: int, result: TransferBlock, layout: PayloadLayout
    ) -> TransferBlock:
        """Write the packet to where its step takes it; from here on that memory is frozen."""
        block = self._staging.acquire()
        if (number - 1) % self._staging.num_blocks != block.index:
            raise InvariantError(f"packet {number} would be written into block {block.index}")
        num_words = self._writer.write(
            plan, block.words, number=number, result=result.index, copies=layout.copies
        )
        block.freeze()
        if not block.is_shared:
            self._device.compute.submit(
                upload, block, 4 * num_words, reads=(block.host,), writes=(block.device,)
            )
        return block

    def _submit_readouts(
        self,
        plan: StepPlan,
        staged: TransferBlock,
        layout: PayloadLayout,
        payload: TransferBlock | None,
    ) -> Event | None:
        """Gather rows before the forward, which may overwrite them; send them home beside it.

        Returns:
            The event behind their copy; None if nothing is to be read.
        """
        if payload is None or not layout.readout_bytes:
            return None
        compute, copy = self._device.compute, self._device.copy
        compute.submit(
            self._read_out,
            plan,
            layout,
            payload,
            reads=(staged.device,),
            writes=(payload.device,),
        )
        copy.wait(compute.record())
        self._download(payload, 0, layout.readout_bytes)
        return copy.record()

    def _download(self, block: TransferBlock, begin: int, end: int) -> None:
        self._device.copy.download(block, begin, end)

    def _read(
        self,
        plan: StepPlan,
        read: Event | None,
        payload: TransferBlock | None,
        layout: PayloadLayout,
    ) -> ReadRows:
        if read is not None:
            read.wait()
        return read_rows(plan, _bytes(payload), layout)

    def _collect(
        self,
        plan: StepPlan,
        number: int,
        copied: Event,
        staged: TransferBlock,
        retired: Event,
        result: TransferBlock,
        payload: TransferBlock | None,
        layout: PayloadLayout,
    ) -> StepResult:
        copied.wait()  # which comes behind ``retired``
        self._staging.note_passed(staged, retired)
        step_result = read_result(
            plan,
            result.words,
            _bytes(payload),
            layout,
            number=number,
            max_rows=self._config.max_running,
        )
        self._results.release(result)
        if payload is not None:
            self._payloads.release(payload)
        return step_result

    # -- compute-lane work ---------------------------------------------------------------

    def _read_out(self, plan: StepPlan, layout: PayloadLayout, payload: TransferBlock) -> None:
        self._runner.read_out(plan, layout, payload.device)

    def _run(
        self,
        plan: StepPlan,
        layout: PayloadLayout,
        result: TransferBlock,
        payload: TransferBlock | None,
    ) -> None:
        self._runner.run(plan, layout, result.device, None if payload is None else payload.device)


def _bytes(payload: TransferBlock | None) -> Bytes:
    """Return what has come; an empty read-out or score takes no bytes, so there may be no block."""
    return _NO_BYTES if payload is None else payload.words.view(np.uint8)


_NO_BYTES = np.zeros(0, dtype=np.uint8)
