"""Paged attention in Triton against the plain one, in a cache that is NaN around the tokens."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from dovetail.kernels.backend import KEY_BLOCK, QueryTiles, WorkItems
from dovetail.kernels.ref.backend import RefKernels
from dovetail.kernels.triton import attention
from dovetail.kernels.triton.backend import TritonKernels
from dovetail.kernels.triton.tiles import AttentionTiles, SplitTiles, TileTable
from tests.support.gpu import DEVICE, assert_near, ints, randn
from tests.support.paged import Row, Step, make_step

REF = RefKernels()
TILES = AttentionTiles(keys=32, num_warps=4, num_stages=2)
DIVIDED = SplitTiles(num_extra=6, min_keys=KEY_BLOCK)
WHOLE = SplitTiles(num_extra=0, min_keys=KEY_BLOCK)
DECODE = [Row(0, 1), Row(200, 1), Row(63, 1), Row(64, 1)]
CHUNKS = [Row(0, 19), Row(70, 9), Row(30, 5)]  # 30: a mask begins amid a turn of 32 keys


def expected(step: Step, window: int | None = None, sinks: torch.Tensor | None = None):
    """In float64, without padding."""
    queries = step.queries(max_tokens=64)
    num_heads, dim = step.q_THD.shape[1:]
    work = REF.split_keys(
        queries,
        num_heads=num_heads,
        num_kv_heads=step.k_cache_CKD.shape[1],
        head_dim=dim,
        window=window,
    )
    wide = (x.double() for x in (step.q_THD, step.k_cache_CKD, step.v_cache_CKD))
    return REF.paged_attention(
        *wide, page_table_SB=step.page_table_SB, page_size=step.page_size, work=work, sinks_H=sinks
    )


def attend(step: Step, work: WorkItems, tiles: AttentionTiles = TILES, **options):
    return attention.paged_attention(
        step.q_THD,
        step.k_cache_CKD,
        step.v_cache_CKD,
        page_table_SB=step.page_table_SB,
        page_size=step.page_size,
        work=work,
        tiles=tiles,
        **options,
    )


def split(step: Step, queries: QueryTiles, tiles: SplitTiles, window: int | None = None):
    return attention.split_keys(
        queries, num_kv_heads=step.k_cache_CKD.shape[1], window=window, tiles=tiles
    )


# -- results ----------------------------------------------------------------------------------

CASES = {
    "decode": {"rows": DECODE},
    "decode, divided": {"rows": DECODE, "tiles": DIVIDED},
    "decode, single pages": {"rows": DECODE, "tiles": DIVIDED, "page_size": 1},
    "decode, large pages": {"rows": DECODE, "tiles": DIVIDED, "page_size": 64},
    "drafts": {"rows": [Row(130, 4), Row(0, 3), Row(61, 4)], "max_tokens": 4, "tiles": DIVIDED},
    "chunks": {"rows": CHUNKS, "max_tokens": 8},
    "chunks, divided": {"rows": CHUNKS, "max_tokens": 16, "tiles": DIVIDED},
    "chunks, single pages": {"rows": CHUNKS, "max_tokens": 16, "page_size": 1},
    "a KV head a query head": {"rows": DECODE, "heads": (3, 3, 32), "tiles": DIVIDED},
    "groups of three": {"rows": CHUNKS, "heads": (6, 2, 32), "max_tokens": 8},
    "groups of eight": {"rows": DECODE, "heads": (16, 2, 64), "tiles": DIVIDED},
    "heads of 128": {"rows": CHUNKS, "heads": (2, 1, 128), "max_tokens": 16},
    "window": {"rows": DECODE, "window": 50, "tiles": DIVIDED},
    "window over chunks": {"rows": CHUNKS, "window": 7, "max_tokens": 8},
    "window over divided chunks": {"rows": [Row(250, 16)], "window": 170, "max_tokens": 16,
                                       "tiles": DIVIDED},
    "sinks": {"rows": DECODE, "sinks": True, "tiles": DIVIDED},
    "sinks over chunks": {"rows": CHUNKS, "sinks": True, "max_tokens": 8},
    "float16": {"rows": [*DECODE, *CHUNKS], "max_tokens": 8, "dtype": torch.float16},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_plain_attention(name: str) -> None:
    case = {"heads": (4, 2, 32), "page_size": 16, "dtype": torch.float32} | CASES[name]
    rows = case.pop("rows")
    tiles, max_tokens = case.pop("tiles", WHOLE), case.pop("max_tokens", 1)
    window, has_sinks = case.pop("window", None), case.pop("sinks", False)
    step = make_step(rows, num_padding=2, **case)
    sinks_H = randn(step.q_THD.shape[1], seed=9) if has_sinks else None
    work = split(step, step.queries(max_tokens), tiles, window)
    if tiles is DIVIDED:
        assert (work.items_W8[:, 7] > 1).any(), "nothing is divided: the case tests nothing"
    ours = attend(step, work, sinks_H=sinks_H)
    # Probabilities are rounded before they weight the values: hence twice.
    rounding = 0.0 if case["dtype"] == torch.float32 else torch.finfo(case["dtype"]).eps
    assert_near(ours[:-2], expected(step, window, sinks_H)[:-2], rounding=rounding)
    assert ours[-2:].eq(0).all(), "padding gets zeros"


def test_lists_of_one_step_share_the_output() -> None:
    step = make_step(
        [*DECODE, *CHUNKS], heads=(4, 2, 32), page_size=16, dtype=torch.float32, num_padding=3
    )
    out_THD = torch.full_like(step.q_THD, torch.nan)
    for is_decode, max_tokens, tiles in ((True, 1, DIVIDED), (False, 8, WHOLE)):
        keep = [(row.width == 1) == is_decode for row in step.rows]
        keep[-1] = not is_decode
        work = split(step, step.queries(max_tokens, keep), tiles)
        assert attend(step, work, out_THD=out_THD) is out_THD
    assert_near(out_THD, expected(step), rounding=0.0)


def test_reads_the_undivided_list_of_the_reference() -> None:
    step = make_step(CHUNKS, heads=(4, 2, 32), page_size=16, dtype=torch.float32)
    work = REF.split_keys(step.queries(8), num_heads=4, num_kv_heads=2, head_dim=32)
    assert_near(attend(step, work), expected(step), rounding=0.0)


def test_a_list_can_be_used_again_and_gives_the_same_bits() -> None:
    step = make_step(DECODE, heads=(4, 2, 32), page_size=16, dtype=torch.float32)
    work = split(step, step.queries(1), DIVIDED)
    first = attend(step, work)
    assert work.arrivals_WK.eq(0).all()
    assert torch.equal(attend(step, work), first)


def test_strided_queries_and_caches() -> None:
    """q as a view of the fused projection; keys and values side by side in one pool."""
    step = make_step(DECODE, heads=(4, 2, 32), page_size=16, dtype=torch.float32)
    pool = torch.stack((step.k_cache_CKD, step.v_cache_CKD), dim=1)
    wide_q = torch.cat((step.q_THD, step.q_THD * torch.nan), dim=1)
    strided = Step(
        step.rows, 0, wide_q[:, :4], pool[:, 0], pool[:, 1], step.page_table_SB.int(), 16
    )
    work = split(step, step.queries(1), DIVIDED)
    assert torch.equal(attend(strided, work), attend(step, work))


# -- the division of keys ---------------------------------------------------------------------

TILE = st.tuples(st.integers(0, 4), st.integers(0, 700)).map(
    lambda pair: (pair[0], max(pair) if pair[1] else 0)
)


@settings(deadline=None, max_examples=50)
@given(
    tiles=st.lists(TILE, min_size=1, max_size=9),
    num_extra=st.integers(0, 8),
    min_blocks=st.integers(1, 3),
    window=st.sampled_from([None, 1, 100, 129]),
)
def test_items_cover_the_keys_of_each_tile_once(tiles, num_extra, min_blocks, window) -> None:
    listed = [(slot, 10 * slot, n, kv_len) for slot, (n, kv_len) in enumerate(tiles)]
    work = attention.split_keys(
        QueryTiles(ints(listed), 4),
        num_kv_heads=2,
        window=window,
        tiles=SplitTiles(num_extra=num_extra, min_keys=min_blocks * KEY_BLOCK),
    )
    assert work.items_W8.shape == (len(tiles) + num_extra, 8)
    assert work.arrivals_WK.shape == (len(tiles) + num_extra, 2)
    items = work.items_W8.tolist()
    used = 0
    for slot, first_token, num_tokens, kv_len in listed:
        mine = [i for i, item in enumerate(items) if item[2] and item[0] == slot]
        assert bool(mine) == (num_tokens > 0)
        if not mine:
            continue
        used += len(mine)
        assert mine == list(range(mine[0], mine[0] + len(mine)))
        reached = None
        for index in mine:
            *tile, begin, end, first_item, num_items = items[index]
            assert tile == [slot, first_token, num_tokens, kv_len]
            assert (first_item, num_items) == (mine[0], len(mine))
            assert begin % KEY_BLOCK == 0 and begin <= end
            assert reached is None or begin == reached
            if reached is None:
                seen = 0 if window is None else max(0, kv_len - num_tokens + 1 - window)
                assert begin <= seen < begin + KEY_BLOCK or kv_len == 0
            reached = end
        assert reached == kv_len
        if len(mine) > 1:
            assert mine[-1] < work.num_partials
            assert all(items[i][5] - items[i][4] >= min_blocks * KEY_BLOCK for i in mine[:-1])
    assert used == sum(1 for item in items if item[2])


# -- on the GPU -------------------------------------------------------------------------------

SHAPES = {"0.6b": (16, 8, 128), "30b-a3b": (32, 4, 128), "small-heads": (8, 2, 64)}


def gpu_step(shape: str, rows: list[Row], page_size: int = 16, num_padding: int = 0) -> Step:
    return make_step(
        rows,
        heads=SHAPES[shape],
        page_size=page_size,
        dtype=torch.bfloat16,
        num_padding=num_padding,
    )


def through_table(
    step: Step,
    max_tokens: int,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    ours = TritonKernels(TileTable(torch.cuda.get_device_properties(0).multi_processor_count))
    num_heads, dim = step.q_THD.shape[1:]
    work = ours.split_keys(
        step.queries(max_tokens),
        num_heads=num_heads,
        num_kv_heads=step.k_cache_CKD.shape[1],
        head_dim=dim,
        window=window,
    )
    return ours.paged_attention(
        step.q_THD,
        step.k_cache_CKD,
        step.v_cache_CKD,
        page_table_SB=step.page_table_SB,
        page_size=step.page_size,
        work=work,
        sinks_H=sinks_H,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("batch", [1, 3, 32, 256])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_on_the_gpu(shape: str, batch: int, page_size: int) -> None:
    rows = [Row((271 + 997 * i * i) % 1500 if i % 17 else 5000, 1) for i in range(batch)]
    step = gpu_step(shape, rows, page_size, num_padding=5)
    ours = through_table(step, 1)
    assert_near(ours[:-5], expected(step)[:-5], rounding=2**-7)
    assert ours[-5:].eq(0).all()


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_on_the_gpu(shape: str, page_size: int, window: int | None) -> None:
    rows = [Row(0, 1000), Row(3000, 77), Row(513, 300), Row(9, 1)]
    step = gpu_step(shape, rows, page_size, num_padding=30)
    group = SHAPES[shape][0] // SHAPES[shape][1]
    for max_tokens in (TileTable(132).prefill_tokens(group), 8):
        ours = through_table(step, max_tokens, window)
        assert_near(ours[:-30], expected(step, window)[:-30], rounding=2**-7)
        assert ours[-30:].eq(0).all()


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("max_tokens", [1, 16])
def test_sinks_and_windows_on_the_gpu(max_tokens: int, page_size: int, window: int | None) -> None:
    """Of decode rows and of chunks; windows that begin within a page, and before the row."""
    lens = (0, 1, 63, 299, 300, 301, 1571, 4000)
    step = gpu_step("30b-a3b", [Row(n, max_tokens) for n in lens], page_size, num_padding=5)
    sinks_H = 3 * randn(step.q_THD.shape[1], seed=9)
    ours = through_table(step, max_tokens, window, sinks_H)
    assert_near(ours[:-5], expected(step, window, sinks_H)[:-5], rounding=2**-7)
    assert ours[-5:].eq(0).all()


@pytest.mark.cuda
def test_divided_rows_give_the_same_bits_a_thousand_times() -> None:
    """The last item to arrive joins them: whoever that is, and whatever it can see."""
    step = gpu_step("0.6b", [Row(3000 + 100 * i, 1) for i in range(7)])
    work = split(step, step.queries(1), SplitTiles(num_extra=60, min_keys=KEY_BLOCK))
    assert (work.items_W8[:, 7] > 1).any()
    first = attend(step, work)
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        different += (attend(step, work) != first).any()
    assert different.item() == 0
    assert_near(first, expected(step), rounding=2**-7)


@pytest.mark.cuda
def test_pools_beyond_2_to_the_31_elements() -> None:
    step = gpu_step("30b-a3b", [Row(100, 1), Row(40, 1)])
    num_slots = 2**31 // (4 * 128) + 4096
    offset_pages = num_slots // 16 - len(step.k_cache_CKD) // 16
    caches = []
    for small in (step.k_cache_CKD, step.v_cache_CKD):
        large = torch.full((num_slots, 4, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        large[offset_pages * 16 :][: len(small)] = small
        caches.append(large)
    far = Step(step.rows, 0, step.q_THD, *caches, step.page_table_SB + offset_pages, 16)
    assert torch.equal(through_table(far, 1), through_table(step, 1))
