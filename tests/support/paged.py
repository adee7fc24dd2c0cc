"""Steps for attention kernels: rows in a paged cache that is NaN wherever no token lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.kernels.backend import QueryTiles
from tests.support.gpu import DEVICE, big_randn, ints


@dataclass(frozen=True)
class Row:
    """``width`` tokens of one sequence, after ``prefix`` cached ones."""

    prefix: int
    width: int


@dataclass(frozen=True)
class Step:
    """The tensors of one step. Tokens of the rows stand in order, padding after them."""

    rows: tuple[Row, ...]
    num_padding: int
    q_THD: Tensor
    k_cache_CKD: Tensor
    v_cache_CKD: Tensor
    page_table_SB: Tensor
    page_size: int

    def queries(self, max_tokens: int, keep: Sequence[bool] | None = None) -> QueryTiles:
        """The list of these rows; of those alone that ``keep`` names. Padding goes to the last."""
        tiles, first = [], 0
        whole = keep is None or keep[-1]
        padding = [Row(-self.num_padding, self.num_padding)] if self.num_padding and whole else []
        for slot, row in enumerate([*self.rows, *padding]):
            for begin in range(0, row.width, max_tokens):
                end = min(begin + max_tokens, row.width)
                kv_len = max(0, row.prefix + end)
                if keep is None or slot >= len(keep) or keep[slot]:
                    tiles.append((slot % len(self.rows), first + begin, end - begin, kv_len))
            first += row.width
        tiles.insert(len(tiles) // 2, (0, 0, 0, 0))  # unused, and not at the end
        return QueryTiles(ints(tiles), max_tokens)


def make_step(
    rows: Sequence[Row],
    *,
    heads: tuple[int, int, int],
    page_size: int,
    dtype: torch.dtype,
    num_padding: int = 0,
    seed: int = 0,
) -> Step:
    """A step of the rows; ``heads`` = (H, K, D). Pages lie scattered."""
    num_heads, num_kv_heads, dim = heads
    generator = torch.Generator().manual_seed(seed)
    lens = [row.prefix + row.width for row in rows]
    pages = [-(-n // page_size) for n in lens]
    order = torch.randperm(sum(pages) + 2, generator=generator)
    page_table = torch.full((len(rows), max(pages) + 3), -1, dtype=torch.int64)
    kv_slots, used = [], 0
    for slot, (n, num_pages) in enumerate(zip(lens, pages, strict=True)):
        page_table[slot, :num_pages] = order[used : used + num_pages]
        used += num_pages
        keys = torch.arange(n)
        kv_slots.append(page_table[slot, keys // page_size] * page_size + keys % page_size)
    kv_slots_X = torch.cat(kv_slots).to(DEVICE)
    shape = (len(order) * page_size, num_kv_heads, dim)
    caches = []
    for index in (1, 2):
        cache = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)
        cache[kv_slots_X] = big_randn(len(kv_slots_X), *shape[1:], dtype=dtype, seed=seed + index)
        caches.append(cache)
    num_tokens = sum(row.width for row in rows) + num_padding
    q_THD = big_randn(num_tokens, num_heads, dim, dtype=dtype, seed=seed)
    return Step(tuple(rows), num_padding, q_THD, *caches, page_table.to(DEVICE), page_size)
