"""From a packet to the tensors of one forward.

Owns ``unpack``: it applies the packet's state changes, then works out positions,
cache slots and work lists, so the host never sends what the device can derive. It
runs on the compute lane. This is the CPU form: device memory is host memory, and
numpy costs a fraction of a torch call on arrays this small.

Shape legend: R rows, T tokens, D decode rows, G of them in a group, P pages, S cached tokens
of a row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dovetail.attention.paged import AttentionRows, DecodeGroup
from dovetail.errors import InvariantError
from dovetail.exec.packet import PacketView
from dovetail.exec.state import DeviceState
from dovetail.sampling.state import SLOT_COLUMNS
from dovetail.sched.plan import FROM_DEVICE, ROW_FIELDS

Ints = NDArray[np.int64]

GROUP_ROWS = 32
"""Decode rows that attend in one call."""


class StepInputs:
    """The rows of the step before, kept because a steady step does not send them again.

    Engine state: changed on the compute lane only.
    """

    def __init__(self, max_rows: int) -> None:
        self._rows = np.zeros((len(ROW_FIELDS), max_rows), dtype=np.int64)

    def update(self, packet: PacketView) -> "BatchRows":
        """Return the rows of ``packet``; if it does not send any, those are the last ones."""
        for row, name in zip(self._rows, ROW_FIELDS, strict=True):
            sent = packet.fields[f"rows.{name}"]
            row[: len(sent)] = sent
        return BatchRows(*self._rows[:, : packet.num_rows])


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The plan's rows on the device; int64 [R] each, see ``sched.plan.Rows``."""

    slot: Ints
    generation: Ints
    start: Ints
    width: Ints
    samples: Ints


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Everything one forward reads.

    Attributes:
        rows: see ``BatchRows``.
        token_ids_T, positions_T, kv_slots_T: int64.
        attention: the work list.
        first_token_R: int64, index of each row's first token within the step.
        end_R: int64, cached tokens of each row after the step.
        last_token_R: int64, index of each row's last token within the step.
    """

    rows: BatchRows
    token_ids_T: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    attention: AttentionRows
    first_token_R: Ints
    end_R: Ints
    last_token_R: Ints


def apply_writes(packet: PacketView, state: DeviceState) -> None:
    """Install new tenants and page-table entries."""
    fields = packet.fields
    slots = fields["slots.slot"]
    if len(slots):
        state.generation[slots] = fields["slots.generation"]
        state.kv_len[slots] = 0
        state.last_token[slots] = -1
        state.page_table[slots] = -1
        words = {name: fields.get(f"slots.{name}", fields["seeds"]) for name in SLOT_COLUMNS}
        state.sampling.write_slots(
            slots,
            {name: words[name].view(column.wire_dtype) for name, column in SLOT_COLUMNS.items()},
        )
    if len(fields["tokens.slot"]):
        state.sampling.write_tokens(
            table=fields["tokens.table"],
            slot=fields["tokens.slot"],
            index=fields["tokens.index"],
            token_id=fields["tokens.token_id"],
            value=fields["tokens.value"].view(np.float32),
            until=fields["tokens.until"],
        )
    if len(fields["pages.slot"]):
        state.page_table[fields["pages.slot"], fields["pages.index"]] = fields["pages.page"]


def has_pages(page_table: Ints, slot_R: Ints, end_R: Ints, *, page_size: int) -> bool:
    """Return whether each row has a page for its last token; pages are told in order.

    Args:
        page_table: int64 [slots, P].
        slot_R, end_R: int64, slots, and cached tokens after the step.
        page_size: tokens of a page.
    """
    last_R, num_pages = (end_R - 1) // page_size, page_table.shape[1]
    page_R = page_table[slot_R, np.minimum(last_R, num_pages - 1)]
    return bool(((last_R < num_pages) & (page_R >= 0)).all())


def unpack(
    packet: PacketView, state: DeviceState, inputs: StepInputs, *, page_size: int
) -> DeviceBatch:
    """Apply the packet's state changes and return the tensors of its forward.

    Raises:
        InvariantError: a row's handle is stale, or it has no page for its last token.
    """
    apply_writes(packet, state)
    rows = inputs.update(packet)
    check_handles(rows.slot, rows.generation, state)
    is_decode = rows.start == FROM_DEVICE
    begin_R = np.where(is_decode, state.kv_len[rows.slot], rows.start)
    end_R = begin_R + rows.width
    if not has_pages(state.page_table, rows.slot, end_R, page_size=page_size):
        raise InvariantError("a row writes past the pages reserved for it")
    num_decode = int(is_decode.sum())
    first_token_R = np.cumsum(rows.width) - rows.width
    row_of_T = np.repeat(np.arange(len(rows.slot)), rows.width)
    positions_T = np.arange(packet.num_tokens) - first_token_R[row_of_T] + begin_R[row_of_T]
    token_ids_T = np.empty(packet.num_tokens, dtype=np.int64)
    token_ids_T[:num_decode] = state.last_token[rows.slot[:num_decode]]
    token_ids_T[num_decode:] = packet.fields["token_ids"]
    pages_T = state.page_table[rows.slot[row_of_T], positions_T // page_size]
    kv_slots_T = torch.from_numpy(pages_T * page_size + positions_T % page_size)
    return DeviceBatch(
        rows=rows,
        token_ids_T=torch.from_numpy(token_ids_T),
        positions_T=torch.from_numpy(positions_T),
        kv_slots_T=kv_slots_T,
        attention=AttentionRows(
            kv_slots_T=kv_slots_T,
            decode_groups=_decode_groups(rows.slot[:num_decode], end_R, state, page_size),
            prefill_rows=tuple(
                (
                    int(first_token_R[r]),
                    int(first_token_R[r] + rows.width[r]),
                    torch.from_numpy(sequence_slots(state, rows.slot[r], end_R[r], page_size)),
                )
                for r in range(num_decode, len(rows.slot))
            ),
        ),
        first_token_R=first_token_R,
        end_R=end_R,
        last_token_R=first_token_R + rows.width - 1,
    )


def check_handles(slots: ArrayLike, generations: ArrayLike, state: DeviceState) -> None:
    """Raise InvariantError if a handle names a tenancy that its slot does not have."""
    is_stale = state.generation[np.asarray(slots)] != np.asarray(generations)
    if is_stale.any():
        raise InvariantError(f"a plan names stale slots {np.asarray(slots)[is_stale].tolist()}")


def sequence_slots(state: DeviceState, slot: int, num_tokens: int, page_size: int) -> Ints:
    """Return the cache slots of a sequence's first ``num_tokens`` positions, int64 [N]."""
    num_pages = -(-num_tokens // page_size)
    pages = state.page_table[slot, :num_pages]
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:num_tokens]


