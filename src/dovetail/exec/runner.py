"""The compute lane's part of a step: read-outs, forward, draws, scores.

Owns the device memory (KV, slot state) and is its only writer. Every method runs as
work of the compute lane, so in order. Must not know lanes, rings or the host's side.

Shape legend: T tokens, R rows, N rows that sample, M model dim, V vocabulary.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.attention.backend import ForwardContext
from dovetail.attention.paged import PagedAttention
from dovetail.capture.rows import StepRows
from dovetail.config.payload import MASK_HEAD_WORDS
from dovetail.config.schema import EngineConfig
from dovetail.exec.batch import DeviceBatch, StepInputs, check_handles, sequence_slots, unpack
from dovetail.exec.device import Device
from dovetail.exec.kv import KVStore
from dovetail.exec.packet import PacketView
from dovetail.exec.readback import (
    RESULT_WORDS,
    Bytes,
    PayloadLayout,
    ScoreSlices,
)
from dovetail.exec.state import DeviceState
from dovetail.kernels import api
from dovetail.kernels.scratch import Scratch
from dovetail.models.causal_lm import CausalLM
from dovetail.sampling.masks import Support, support_of
from dovetail.sampling.sampler import History, draw
from dovetail.sched.plan import LogprobKindId, RowStatus

HEAD_BLOCK = 64
"""Rows of hidden states that become logits at once when a prompt is scored: logits of a whole
chunk would be the largest tensor of the step."""


class StepRunner:
    """Runs unpacked plans on the model."""

    def __init__(self, config: EngineConfig, model: CausalLM, device: Device) -> None:
        self._config = config
        self._model = model
        self._kv = KVStore(config, device)
        self._state = DeviceState(config, device)
        self._inputs = StepInputs(config.max_running)
        self._scratch = Scratch()
        self._rows = StepRows(
            {name: config.columns[name] for name in config.capture},
            config.max_step_tokens,
            device=device.torch_device,
        )
        device.register_state(*self._rows.buffers.values())

    def read_out(self, layout: PayloadLayout, payload: Bytes) -> None:
        """Gather the columns of the plan's read-outs into the payload block."""
        for readout, slices in layout.readouts:
            check_handles([readout.slot], [readout.generation], self._state)
            slots = self._slots_of(readout.slot, readout.end)[readout.start :]
            for column, item in slices.items():
                self._kv.sidecars[column].read(slots, item.view(payload))

    @torch.inference_mode()
    def run(
        self,
        packet: PacketView,
        layout: PayloadLayout,
        result: NDArray[np.int32],
        payload: Bytes | None,
    ) -> None:
        """Forward the packet's rows, draw, and pack what leaves the step."""
        batch = unpack(packet, self._state, self._inputs, page_size=self._config.page_size)
        if packet.num_rows == 0:
            return  # read-outs alone
        fields = packet.fields
        self._kv.poison(fields["pages.page"][fields["pages.is_fresh"] == 1])
        self._rows.begin(len(batch.kv_slots_T))
        hidden_TM = self._model.hidden(
            ForwardContext(
                token_ids=batch.token_ids_T,
                positions=batch.positions_T,
                kv_slots=batch.kv_slots_T,
                attention=PagedAttention(
                    self._kv.k_LCKD,
                    self._kv.v_LCKD,
                    batch.attention,
                    dtype=self._kv.k_LCKD.dtype,
                    scratch=self._scratch,
                ),
                recorder=self._rows if self._rows.buffers else None,
            )
        )
        self._keep_rows(batch)
        self._state.kv_len[batch.rows.slot] = batch.end_R
        draws, draw_of_row = self._draw(batch, hidden_TM, result)
        self._mark_spoilt_rows(batch, hidden_TM, result)
        if payload is not None:
            self._pack_snapshot(batch, layout, payload)
            targets = torch.from_numpy(packet.fields["targets"].astype(np.int64))
            packed = self._packed(result)
            self._write_scores(
                batch, hidden_TM, layout, payload, packed, targets, draws, draw_of_row
            )

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
        self,
        batch: DeviceBatch,
        hidden_TM: Tensor,
        layout: PayloadLayout,
        payload: Bytes,
        packed: NDArray[np.int32],
        targets: Tensor,
        draws: api.Draws | None,
        draw_of_row: NDArray[np.int64],
    ) -> None:
        num_scored = 0
        for slices in layout.scores:
            score, slot = slices.score, int(batch.rows.slot[slices.score.row])
            ids_J = self._state.sampling.report_ids(slot, score.num_ids)
            if not score.is_prompt:
                assert draws is not None
                index = draw_of_row[score.row]
                logits_1V, total_1 = draws.reported_NV[index, None], draws.log_total_N[index, None]
                _write_alternatives(slices, payload, 0, logits_1V, total_1, ids_J)
                if score.max_mask:
                    is_greedy = self._state.sampling.columns["temperature"][slot] == 0
                    support = support_of(draws, index, is_greedy=bool(is_greedy))
                    is_written = _write_mask(slices, payload, support)
                    if not is_written and packed[2, score.row] == RowStatus.OK:
                        packed[2, score.row] = RowStatus.LARGE_SUPPORT
                continue
            first = int(batch.first_token_R[score.row]) + score.first
            self._score_prompt(
                slices,
                payload,
                hidden_TM[first : first + score.count],
                targets[num_scored : num_scored + score.count],
                divisor=self._prompt_divisor(slot),
                ids_J=ids_J,
            )
            num_scored += score.count

    def _prompt_divisor(self, slot: int) -> float:
        """Return what the slot's logits are divided by when its prompt is scored."""
        columns = self._state.sampling.columns
        is_scaled = columns["logprob_kind"][slot] == LogprobKindId.SCALED
        return float(columns["temperature"][slot] or 1.0) if is_scaled else 1.0

    def _score_prompt(
        self,
        slices: ScoreSlices,
        payload: Bytes,
        hidden_PM: Tensor,
        targets_P: Tensor,
        *,
        divisor: float,
        ids_J: Tensor,
    ) -> None:
        """Score known next tokens, a block of rows at a time."""
        logprobs = slices.logprobs.view(payload)
        for begin in range(0, len(targets_P), HEAD_BLOCK):
            block = slice(begin, begin + HEAD_BLOCK)
            logits_BV = self._model.logits(hidden_PM[block]) / divisor
            log_total_B = torch.logsumexp(logits_BV, dim=-1)
            chosen_B = logits_BV.gather(1, targets_P[block, None]).view(-1)
            logprobs[block] = (chosen_B - log_total_B).numpy()
            _write_alternatives(slices, payload, begin, logits_BV, log_total_B, ids_J)

    def _slots_of(self, slot: int, num_tokens: int) -> NDArray[np.int64]:
        return sequence_slots(self._state, slot, num_tokens, self._config.page_size)


