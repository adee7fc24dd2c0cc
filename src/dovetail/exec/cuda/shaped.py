"""Draws that something shapes: truncation, penalties, biases, another kind of logprob.

Owns the GPU form of ``sampling.sampler``: the same stages in the same order, on parameters and
tokens that lie on the device, launched without a wait. Which stages there are, and how many rows
truncation cuts, the host knows from plans. The draw itself is the plain one, of what is left.

Shape legend: R rows, V vocabulary, C rows that are cut, J entries of a bias table.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from dovetail.exec.cuda.step import SlotTensors, StepTensors
from dovetail.kernels import api
from dovetail.kernels.backend import Kernels, PlainDraws
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import ceil_div
from dovetail.sched.plan import MAX_BIASES, LogprobKindId, RowStatus

CUTTING = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_BLOCK = 1024
_BIAS_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Shaping:
    """What a step's draws need beyond the plain one.

    Attributes:
        penalises, biases: some row does.
        num_cut: rows that truncation may cut.
        has_raw: some row reports logprobs of that kind.
    """

    penalises: bool = False
    biases: bool = False
    num_cut: int = 0
    has_raw: bool = False


def is_cut(temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Return whether truncation may cut a row; numpy arrays on the host, tensors on the device."""
    return ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)) & (temperature != 0.0)