def _decode_groups(
    slot_D: Ints, end_R: Ints, state: DeviceState, page_size: int
) -> tuple[DecodeGroup, ...]:
    """Sort the decode rows by length and cut them into groups, so that little is padded.

    Few rows are one group, in their own order.
    """
    if len(slot_D) <= GROUP_ROWS:
        order_D = np.arange(len(slot_D))
    else:
        order_D = np.argsort(end_R[: len(slot_D)], kind="stable")
    return tuple(
        _decode_group(tokens_G, slot_D[tokens_G], end_R[tokens_G], state, page_size)
        for tokens_G in (order_D[i : i + GROUP_ROWS] for i in range(0, len(slot_D), GROUP_ROWS))
    )


def _decode_group(
    tokens_G: Ints, slot_G: Ints, end_G: Ints, state: DeviceState, page_size: int
) -> DecodeGroup:
    longest = int(end_G.max())
    pages_GP = state.page_table[slot_G, : -(-longest // page_size)]
    slots_GS = (pages_GP[:, :, None] * page_size + np.arange(page_size)).reshape(len(slot_G), -1)
    slots_GS = slots_GS[:, :longest]
    is_real_GS = np.arange(longest) < end_G[:, None]
    # Padding reads the row's own first token: a stranger's memory might hold NaN.
    slots_GS = np.where(is_real_GS, slots_GS, slots_GS[:, :1])
    return DecodeGroup(
        torch.from_numpy(tokens_G), torch.from_numpy(slots_GS), torch.from_numpy(end_G)
    )
