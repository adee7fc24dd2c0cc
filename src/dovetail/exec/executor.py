"""Runs plans on a device: stage, unpack, forward, sample, pack, copy out.

Owns the device memory (KV, slot state, transfer rings) and is its only writer, on the
compute lane. Must not know requests, or pages beyond what a plan says.

``submit`` queues a step and returns; nothing in it waits for a forward. A step's
data crosses to the device in one packet on the compute lane and comes back in one
result block on the copy lane.
"""

from functools import partial

import numpy as np
import torch

from dovetail.attention.backend import ForwardContext
from dovetail.attention.paged import PagedAttention
from dovetail.config.schema import EngineConfig
from dovetail.exec.batch import DeviceBatch, StepInputs, check_handles, sequence_slots, unpack
from dovetail.exec.device import Device, Event
from dovetail.exec.kv import KVStore
from dovetail.exec.packet import PacketWriter, packet_schema, read_packet
from dovetail.exec.pending import PendingStep
from dovetail.exec.readback import (
    RESULT_WORDS,
    ColumnSpec,
    PayloadSlice,
    payload_layout,
    read_payload,
    read_result,
)
from dovetail.exec.ring import BlockRing, TransferBlock
from dovetail.exec.state import DeviceState
from dovetail.models.causal_lm import CausalLM
from dovetail.sched.plan import StepPlan, StepResult


class Executor:
    """The device side of the engine.

    Invariants: engine state is touched inside compute-lane work only; a step's blocks
    come from rings and are handed out again only after the step has retired.
    Loop thread only.
    """

    def __init__(self, config: EngineConfig, model: CausalLM, device: Device) -> None:
        self._config = config
        self._model = model
        self._device = device
        self._kv = KVStore(config, device)
        self._state = DeviceState(config, device)
        self._inputs = StepInputs(config.max_running)
        self._schema = packet_schema(config)
        self._writer = PacketWriter(self._schema)
        self._columns = {
            name: ColumnSpec(tensor.numpy().dtype, tuple(tensor.shape[1:]))
            for name, tensor in self._kv.sidecars.items()
        }
        token_bytes = sum(spec.token_bytes for spec in self._columns.values())
        ring = partial(BlockRing, device, num_blocks=config.depth + 2)
        self._staging = ring(num_bytes=self._schema.num_bytes)
        self._results = ring(num_bytes=4 * RESULT_WORDS * config.max_running)
        self._payloads = ring(num_bytes=config.context_len * token_bytes + 16 * config.max_running)

    def submit(self, plan: StepPlan) -> PendingStep:
        """Queue one step; see ``StepExecutor``."""
        compute, copy = self._device.compute, self._device.copy
        slices, payload_bytes = payload_layout(plan, self._columns)
        payload = self._payloads.acquire() if payload_bytes else None
        if payload is not None:  # before the forward, which may overwrite what is read
            compute.submit(self._gather, slices, payload, writes=(payload.device,))
        staged, result = self._stage(plan), self._results.acquire()
        compute.submit(self._run, staged, result, reads=(staged.device,), writes=(result.device,))
        retired = compute.record()
        self._staging.release(staged, fence=retired)
        copy.wait(retired)
        for block in (result, payload):
            if block is not None:
                copy.submit(_download, block, reads=(block.device,), writes=(block.host,))
        copied = copy.record()
        return PendingStep(plan, partial(self._collect, plan, copied, result, payload, slices))

    def close(self) -> None:
        """End the device's lanes."""
        self._device.close()

    # -- host side -----------------------------------------------------------------------

    def _stage(self, plan: StepPlan) -> TransferBlock:
        """Write the packet and send it; from here on its host memory is frozen."""
        block = self._staging.acquire()
        num_words = self._writer.write(plan, block.words)
        block.freeze()
        self._device.compute.submit(
            _upload, block, 4 * num_words, reads=(block.host,), writes=(block.device,)
        )
        return block

    def _collect(
        self,
        plan: StepPlan,
        copied: Event,
        result: TransferBlock,
        payload: TransferBlock | None,
        slices: tuple[PayloadSlice, ...],
    ) -> StepResult:
        copied.wait()
        readouts = ()
        if payload is not None:
            readouts = read_payload(plan, payload.words, slices, self._columns)
            self._payloads.release(payload)
        step_result = read_result(
            plan, result.words, max_rows=self._config.max_running, readouts=readouts
        )
        self._results.release(result)
        return step_result

    # -- compute-lane work ---------------------------------------------------------------

    def _gather(self, slices: tuple[PayloadSlice, ...], payload: TransferBlock) -> None:
        for item in slices:
            readout = item.readout
            check_handles([readout.slot], [readout.generation], self._state)
            slots = sequence_slots(self._state, readout.slot, readout.end, self._config.page_size)[
                readout.start :
            ]
            values = self._kv.sidecars[item.column][torch.from_numpy(slots)]
            target = payload.device[item.offset : item.offset + item.num_bytes]
            target.copy_(values.view(torch.uint8).view(-1))

    @torch.inference_mode()
    def _run(self, staged: TransferBlock, result: TransferBlock) -> None:
        packet = read_packet(self._schema, staged.device.numpy().view(np.int32))
        batch = unpack(packet, self._state, self._inputs, page_size=self._config.page_size)
        if packet.num_rows == 0:
            return  # read-outs alone
        self._kv.sidecars["tokens"][batch.kv_slots_T] = batch.token_ids_T.to(torch.int32)
        hidden_TM = self._model.hidden(
            ForwardContext(
                token_ids=batch.token_ids_T,
                positions=batch.positions_T,
                kv_slots=batch.kv_slots_T,
                attention=PagedAttention(
                    self._kv.k_LCKD, self._kv.v_LCKD, batch.attention, dtype=self._kv.k_LCKD.dtype
                ),
            )
        )
        self._state.kv_len[batch.rows.slot] = batch.end_R
        self._sample(batch, hidden_TM, result)

    def _sample(self, batch: DeviceBatch, hidden_TM: torch.Tensor, result: TransferBlock) -> None:
        """Sample the rows that ask for it, remember the tokens, pack the result block."""
        words = result.device.numpy().view(np.int32)[: RESULT_WORDS * self._config.max_running]
        packed = words.reshape(RESULT_WORDS, -1)
        packed[:, : len(batch.rows.slot)] = 0
        sampling_rows = np.flatnonzero(batch.rows.samples)
        if not len(sampling_rows):
            return
        last_tokens = torch.from_numpy(batch.last_token_R[sampling_rows])
        slots = batch.rows.slot[sampling_rows]
        token_ids, logprobs, status = self._state.sampling.sample(
            self._model.logits(hidden_TM[last_tokens]),
            slots_N=torch.from_numpy(slots),
            position_N=torch.from_numpy(batch.end_R[sampling_rows]),
        )
        self._state.last_token[slots] = token_ids.numpy()
        packed[0, sampling_rows] = token_ids.numpy()
        packed[1, sampling_rows] = logprobs.numpy().view(np.int32)
        packed[2, sampling_rows] = status.numpy()


def _upload(block: TransferBlock, num_bytes: int) -> None:
    block.device[:num_bytes].copy_(block.host[:num_bytes], non_blocking=True)


def _download(block: TransferBlock) -> None:
    block.host.copy_(block.device, non_blocking=True)