@jit
def _count_kernel(
    counts_ptr, rows_ptr, end_ptr, table_ptr, tokens_ptr, prompt_len_ptr, repetition_ptr,
    frequency_ptr, presence_ptr, counts_stride, table_stride, CONTEXT: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens so far of one row: bit 0 says that a token is there, 2 counts an output."""
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    neutral = (tl.load(repetition_ptr + slot) == 1.0) & (tl.load(frequency_ptr + slot) == 0.0)
    end = tl.load(end_ptr + row)
    begin = tl.program_id(1) * BLOCK
    if (neutral & (tl.load(presence_ptr + slot) == 0.0)) | (begin >= end):
        return
    position = begin + tl.arange(0, BLOCK)
    is_there = (position < end) & (position < CONTEXT)
    page = tl.load(table_ptr + slot * table_stride + position // PAGE, mask=is_there, other=-1)
    is_there = is_there & (page >= 0)
    place = page.to(tl.int64) * PAGE + position % PAGE
    token = tl.load(tokens_ptr + place, mask=is_there, other=0)
    count = counts_ptr + row.to(tl.int64) * counts_stride + token
    tl.atomic_or(count, 1, mask=is_there)
    is_output = is_there & (position >= tl.load(prompt_len_ptr + slot))
    tl.atomic_add(count, 2, mask=is_output)


@jit
def _bias_kernel(
    logits_ptr, rows_ptr, end_ptr, num_ptr, ids_ptr, values_ptr, until_ptr, logits_stride,
    BIASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one row's bias table. A token may stand there twice."""
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = entry < tl.load(num_ptr + slot)
    place = slot * BIASES + entry
    is_there = is_there & (tl.load(end_ptr + row) < tl.load(until_ptr + place, mask=is_there))
    token = tl.load(ids_ptr + place, mask=is_there, other=0)
    value = tl.load(values_ptr + place, mask=is_there, other=0.0)
    tl.atomic_add(logits_ptr + row.to(tl.int64) * logits_stride + token, value, mask=is_there)


@dataclass(frozen=True, slots=True)
class ShapedDraws:
    """Draws for the rows of steps. Compute lane only.

    Attributes:
        slots, inputs: what the device knows of slots and of the step at hand.
        tokens_C: int32, the token at each cache slot.
        page_size: of the cache.
        kernels: who draws.
    """

    slots: SlotTensors
    inputs: StepTensors
    tokens_C: Tensor
    page_size: int
    kernels: Kernels

    def draw(self, logits_RV: Tensor, shaping: Shaping) -> api.Draws:
        """Draw one token for each row of the step at hand; those that sample nothing get any.

        Args:
            logits_RV: float32, without padding.
            shaping: of the step.
        """
        num_rows = len(logits_RV)
        slot_R = self.inputs.rows_6R[0, :num_rows].long()
        processed_RV = self._penalized(logits_RV, slot_R) if shaping.penalises else logits_RV
        if shaping.biases:
            processed_RV = self._biased(processed_RV)
        temperature_R = self.inputs.temperature_R[:num_rows]
        divisor_R = torch.where(temperature_R == 0.0, 1.0, temperature_R)
        scaled_RV = processed_RV / divisor_R[:, None]
        outside_RV, left_RV = None, processed_RV
        if shaping.num_cut:
            outside_RV = self._outside(scaled_RV, slot_R, shaping.num_cut)
            left_RV = processed_RV.masked_fill(outside_RV, -torch.inf)
        drawn = self.kernels.sample_plain(
            left_RV,
            temperature_N=temperature_R,
            seed_N=self.inputs.seed_R[:num_rows],
            position_N=self.inputs.end_R[:num_rows],
            sample_index_N=self.inputs.sample_index_R[:num_rows],
        )
        draws = self._report(drawn, logits_RV, scaled_RV, outside_RV, slot_R, shaping)
        is_finite_R = torch.isfinite(draws.log_total_N) & ~torch.isnan(drawn.log_total_N)
        status_R = torch.where(is_finite_R, int(RowStatus.OK), int(RowStatus.NON_FINITE))
        # Whoever took the last token away, it was not the model.
        is_empty_R = (drawn.log_total_N == -torch.inf) & torch.isfinite(logits_RV.amax(dim=-1))
        status_R = torch.where(is_empty_R, int(RowStatus.EMPTY_SUPPORT), status_R)
        return draws._replace(status_N=status_R)

    def _penalized(self, logits_RV: Tensor, slot_R: Tensor) -> Tensor:
        penalties = [self.slots.param(name) for name in _PENALTIES]
        table, context = self.slots.page_table_SB, self.slots.page_table_SB.shape[1]
        counts_RV = torch.zeros_like(logits_RV, dtype=torch.int32)
        grid = (len(logits_RV), ceil_div(context * self.page_size, _BLOCK))
        _count_kernel[grid](
            counts_RV, self.inputs.rows_6R, self.inputs.end_R, table, self.tokens_C,
            self.slots.param("prompt_len"), *penalties, counts_RV.stride(0), table.stride(0),
            CONTEXT=context * self.page_size, PAGE=self.page_size, BLOCK=_BLOCK,
        )  # fmt: skip
        repetition_R, frequency_R, presence_R = (
            penalty_S.index_select(0, slot_R) for penalty_S in penalties
        )
        return api.penalize_counted(
            logits_RV,
            occurs_NV=counts_RV > 0,
            num_drawn_NV=(counts_RV >> 1).float(),
            repetition_N=repetition_R,
            frequency_N=frequency_R,
            presence_N=presence_R,
        )

    def _biased(self, logits_RV: Tensor) -> Tensor:
        biased_RV, slots = logits_RV.clone(), self.slots
        _bias_kernel[(len(logits_RV), ceil_div(MAX_BIASES, _BIAS_BLOCK))](
            biased_RV, self.inputs.rows_6R, self.inputs.end_R, slots.param("num_biases"),
            slots.bias_ids_SJ, slots.bias_values_SJ, slots.bias_until_SJ, biased_RV.stride(0),
            BIASES=MAX_BIASES, BLOCK=_BIAS_BLOCK,
        )  # fmt: skip
        return biased_RV

    def _outside(self, scaled_RV: Tensor, slot_R: Tensor, num_cut: int) -> Tensor:
        """Return what truncation takes away, bool [R, V]; only rows that it cuts are sorted."""
        of = {name: self.slots.param(name).index_select(0, slot_R) for name in CUTTING}
        is_cut_R = is_cut(**of) & (self.inputs.rows_6R[5, : len(slot_R)] > 0)
        cut_C = torch.argsort(is_cut_R.to(torch.int8), descending=True, stable=True)[:num_cut]
        support_CV = api.support_mask(
            scaled_RV.index_select(0, cut_C),
            top_k_N=of["top_k"].index_select(0, cut_C),
            top_p_N=of["top_p"].index_select(0, cut_C),
            min_p_N=of["min_p"].index_select(0, cut_C),
        )
        outside_RV = torch.zeros_like(scaled_RV, dtype=torch.bool)
        return outside_RV.index_copy_(0, cut_C, ~support_CV)

    def _report(
        self,
        drawn: PlainDraws,
        logits_RV: Tensor,
        scaled_RV: Tensor,
        outside_RV: Tensor | None,
        slot_R: Tensor,
        shaping: Shaping,
    ) -> api.Draws:
        """Return the draws with the logprobs that each row's kind asks for.

        The draw itself has those over what truncation left. Rows that ask for others get them
        worked out; all others keep the bits that they would have in a step that shapes nothing.
        """
        draws = api.Draws(
            drawn.ids_N, drawn.logprobs_N, drawn.status_N, scaled_RV, drawn.log_total_N, scaled_RV,
            outside_RV,
        )  # fmt: skip
        if outside_RV is None and not shaping.has_raw:
            return draws
        kind_R = self.slots.param("logprob_kind").index_select(0, slot_R)
        is_raw_R, reported_RV = kind_R == LogprobKindId.RAW, scaled_RV
        differs_R = is_raw_R
        if outside_RV is not None:
            is_hidden_RV = outside_RV & (kind_R == LogprobKindId.TRUNCATED)[:, None]
            reported_RV = scaled_RV.masked_fill(is_hidden_RV, -torch.inf)
            differs_R = is_raw_R | (outside_RV.any(dim=-1) & (kind_R == LogprobKindId.SCALED))
        reported_RV = torch.where(is_raw_R[:, None], logits_RV, reported_RV)
        log_total_R = torch.logsumexp(reported_RV, dim=-1)
        logprobs_R = reported_RV.gather(1, drawn.ids_N[:, None]).view(-1) - log_total_R
        return draws._replace(
            logprobs_N=torch.where(differs_R, logprobs_R, drawn.logprobs_N),
            reported_NV=reported_RV,
            log_total_N=torch.where(differs_R, log_total_R, drawn.log_total_N),
        )
