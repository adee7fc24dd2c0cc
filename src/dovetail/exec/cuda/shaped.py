"""Draws that something shapes: penalties, biases, truncation, another kind of logprob.

Owns the GPU form of ``sampling.sampler``: the same stages in the same order, on parameters and
tokens that lie on the device. All is launched whatever the rows ask for, with grids that follow
from their number alone, so that a CUDA graph can hold it; a stage passes over rows that do not ask
for it.

Shape legend: R rows, V vocabulary, J entries of a bias table.
"""

import torch
import triton.language as tl
from torch import Tensor

from dovetail.exec.cuda.step import SlotTensors, StepTensors
from dovetail.kernels import api
from dovetail.kernels.backend import Borders, Kernels, PlainDraws, ShapedLogits
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import ceil_div, power_of_two
from dovetail.sched.plan import MAX_BIASES

_BLOCK = 1024
_BIAS_BLOCK = 128
_HISTORY_PROGRAMS = 8
"""Programs that go through the tokens so far of one row."""

_ROW_PROGRAMS = 16
"""Programs that go through the logits of one row. Most find that it asks for nothing, and then to
start them is all that they cost."""

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@jit(do_not_specialize=["num_rows"])
def _settings_kernel(
    rows_ptr, slot_top_k_ptr, slot_top_p_ptr, slot_min_p_ptr, slot_kind_ptr,
    repetition_ptr, frequency_ptr, presence_ptr, num_biases_ptr,
    top_k_ptr, top_p_ptr, min_p_ptr, kind_ptr, is_penalised_ptr, is_changed_ptr, rows_stride,
    num_rows, BLOCK: tl.constexpr,
):  # fmt: skip
    """The settings of all rows' slots; a row that samples nothing, or padding, has none."""
    row = tl.arange(0, BLOCK)
    is_real = row < num_rows
    slot = tl.load(rows_ptr + row, mask=is_real, other=0).to(tl.int64)
    samples = tl.load(rows_ptr + 4 * rows_stride + row, mask=is_real, other=0) > 0
    top_k = tl.load(slot_top_k_ptr + slot, mask=samples, other=0)
    top_p = tl.load(slot_top_p_ptr + slot, mask=samples, other=1.0)
    min_p = tl.load(slot_min_p_ptr + slot, mask=samples, other=0.0)
    kind = tl.load(slot_kind_ptr + slot, mask=samples, other=0)
    is_penalised = tl.load(repetition_ptr + slot, mask=samples, other=1.0) != 1.0
    is_penalised = is_penalised | (tl.load(frequency_ptr + slot, mask=samples, other=0.0) != 0.0)
    is_penalised = is_penalised | (tl.load(presence_ptr + slot, mask=samples, other=0.0) != 0.0)
    is_changed = is_penalised | (tl.load(num_biases_ptr + slot, mask=samples, other=0) > 0)
    tl.store(top_k_ptr + row, top_k, mask=is_real)
    tl.store(top_p_ptr + row, top_p, mask=is_real)
    tl.store(min_p_ptr + row, min_p, mask=is_real)
    tl.store(kind_ptr + row, kind, mask=is_real)
    tl.store(is_penalised_ptr + row, is_penalised.to(tl.int32), mask=is_real)
    tl.store(is_changed_ptr + row, is_changed.to(tl.int32), mask=is_real)


@jit
def _clear_kernel(counts_ptr, is_penalised_ptr, VOCAB, BLOCK: tl.constexpr):
    """A share of the counts of one row."""
    row = tl.program_id(0)
    if tl.load(is_penalised_ptr + row) == 0:
        return
    row_ptr = counts_ptr + row.to(tl.int64) * VOCAB
    for begin in range(tl.program_id(1) * BLOCK, VOCAB, tl.num_programs(1) * BLOCK):
        token = begin + tl.arange(0, BLOCK)
        tl.store(row_ptr + token, tl.zeros((BLOCK,), tl.int32), mask=token < VOCAB)


