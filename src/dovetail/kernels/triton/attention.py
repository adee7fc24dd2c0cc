"""Paged attention: one kernel for decode rows, drafts and prompt chunks.

A program takes one work item and one KV head, and all query heads that read it: a tile of queries,
token by token and head by head, goes through a range of keys with an online softmax (Dao et al.,
arXiv 2205.14135). Where a tile's keys are divided (arXiv 2311.01282), each item leaves a partial
result, and the last to arrive joins them, in the order of the items: no second launch, and the same
bits whoever was last.

Shape legend: as in ``kernels.backend``; Q queries of a tile, Z partial results.
"""

import math

import torch
import triton.language as tl
from torch import Tensor

from dovetail.kernels.backend import KEY_BLOCK, QueryTiles, WorkItems
from dovetail.kernels.triton.jit import jit
from dovetail.kernels.triton.tiles import AttentionTiles, SplitTiles, power_of_two

_LOG2_E = math.log2(math.e)


@jit(do_not_specialize=["TILES", "ITEMS"])
def _split_kernel(
    tiles_ptr, items_ptr, TILES, ITEMS, WINDOW: tl.constexpr, KEY_BLOCK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr, EXTRA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for all tiles. With n of them there are at most n + EXTRA items.

    For a tile of b blocks gets ceil(b / chunk) items, where chunk is at least sum(b) / EXTRA. Of
    these, divided tiles, which have more than chunk blocks, get at most 2 EXTRA.
    """
    tile = tl.arange(0, BLOCK)
    is_real = tile < TILES
    fields = tiles_ptr + tile * 4
    slot = tl.load(fields, mask=is_real, other=0)
    first_token = tl.load(fields + 1, mask=is_real, other=0)
    num_tokens = tl.load(fields + 2, mask=is_real, other=0)
    kv_len = tl.load(fields + 3, mask=is_real, other=0)

    begin = tl.zeros((BLOCK,), tl.int32)
    if WINDOW is not None:
        begin = tl.maximum(kv_len - num_tokens + 1 - WINDOW, 0) // KEY_BLOCK * KEY_BLOCK
    blocks = tl.where(num_tokens > 0, tl.cdiv(kv_len - begin, KEY_BLOCK), 0)
    chunk = tl.maximum(tl.max(blocks, axis=0), 1)
    if EXTRA > 0:
        chunk = tl.maximum(tl.cdiv(tl.sum(blocks, axis=0), EXTRA), MIN_BLOCKS)
    parts = tl.where(num_tokens > 0, tl.maximum(tl.cdiv(blocks, chunk), 1), 0)
    divided, whole = tl.where(parts > 1, parts, 0), tl.where(parts == 1, 1, 0)
    num_divided = tl.sum(divided, axis=0)
    num_items = num_divided + tl.sum(whole, axis=0)
    # Of whole tiles the last comes first: of a chunk it has the most keys.
    first = tl.where(parts > 1, tl.cumsum(divided) - divided, num_items - tl.cumsum(whole))

    for part in range(tl.max(parts, axis=0)):
        is_part = part < parts
        kv_begin = begin + part * chunk * KEY_BLOCK
        item = items_ptr + (first + part) * 8
        tl.store(item, slot, mask=is_part)
        tl.store(item + 1, first_token, mask=is_part)
        tl.store(item + 2, num_tokens, mask=is_part)
        tl.store(item + 3, kv_len, mask=is_part)
        tl.store(item + 4, kv_begin, mask=is_part)
        tl.store(item + 5, tl.minimum(kv_begin + chunk * KEY_BLOCK, kv_len), mask=is_part)
        tl.store(item + 6, first, mask=is_part)
        tl.store(item + 7, parts, mask=is_part)
    for start in range(0, ITEMS, BLOCK):
        unused = start + tile
        is_unused = (unused >= num_items) & (unused < ITEMS)
        tl.store(items_ptr + unused * 8 + 2, 0, mask=is_unused)


def split_keys(
    queries: QueryTiles, *, num_kv_heads: int, window: int | None, tiles: SplitTiles
) -> WorkItems:
    """See ``kernels.backend.Kernels.split_keys``."""
    assert tiles.min_keys % KEY_BLOCK == 0
    num_tiles = len(queries.tiles_N4)
    num_items = num_tiles + tiles.num_extra
    work = WorkItems(
        items_W8=queries.tiles_N4.new_empty(num_items, 8),
        arrivals_WK=queries.tiles_N4.new_zeros(num_items, num_kv_heads),
        num_partials=2 * tiles.num_extra,
        max_tokens=queries.max_tokens,
        window=window,
    )
    _split_kernel[(1,)](
        queries.tiles_N4, work.items_W8, num_tiles, num_items, WINDOW=window, KEY_BLOCK=KEY_BLOCK,
        MIN_BLOCKS=tiles.min_keys // KEY_BLOCK, EXTRA=tiles.num_extra,
        BLOCK=power_of_two(num_tiles), num_warps=4,
    )  # fmt: skip
    return work


@jit
def _go_through(
    acc, top, total, q, position, k_ptr, v_ptr, pages_ptr, begin, end, scale, slot_stride,
    DIM: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr,
    MASKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys ``[begin, end)`` into the softmax; without MASKS all are seen by all queries.

    ``end - begin`` is then a multiple of KEYS. Scores are in units of log 2.
    """
    dim = tl.arange(0, DIM)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        is_cached = key < end
        page = tl.load(pages_ptr + key // PAGE, mask=is_cached, other=0).to(tl.int64)
        offsets = (page * PAGE + key % PAGE)[:, None] * slot_stride + dim[None, :]
        k = tl.load(k_ptr + offsets, mask=is_cached[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if MASKS:
            is_seen = is_cached[None, :] & (key[None, :] <= position[:, None])
            if WINDOW is not None:
                is_seen &= key[None, :] > position[:, None] - WINDOW
            score = tl.where(is_seen, score, float("-inf"))
        above = tl.maximum(top, tl.max(score, axis=1))
        origin = tl.where(above == float("-inf"), 0.0, above)
        share = tl.exp2(score - origin[:, None])
        rescale = tl.exp2(top - origin)
        total = total * rescale + tl.sum(share, axis=1)
        v = tl.load(v_ptr + offsets, mask=is_cached[:, None], other=0.0)
        acc = tl.dot(share.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        top = above
    return acc, top, total


@jit
def _arrive(
    acc, top, total, partial_ptr, state_ptr, arrivals_ptr, cell,
    QUERIES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Leave a partial result; return how many of its tile there are now."""
    query, dim = tl.arange(0, QUERIES), tl.arange(0, DIM)
    cell = cell.to(tl.int64) * QUERIES + query
    tl.store(state_ptr + 2 * cell, top)
    tl.store(state_ptr + 2 * cell + 1, total)
    tl.store(partial_ptr + cell[:, None] * DIM + dim[None, :], acc)
    tl.debug_barrier()  # all threads have stored before one of them says so
    return tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") + 1


@jit
def _join(
    partial_ptr, state_ptr, first_item, num_items, head,
    KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Sum the partial results of a tile, in order."""
    query, dim = tl.arange(0, QUERIES), tl.arange(0, DIM)
    top, total = tl.full((QUERIES,), float("-inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, DIM), tl.float32)
    for item in range(first_item, first_item + num_items):
        cell = (item * KV_HEADS + head).to(tl.int64) * QUERIES + query
        # Past the first-level cache, which does not see what other processors write.
        item_top = tl.load(state_ptr + 2 * cell, cache_modifier=".cg")
        item_total = tl.load(state_ptr + 2 * cell + 1, cache_modifier=".cg")
        item_acc = tl.load(
            partial_ptr + cell[:, None] * DIM + dim[None, :], cache_modifier=".cg"
        )  # fmt: skip
        above = tl.maximum(top, item_top)
        origin = tl.where(above == float("-inf"), 0.0, above)
        mine, its = tl.exp2(top - origin), tl.exp2(item_top - origin)
        total = total * mine + item_total * its
        acc = acc * mine[:, None] + item_acc * its[:, None]
        top = above
    return acc, top, total


@jit
def _normalise(acc, top, total, sinks_ptr, query_head):
    """Divide by the sum of the softmax; zeros where there was no key."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + query_head).to(tl.float32) * 1.4426950408889634
        above = tl.maximum(top, sink)
        total = total * tl.exp2(top - above) + tl.exp2(sink - above)
        acc *= tl.exp2(top - above)[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, pages_ptr, items_ptr, arrivals_ptr, partial_ptr, state_ptr,
    sinks_ptr, scale, q_stride, slot_stride, pages_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``sinks_ptr`` None: no sinks. Query i of a tile is head i % GROUP of token i // GROUP."""
    item, head = tl.program_id(0), tl.program_id(1)
    fields = items_ptr + item * 8
    num_tokens = tl.load(fields + 2)
    if num_tokens == 0:
        return
    first_position = tl.load(fields + 3) - num_tokens
    kv_begin, kv_end = tl.load(fields + 4), tl.load(fields + 5)
    first_item, num_items = tl.load(fields + 6), tl.load(fields + 7)

    query, dim = tl.arange(0, QUERIES), tl.arange(0, DIM)
    token, query_head = query // GROUP, head * GROUP + query % GROUP
    is_query = (token < num_tokens)[:, None]
    row = (tl.load(fields + 1) + token).to(tl.int64)
    offsets = query_head[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + row[:, None] * q_stride + offsets, mask=is_query, other=0.0)

    k_ptr += head * DIM
    v_ptr += head * DIM
    pages_ptr += tl.load(fields).to(tl.int64) * pages_stride
    acc = tl.zeros((QUERIES, DIM), tl.float32)
    top, total = tl.full((QUERIES,), float("-inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    masked_from = kv_begin
    if WINDOW is None:  # the keys up to the first query's own need no mask
        seen_by_all = tl.minimum(first_position + 1, kv_end) - kv_begin
        masked_from = kv_begin + tl.maximum(seen_by_all, 0) // KEYS * KEYS
        acc, top, total = _go_through(
            acc, top, total, q, first_position + token, k_ptr, v_ptr, pages_ptr, kv_begin,
            masked_from, scale, slot_stride, DIM, PAGE, WINDOW, KEYS, False, PRECISION,
        )  # fmt: skip
    acc, top, total = _go_through(
        acc, top, total, q, first_position + token, k_ptr, v_ptr, pages_ptr, masked_from,
        kv_end, scale, slot_stride, DIM, PAGE, WINDOW, KEYS, True, PRECISION,
    )  # fmt: skip

    is_done = num_items == 1
    if num_items > 1:
        arrivals_ptr += first_item * KV_HEADS + head
        arrived = _arrive(
            acc, top, total, partial_ptr, state_ptr, arrivals_ptr, item * KV_HEADS + head,
            QUERIES, DIM,
        )  # fmt: skip
        is_done = arrived == num_items
        if is_done:
            tl.store(arrivals_ptr, 0)
            acc, top, total = _join(
                partial_ptr, state_ptr, first_item, num_items, head, KV_HEADS, QUERIES, DIM
            )
    out = _normalise(acc, top, total, sinks_ptr, query_head)
    tl.store(
        out_ptr + row[:, None] * (KV_HEADS * GROUP * DIM) + offsets,
        out.to(out_ptr.dtype.element_ty), mask=is_query & is_done,
    )  # fmt: skip


def paged_attention(
    q_THD: Tensor,
    k_cache_CKD: Tensor,
    v_cache_CKD: Tensor,
    *,
    page_table_SB: Tensor,
    page_size: int,
    work: WorkItems,
    sinks_H: Tensor | None = None,
    out_THD: Tensor | None = None,
    tiles: AttentionTiles,
) -> Tensor:
    """See ``kernels.backend.Kernels.paged_attention``; D must be a power of two, 16 or more."""
    num_tokens, num_heads, dim = q_THD.shape
    num_kv_heads = k_cache_CKD.shape[1]
    group = num_heads // num_kv_heads
    assert dim & (dim - 1) == 0 and page_size & (page_size - 1) == 0
    assert q_THD.stride()[1:] == k_cache_CKD.stride()[1:] == (dim, 1)
    assert k_cache_CKD.stride() == v_cache_CKD.stride() and page_table_SB.stride(1) == 1
    if out_THD is None:
        out_THD = q_THD.new_empty(num_tokens, num_heads, dim)
    num_queries = max(16, power_of_two(work.max_tokens * group))
    partial_shape = (work.num_partials, num_kv_heads, num_queries)
    partial_ZKQD = q_THD.new_empty(*partial_shape, dim, dtype=torch.float32)
    state_ZKQ2 = q_THD.new_empty(*partial_shape, 2, dtype=torch.float32)
    _attend_kernel[(len(work.items_W8), num_kv_heads)](
        q_THD, k_cache_CKD, v_cache_CKD, out_THD, page_table_SB, work.items_W8, work.arrivals_WK,
        partial_ZKQD, state_ZKQ2, sinks_H, dim**-0.5 * _LOG2_E,
        q_THD.stride(0), k_cache_CKD.stride(0), page_table_SB.stride(0),
        KV_HEADS=num_kv_heads, GROUP=group, DIM=dim, PAGE=page_size, WINDOW=work.window,
        QUERIES=num_queries, KEYS=tiles.keys,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out_THD