def _write_mask(slices: ScoreSlices, payload: Bytes, support: Support) -> bool:
    """Write the support of a draw; False if it has too many ids."""
    mask, num_ids = slices.mask.view(payload), len(support.ids_S)
    if num_ids > slices.score.max_mask:
        mask[0] = 0
        return False
    mask[0] = num_ids
    mask[1:MASK_HEAD_WORDS] = np.float32(support.logprob).view(np.int32)
    mask[MASK_HEAD_WORDS : MASK_HEAD_WORDS + num_ids] = support.ids_S.numpy()
    return True


def _write_alternatives(
    slices: ScoreSlices,
    payload: Bytes,
    begin: int,
    logits_BV: Tensor,
    log_total_B: Tensor,
    ids_J: Tensor,
) -> None:
    """Write the top and asked-for logprobs of a block of positions."""
    block = slice(begin, begin + len(logits_BV))
    if slices.score.num_top:
        ids_BK, values_BK = api.top_logprobs(logits_BV, log_total_B, slices.score.num_top)
        slices.top_ids.view(payload)[block] = ids_BK.numpy()
        slices.top_logprobs.view(payload)[block] = values_BK.numpy()
    if len(ids_J):
        values_BJ = logits_BV[:, ids_J] - log_total_B[:, None]
        slices.id_logprobs.view(payload)[block] = values_BJ.numpy()
