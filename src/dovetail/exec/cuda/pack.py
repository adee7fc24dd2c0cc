"""From a step's draws to its result block and the slots' last tokens, in one kernel.

Shape legend: as in ``exec.cuda.step``.
"""

import torch
import triton.language as tl
from torch import Tensor

from dovetail.exec.cuda.step import SlotTensors, StepTensors
from dovetail.exec.packet import NUMBER
from dovetail.exec.readback import BROKEN_ROW, RESULT_WORDS
from dovetail.kernels.backend import PlainDraws
from dovetail.kernels.triton.jit import jit
from dovetail.sched.plan import RowStatus

_BROKEN = tl.constexpr(BROKEN_ROW)
_NUMBER = tl.constexpr(NUMBER)
_RESULT_WORDS = tl.constexpr(RESULT_WORDS)
_NON_FINITE = tl.constexpr(int(RowStatus.NON_FINITE))


@jit
def _pack_kernel(
    packet_ptr, results_ptr, rows_ptr, first_ptr, row_status_ptr, is_spoilt_ptr, ids_ptr,
    logprobs_ptr, status_ptr, last_token_ptr, stride, block_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, and the packet's number.

    A row whose hidden states are not finite says so, even if it samples nothing.
    """
    row = tl.program_id(0)
    is_real = row < tl.load(packet_ptr)
    result_ptr = results_ptr + tl.load(packet_ptr + 2) * block_stride
    number = tl.load(packet_ptr + _NUMBER)
    tl.store(result_ptr + _RESULT_WORDS * stride, number, mask=is_real & (row == 0))
    width = tl.load(rows_ptr + 3 * stride + row, mask=is_real, other=0)
    samples = tl.load(rows_ptr + 4 * stride + row, mask=is_real, other=0) > 0
    is_broken = tl.load(row_status_ptr + row, mask=is_real, other=0) == _BROKEN
    first = tl.load(first_ptr + row, mask=is_real, other=0)
    spoilt = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, width, BLOCK):
        token = start + tl.arange(0, BLOCK)
        flags = tl.load(is_spoilt_ptr + first + token, mask=token < width, other=0)
        spoilt = spoilt | flags.to(tl.int32)
    token_id = tl.load(ids_ptr + row).to(tl.int32)
    logprob = tl.load(logprobs_ptr + row).to(tl.int32, bitcast=True)
    status = tl.where(samples, tl.load(status_ptr + row).to(tl.int32), 0)
    status = tl.where(tl.max(spoilt, axis=0) > 0, _NON_FINITE, status)
    tl.store(result_ptr + row, tl.where(samples, token_id, 0), mask=is_real)
    tl.store(result_ptr + stride + row, tl.where(samples, logprob, 0), mask=is_real)
    tl.store(result_ptr + 2 * stride + row, tl.where(is_broken, _BROKEN, status), mask=is_real)
    slot = tl.load(rows_ptr + row, mask=is_real, other=0).to(tl.int64)
    tl.store(last_token_ptr + slot, token_id, mask=samples & (is_broken == 0))


def pack(
    inputs: StepTensors,
    slots: SlotTensors,
    draws: PlainDraws,
    is_spoilt_T: Tensor,
    packet: Tensor,
    results: Tensor,
) -> None:
    """Fill the result block that the packet names, and remember what the rows drew.

    Args:
        inputs: of the step.
        slots: whose last tokens change.
        draws: one a row, padding included; those of rows that sample nothing are not looked at.
        is_spoilt_T: bool, tokens whose hidden states are not finite.
        packet: int32, of the step.
        results: uint8 [blocks, bytes], the result blocks; see ``exec.readback``.
    """
    results = results.view(torch.int32)
    _pack_kernel[(len(draws.ids_N),)](
        packet, results, inputs.rows_5R, inputs.first_R,
        inputs.status_R, is_spoilt_T, draws.ids_N, draws.logprobs_N, draws.status_N,
        slots.last_token, inputs.rows_5R.stride(0), results.stride(0), BLOCK=128,
    )  # fmt: skip
