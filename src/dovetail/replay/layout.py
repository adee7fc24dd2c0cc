# pyright: strict
"""Arranging per-token values the way trainers do: pad, pack, slice, divide into micro-batches.

Owns no values: each function takes any per-token tensors, so that tokens, losses and the index
of ``packing.TokenTable`` go through one and the same code, and cannot come apart. Must not know
routes.

Shape legend: S sequences, T tokens of one, B rows, C columns.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def pad_right(rows: Sequence[Tensor], *, fill: float = -1, width: int | None = None) -> Tensor:
    """Return [B, C]: each row [T] at the left, ``fill`` after it.

    Args:
        rows: tensors [T] of one dtype, of any lengths.
        fill: at pads; -1 is what an index wants.
        width: columns; None is the longest row.

    Raises:
        ValueError: a row is longer than ``width``, or there are no rows.
    """
    out = _filled(rows, fill, width)
    for at, row in enumerate(rows):
        out[at, : len(row)] = row
    return out


def pad_left(rows: Sequence[Tensor], *, fill: float = -1, width: int | None = None) -> Tensor:
    """Return [B, C]: each row [T] at the right, ``fill`` before it; see ``pad_right``."""
    out = _filled(rows, fill, width)
    for at, row in enumerate(rows):
        out[at, out.shape[1] - len(row) :] = row
    return out


def pack(
    rows: Sequence[Tensor], *, fill: float = -1, multiple_of: int = 1
) -> tuple[Tensor, Tensor]:
    """Return the rows one after another [1, C], and where each begins: int32 [B + 1].

    Args:
        rows: tensors [T] of one dtype.
        fill: at the pads that ``multiple_of`` asks for; they belong to no row.
        multiple_of: C is rounded up to it.

    Returns:
        values [1, C], and ``cu_seqlens``, which ends where the last row does.

    Raises:
        ValueError: there are no rows.
    """
    _expect_rows(rows)
    lengths = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int32)
    flat = torch.cat(list(rows))
    num_pads = -len(flat) % multiple_of
    return torch.cat([flat, flat.new_full((num_pads,), fill)])[None], lengths.cumsum(0).int()


def micro_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Return groups of sequences, each of at most ``max_tokens`` tokens: first fit, longest first.

    Raises:
        ValueError: a sequence is longer than ``max_tokens``.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        length = lengths[number]
        if length > max_tokens:
            raise ValueError(f"sequence {number} has {length} tokens; max_tokens is {max_tokens}")
        at = next((at for at, left in enumerate(room) if left >= length), len(groups))
        if at == len(groups):
            groups.append([])
            room.append(max_tokens)
        groups[at].append(number)
        room[at] -= length
    return groups


def sequence_slice(values: Tensor, *, rank: int, size: int) -> Tensor:
    """Return what sequence parallelism gives to ``rank``: columns [..., C / size], in order.

    Raises:
        ValueError: ``size`` does not divide the columns.
    """
    return _chunks(values, size)[rank]


def context_slice(
    values: Tensor, *, rank: int, size: int, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return what context parallelism gives to ``rank``: of 2 ``size`` chunks two.

    They are the one at ``rank`` from the front and the one from the back, so that causal
    attention is as much work on each rank.

    Args:
        values: [..., C].
        rank, size: of the context-parallel group.
        cu_seqlens: int [B + 1] where values are packed: then each sequence is divided by itself.

    Raises:
        ValueError: 2 ``size`` does not divide the columns, or those of a packed sequence.
    """
    borders = [0, values.shape[-1]] if cu_seqlens is None else [int(at) for at in cu_seqlens]
    parts: list[Tensor] = []
    for begin, end in pairwise(borders):
        chunks = _chunks(values[..., begin:end], 2 * size)
        parts += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(parts, dim=-1)


def _chunks(values: Tensor, count: int) -> tuple[Tensor, ...]:
    columns = values.shape[-1]
    if columns % count:
        raise ValueError(f"{columns} columns do not divide into {count}; pad them first")
    width = columns // count
    return tuple(values[..., at * width : (at + 1) * width] for at in range(count))


def _filled(rows: Sequence[Tensor], fill: float, width: int | None) -> Tensor:
    _expect_rows(rows)
    longest = max(len(row) for row in rows)
    if width is not None and longest > width:
        raise ValueError(f"a row has {longest} tokens; width is {width}")
    return rows[0].new_full((len(rows), longest if width is None else width), fill)


def _expect_rows(rows: Sequence[Tensor]) -> None:
    if not rows:
        raise ValueError("there are no rows")