@jit
def _count_kernel(
    counts_ptr, is_penalised_ptr, rows_ptr, end_ptr, table_ptr, tokens_ptr, prompt_len_ptr, VOCAB,
    table_stride, CONTEXT: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A share of the tokens so far of one row: bit 0 says that one is there, 2 counts an output."""
    row = tl.program_id(0)
    if tl.load(is_penalised_ptr + row) == 0:
        return
    slot = tl.load(rows_ptr + row).to(tl.int64)
    end, prompt_len = tl.load(end_ptr + row), tl.load(prompt_len_ptr + slot)
    for begin in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        position = begin + tl.arange(0, BLOCK)
        is_there = (position < end) & (position < CONTEXT)
        page = tl.load(table_ptr + slot * table_stride + position // PAGE, mask=is_there, other=-1)
        is_there = is_there & (page >= 0)
        place = page.to(tl.int64) * PAGE + position % PAGE
        token = tl.load(tokens_ptr + place, mask=is_there, other=0)
        count = counts_ptr + row.to(tl.int64) * VOCAB + token
        tl.atomic_or(count, 1, mask=is_there)
        tl.atomic_add(count, 2, mask=is_there & (position >= prompt_len))


@jit
def _penalty_kernel(
    logits_ptr, changed_ptr, counts_ptr, is_penalised_ptr, is_changed_ptr, rows_ptr,
    repetition_ptr, frequency_ptr, presence_ptr, VOCAB, BLOCK: tl.constexpr,
):  # fmt: skip
    """A share of the logits of one row that changes; see ``kernels.api.penalize_counted``."""
    row = tl.program_id(0)
    if tl.load(is_changed_ptr + row) == 0:
        return
    is_penalised = tl.load(is_penalised_ptr + row) != 0
    slot = tl.load(rows_ptr + row).to(tl.int64)
    repetition = tl.load(repetition_ptr + slot)
    frequency, presence = tl.load(frequency_ptr + slot), tl.load(presence_ptr + slot)
    for begin in range(tl.program_id(1) * BLOCK, VOCAB, tl.num_programs(1) * BLOCK):
        token = begin + tl.arange(0, BLOCK)
        is_there, place = token < VOCAB, row.to(tl.int64) * VOCAB + token
        x = tl.load(logits_ptr + place, mask=is_there, other=0.0)
        if is_penalised:
            count = tl.load(counts_ptr + place, mask=is_there, other=0)
            factor = tl.where(x > 0.0, tl.math.div_rn(1.0, repetition), repetition)
            x = tl.where(count > 0, x * factor, x)
            num_drawn = count >> 1
            x -= frequency * num_drawn.to(tl.float32)
            x -= presence * (num_drawn > 0).to(tl.float32)
        tl.store(changed_ptr + place, x, mask=is_there)


@jit
def _bias_kernel(
    changed_ptr, is_changed_ptr, rows_ptr, end_ptr, num_ptr, ids_ptr, values_ptr, until_ptr, VOCAB,
    BIASES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of one row's bias table. A token may stand there twice: once with -inf."""
    row = tl.program_id(0)
    if tl.load(is_changed_ptr + row) == 0:
        return
    slot = tl.load(rows_ptr + row).to(tl.int64)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = entry < tl.load(num_ptr + slot)
    place = slot * BIASES + entry
    is_there = is_there & (tl.load(end_ptr + row) < tl.load(until_ptr + place, mask=is_there))
    token = tl.load(ids_ptr + place, mask=is_there, other=0)
    value = tl.load(values_ptr + place, mask=is_there, other=0.0)
    tl.atomic_add(changed_ptr + row.to(tl.int64) * VOCAB + token, value, mask=is_there)


class ShapedDraws:
    """Draws for the rows of the step that the inputs hold. Compute lane only.

    Owns what it works with, at fixed addresses. What it returns beside holds until the next call.

    Args:
        slots, inputs: what the device knows of slots and of the step at hand.
        tokens_C: int32, the token at each cache slot.
        page_size: of the cache.
        kernels: who draws.
        vocab_size: V.

    Attributes:
        tensors: all tensors, for declaring them as engine state.
    """

    def __init__(
        self,
        slots: SlotTensors,
        inputs: StepTensors,
        *,
        tokens_C: Tensor,
        page_size: int,
        kernels: Kernels,
        vocab_size: int,
    ) -> None:
        self._slots, self._inputs = slots, inputs
        self._tokens_C, self._page_size, self._kernels = tokens_C, page_size, kernels
        num_rows, new = inputs.rows_5R.shape[1], inputs.temperature_R.new_zeros
        self._top_p_R, self._min_p_R = new(num_rows), new(num_rows)
        ints_4R = new(4, num_rows, dtype=torch.int32)
        self._top_k_R, self._kind_R, self._is_penalised_R, self._is_changed_R = ints_4R
        self._changed_RV = new(num_rows, vocab_size)
        self._borders = Borders(new(num_rows), new(num_rows, dtype=torch.int32))
        self.tensors = (self._top_p_R, self._min_p_R, ints_4R, self._changed_RV, *self._borders)

    def draw(self, logits_RV: Tensor) -> PlainDraws:
        """Draw one token for each row of the step at hand; those that sample nothing get any.

        Launches the same whatever the rows ask for, and waits for nothing.

        Args:
            logits_RV: float32, contiguous; rows from the step's first one on.
        """
        num_rows, at = len(logits_RV), self._inputs
        work_RV = torch.empty_like(logits_RV, dtype=torch.int32)
        self._read_settings(num_rows)
        self._change(logits_RV, work_RV)
        temperature_R = at.temperature_R[:num_rows]
        borders = self._kernels.truncate(
            self._logits(logits_RV),
            temperature_N=temperature_R,
            top_k_N=self._top_k_R[:num_rows],
            top_p_N=self._top_p_R[:num_rows],
            min_p_N=self._min_p_R[:num_rows],
            work_NV=work_RV,
            out=self._borders_of(num_rows),
        )
        return self._kernels.sample_shaped(
            self._logits(logits_RV),
            borders,
            temperature_N=temperature_R,
            seed_N=at.seed_R[:num_rows],
            position_N=at.end_R[:num_rows],
            sample_index_N=at.sample_index_R[:num_rows],
            logprob_kind_N=self._kind_R[:num_rows],
        )

    def spread(self, logits_RV: Tensor, draws: PlainDraws) -> api.Draws:
        """Return the draws of the last call with what they were drawn from, for each token.

        Args:
            logits_RV: as then, or fewer rows.
            draws: what ``draw`` returned.
        """
        num_rows = len(logits_RV)
        scaled_RV, reported_RV, outside_RV = self._kernels.spread(
            self._logits(logits_RV),
            self._borders_of(num_rows),
            temperature_N=self._inputs.temperature_R[:num_rows],
            logprob_kind_N=self._kind_R[:num_rows],
        )
        ids_R, logprobs_R, status_R, log_total_R = (part[:num_rows] for part in draws)
        return api.Draws(
            ids_R, logprobs_R, status_R, reported_RV, log_total_R, scaled_RV, outside_RV
        )

    def _logits(self, logits_RV: Tensor) -> ShapedLogits:
        num_rows = len(logits_RV)
        return ShapedLogits(logits_RV, self._changed_RV[:num_rows], self._is_changed_R[:num_rows])

    def _borders_of(self, num_rows: int) -> Borders:
        return Borders(*(part[:num_rows] for part in self._borders))

    def _read_settings(self, num_rows: int) -> None:
        param, rows = self._slots.param, self._inputs.rows_5R
        _settings_kernel[(1,)](
            rows, param("top_k"), param("top_p"), param("min_p"), param("logprob_kind"),
            *(param(name) for name in _PENALTIES), param("num_biases"),
            self._top_k_R, self._top_p_R, self._min_p_R, self._kind_R, self._is_penalised_R,
            self._is_changed_R, rows.stride(0), num_rows, BLOCK=power_of_two(rows.shape[1]),
        )  # fmt: skip

    def _change(self, logits_RV: Tensor, counts_RV: Tensor) -> None:
        """Penalise and bias the rows that ask for it."""
        (num_rows, vocab_size), slots, at = logits_RV.shape, self._slots, self._inputs
        table, context = slots.page_table_SB, slots.page_table_SB.shape[1] * self._page_size
        blocks = (num_rows, min(_ROW_PROGRAMS, ceil_div(vocab_size, _BLOCK)))
        penalties = [slots.param(name) for name in _PENALTIES]
        _clear_kernel[blocks](counts_RV, self._is_penalised_R, vocab_size, BLOCK=_BLOCK)
        _count_kernel[(num_rows, min(_HISTORY_PROGRAMS, ceil_div(context, _BLOCK)))](
            counts_RV, self._is_penalised_R, at.rows_5R, at.end_R, table, self._tokens_C,
            slots.param("prompt_len"), vocab_size, table.stride(0),
            CONTEXT=context, PAGE=self._page_size, BLOCK=_BLOCK,
        )  # fmt: skip
        # As the reference has it, products are rounded before they are subtracted.
        _penalty_kernel[blocks](
            logits_RV, self._changed_RV, counts_RV, self._is_penalised_R, self._is_changed_R,
            at.rows_5R, *penalties, vocab_size, BLOCK=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
        _bias_kernel[(num_rows, ceil_div(MAX_BIASES, _BIAS_BLOCK))](
            self._changed_RV, self._is_changed_R, at.rows_5R, at.end_R, slots.param("num_biases"),
            slots.bias_ids_SJ, slots.bias_values_SJ, slots.bias_until_SJ, vocab_size,
            BIASES=MAX_BIASES, BLOCK=_BIAS_BLOCK,
        )  # fmt: skip
