"""The compute lane's part of a step on a CPU: read-outs, forward, draws, scores.

Owns the device memory (KV, slot state) and is its only writer. Every method runs as
work of the compute lane, so in order. Must not know lanes, rings or the host's side.
Device memory is host memory here, and is read and written through numpy.

Shape legend: T tokens, R rows, N rows that sample, M model dim, V vocabulary.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.attention.backend import ForwardContext, StepAttention
from dovetail.attention.one_token import OneTokenAttention
from dovetail.attention.paged import AttentionRows, PagedAttention
from dovetail.capture.rows import StepRows
from dovetail.config.schema import EngineConfig
from dovetail.exec.batch import DeviceBatch, StepInputs, check_handles, sequence_slots, unpack
from dovetail.exec.blocks import step_blocks
from dovetail.exec.device import Device
from dovetail.exec.kv import KVStore
from dovetail.exec.packet import PacketView, packet_schema, read_packet
from dovetail.exec.readback import RESULT_WORDS, Bytes, PayloadLayout
from dovetail.exec.scores import HostPayload, ScoredStep, ScoreWriter
from dovetail.exec.state import DeviceState
from dovetail.kernels import api
from dovetail.kernels.scratch import Scratch
from dovetail.models.causal_lm import CausalLM
from dovetail.sampling.sampler import History, draw
from dovetail.sched.plan import RowStatus, StepPlan


class StepRunner:
    """Runs packets on the model; an ``exec.executor.Runner``."""

    graphs = None

    def __init__(self, config: EngineConfig, model: CausalLM, device: Device) -> None:
        self._config = config
        self._schema = packet_schema(config)
        self.blocks = step_blocks(config, device)
        self._packet_words = [block.device.numpy().view(np.int32) for block in self.blocks.packets]
        self._last_number = 0
        self._results = self.blocks.results.numpy().view(np.int32)
        self._model = model
        self._kv = KVStore(config, device)
        self._state = DeviceState(config, device)
        self._inputs = StepInputs(config.max_running)
        self._scratch = Scratch()
        sampling = self._state.sampling
        self._scores = ScoreWriter(model, sampling.columns, sampling.report_ids)
        self._rows = StepRows(
            {name: config.columns[name] for name in config.capture},
            config.max_step_tokens,
            device=device.torch_device,
        )
        device.register_state(*self._rows.buffers.values())

    def read_out(self, plan: StepPlan, layout: PayloadLayout, payload: Tensor) -> None:
        """See ``Runner``."""
        block, columns = payload.numpy(), tuple(self._config.columns)
        for readout in plan.readouts:
            check_handles([readout.slot], [readout.generation], self._state)
        for number, slot, start, count, first in layout.copies.T.tolist():
            slots, column = self._slots_of(slot, start + count)[start:], columns[number]
            rows = layout.readouts[column].view(block)[first : first + count]
            self._kv.sidecars[column].read(slots, rows)

    def run(
        self, plan: StepPlan, layout: PayloadLayout, result: Tensor, payload: Tensor | None
    ) -> None:
        """See ``Runner``; what there is to know stands in the packet."""
        words = self._packet_words[self._last_number % len(self._packet_words)]
        packet = read_packet(self._schema, words)
        self._last_number = packet.number
        self.run_packet(
            packet,
            layout,
            self._results[packet.result],
            None if payload is None else payload.numpy(),
        )

    # What is not finite is found where tokens are drawn; numpy need not warn of it.
    @np.errstate(all="ignore")
    @torch.inference_mode()
    def run_packet(
        self,
        packet: PacketView,
        layout: PayloadLayout,
        result: NDArray[np.int32],
        payload: Bytes | None,
    ) -> None:
        """Forward the packet's rows, draw, and pack what leaves the step."""
        batch = unpack(packet, self._state, self._inputs, page_size=self._config.page_size)
        fields = packet.fields
        self._kv.poison(fields["pages.page"][fields["pages.is_fresh"] == 1])
        if packet.num_rows == 0:
            return  # read-outs alone
        self._rows.begin(len(batch.kv_slots_T))
        hidden_TM = self._model.hidden(
            ForwardContext(
                token_ids=batch.token_ids_T,
                positions=batch.positions_T,
                kv_slots=batch.kv_slots_T,
                attention=self._attention(batch.attention),
                recorder=self._rows if self._rows.buffers else None,
            )
        )
        self._keep_rows(batch)
        self._state.kv_len[batch.rows.slot] = batch.end_R
        draws, draw_of_row = self._draw(batch, hidden_TM, result)
        result[RESULT_WORDS * self._config.max_running] = packet.number
        self._mark_spoilt_rows(batch, hidden_TM, result)
        if payload is not None:
            self._pack_snapshot(batch, layout, payload)
            self._write_scores(
                ScoredStep(
                    hidden_TM=hidden_TM,
                    first_token_R=batch.first_token_R,
                    slot_R=batch.rows.slot,
                    targets=torch.from_numpy(fields["targets"].astype(np.int64)),
                    draws=draws,
                    draw_of_row_R=draw_of_row,
                ),
                layout,
                payload,
                result,
            )

    def _attention(self, rows: AttentionRows) -> StepAttention:
        """Bind the pools to the step's work list."""
        k_LCKD, v_LCKD = self._kv.k_LCKD, self._kv.v_LCKD
        if rows.is_one_token and k_LCKD.dtype == torch.float32:
            return OneTokenAttention(k_LCKD, v_LCKD, rows.decode_groups[0].kv_slots_DS[0])
        return PagedAttention(k_LCKD, v_LCKD, rows, dtype=k_LCKD.dtype, scratch=self._scratch)

    def _keep_rows(self, batch: DeviceBatch) -> None:
        """Store what is kept of each token at its cache slot, that of padding at the sink."""
        slots_T, sidecars = batch.kv_slots_T.numpy(), self._kv.sidecars
        sidecars["tokens"].write(slots_T, batch.token_ids_T)
        for column, buffer in self._rows.buffers.items():
            sidecars[column].write(slots_T, buffer[: len(slots_T)])

    def _pack_snapshot(self, batch: DeviceBatch, layout: PayloadLayout, payload: Bytes) -> None:
        """Copy the forward's rows into memory of the step: the next one writes over them."""
        for column, item in layout.snapshot.items():
            rows = item.view(payload)
            if column == "kv_slots":
                rows[...] = batch.kv_slots_T.numpy()[: len(rows)]
            elif column == "tokens":
                rows[...] = batch.token_ids_T.numpy()[: len(rows)]
            else:
                rows[...] = self._rows.buffers[column].numpy()[: len(rows)]

    def _draw(
        self, batch: DeviceBatch, hidden_TM: Tensor, result: NDArray[np.int32]
    ) -> tuple[api.Draws | None, NDArray[np.int64]]:
        """Draw for the rows that sample, remember the tokens, pack the result block.

        Returns:
            The draws, and for each row the index of its draw.
        """
        packed = self._packed(result)
        packed[:, : len(batch.rows.slot)] = 0
        rows = np.flatnonzero(batch.rows.samples)
        draw_of_row = np.cumsum(batch.rows.samples) - 1
        if not len(rows):
            return None, draw_of_row
        slots, ends = batch.rows.slot[rows], batch.end_R[rows]
        draws = draw(
            self._state.sampling,
            self._model.logits(hidden_TM[torch.from_numpy(batch.last_token_R[rows])]),
            slots_N=slots,
            positions_N=ends,
            read_history=lambda chosen: self._history(slots[chosen], ends[chosen], chosen),
        )
        token_ids = draws.ids_N.numpy()
        self._state.last_token[slots] = token_ids
        packed[0, rows] = token_ids
        packed[1, rows] = draws.logprobs_N.numpy().view(np.int32)
        packed[2, rows] = draws.status_N.numpy()
        return draws, draw_of_row

    def _mark_spoilt_rows(
        self, batch: DeviceBatch, hidden_TM: Tensor, result: NDArray[np.int32]
    ) -> None:
        """Give each row whose hidden states are not finite its status, so that it is not shared.

        Rows that sample nothing, too.
        """
        # What is not finite shows in the sum. One that overflows costs a closer look, no more.
        if math.isfinite(hidden_TM.sum(dtype=torch.float32)):
            return
        is_spoilt_T = ~torch.isfinite(hidden_TM).all(dim=-1).numpy()
        is_spoilt_R = np.logical_or.reduceat(is_spoilt_T, batch.first_token_R)
        self._packed(result)[2, np.flatnonzero(is_spoilt_R)] = RowStatus.NON_FINITE

    def _packed(self, result: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the result block as a table, a row of it a word."""
        return result[: RESULT_WORDS * self._config.max_running].reshape(RESULT_WORDS, -1)

    def _history(
        self, slots: NDArray[np.int64], ends: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> History:
        """Return all tokens so far of some sampling rows, from the token sidecar."""
        sidecar = self._kv.sidecars["tokens"].rows.numpy()
        prompt_lens = self._state.sampling.columns["prompt_len"][slots]
        tokens = [sidecar[self._slots_of(slot, end)] for slot, end in zip(slots, ends, strict=True)]
        is_output = [
            np.arange(end) >= prompt_len for end, prompt_len in zip(ends, prompt_lens, strict=True)
        ]
        return History(
            row_S=torch.from_numpy(np.repeat(rows, ends)),
            token_S=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            is_output_S=torch.from_numpy(np.concatenate(is_output)),
        )

    def _write_scores(
        self, step: ScoredStep, layout: PayloadLayout, payload: Bytes, result: NDArray[np.int32]
    ) -> None:
        status_R = self._packed(result)[2]
        for row, is_too_large in self._scores.write(step, layout, HostPayload(payload)):
            if is_too_large and status_R[row] == RowStatus.OK:
                status_R[row] = RowStatus.LARGE_SUPPORT

    def _slots_of(self, slot: int, num_tokens: int) -> NDArray[np.int64]:
        return sequence_slots(self._state, slot, num_tokens, self._config.page_size)
