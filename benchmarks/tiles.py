"""Which tiles are fastest on this GPU, op by op: what ``kernels.triton.tiles`` should say.

    python -m benchmarks.tiles --out tiles.jsonl [--only attention experts] [--jobs 12]

Each candidate is compiled first, by several processes, then all are timed one after another. A line
has the best candidates of a case and the table's own choice, in microseconds a call.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_line, describe_run
from benchmarks.gpu_kernels import PAGE_SIZE, SHAPES, Shape, randn
from benchmarks.gpu_rates import gpu_facts, graph_us
from dovetail.kernels.backend import QueryTiles
from dovetail.kernels.triton import attention, experts
from dovetail.kernels.triton.tiles import (
    AttentionTiles,
    GemmTiles,
    GroupedTiles,
    SplitTiles,
    TileTable,
)

DEVICE = torch.device("cuda")
NUM_BEST = 3


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
        make: from tiles to a call; the inputs are made once.
        candidates: tiles to try, the table's own first.
    """

    op: str
    shape: str
    size: str
    make: Callable[[Any], Callable[[int], object]]
    candidates: list[Any]


def table() -> TileTable:
    return TileTable(torch.cuda.get_device_properties(DEVICE).multi_processor_count)


def decode_case(name: str, shape: Shape, batch: int, context: int) -> Case:
    """Decode attention with its split: one token a row."""
    pages = -(-context // PAGE_SIZE)
    pool = (batch * pages * PAGE_SIZE, shape.kv_heads, shape.head_dim)
    k_cache, v_cache = randn(*pool), randn(*pool)
    page_table = torch.randperm(batch * pages, device=DEVICE, dtype=torch.int32).view(batch, pages)
    q = randn(batch, shape.heads, shape.head_dim)
    rows = torch.tensor([(r, r, 1, context) for r in range(batch)], dtype=torch.int32)
    queries = QueryTiles(rows.to(DEVICE), 1)

    def make(tiles: tuple[AttentionTiles, SplitTiles]) -> Callable[[int], object]:
        work = attention.split_keys(
            queries, num_kv_heads=shape.kv_heads, window=None, tiles=tiles[1]
        )
        return lambda _: attention.paged_attention(
            q,
            k_cache,
            v_cache,
            page_table_SB=page_table,
            page_size=PAGE_SIZE,
            work=work,
            tiles=tiles[0],
        )

    own = table()
    split = own.split(batch, 1, shape.kv_heads)
    programs = (batch + split.num_extra) * shape.kv_heads
    chosen = own.attention(shape.heads // shape.kv_heads, 2 * shape.head_dim, programs)
    others = [
        (AttentionTiles(keys, warps, stages), split)
        for keys, warps, stages in itertools.product((32, 64, 128), (2, 4), (2, 3, 4))
    ]
    splits = [
        (chosen, SplitTiles(split.num_extra * factor, keys))
        for factor, keys in itertools.product((1, 2), (64, 128, 256, 512))
    ]
    return Case("decode attention", name, f"{batch} x {context}", make,
                [(chosen, split), *others, *splits])  # fmt: skip


def prefill_case(name: str, shape: Shape, length: int) -> Case:
    """A whole prompt in one chunk; the tile's tokens are part of the choice."""
    pool = (length, shape.kv_heads, shape.head_dim)
    k_cache, v_cache, q = randn(*pool), randn(*pool), randn(length, shape.heads, shape.head_dim)
    page_table = torch.randperm(length // PAGE_SIZE, device=DEVICE, dtype=torch.int32)[None]
    group = shape.heads // shape.kv_heads

    def make(tiles: tuple[AttentionTiles, int]) -> Callable[[int], object]:
        tokens = tiles[1] // group
        entries = [(0, i, tokens, i + tokens) for i in range(0, length, tokens)]
        queries = QueryTiles(torch.tensor(entries, dtype=torch.int32, device=DEVICE), tokens)
        work = attention.split_keys(
            queries, num_kv_heads=shape.kv_heads, window=None, tiles=SplitTiles(0, 64)
        )
        return lambda _: attention.paged_attention(
            q,
            k_cache,
            v_cache,
            page_table_SB=page_table,
            page_size=PAGE_SIZE,
            work=work,
            tiles=tiles[0],
        )

    own = table()
    queries = own.prefill_tokens(group) * group
    others = [
        (AttentionTiles(keys, warps, stages), num)
        for num, keys, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    ]
    chosen = own.attention(queries, 2 * shape.head_dim, length * shape.heads // queries)
    return Case("prefill attention", name, str(length), make, [(chosen, queries), *others])


def expert_case(name: str, shape: Shape, batch: int) -> Case:
    """The experts of one layer, evenly chosen."""
    width, inner, k = shape.width, shape.inner, shape.top_k
    w_up = randn(shape.num_experts, 2 * inner, width).mul_(width**-0.5)
    w_down = randn(shape.num_experts, width, inner).mul_(inner**-0.5)
    x = randn(batch, width)
    order = torch.rand(batch, shape.num_experts, device=DEVICE).argsort(dim=1)
    ids, weights = order[:, :k].to(torch.int32).contiguous(), torch.full((batch, k), 1 / k)
    weights = weights.to(DEVICE)

    def make(tiles: GroupedTiles) -> Callable[[int], object]:
        return lambda _: experts.grouped_moe(x, ids, weights, w_up, w_down, tiles=tiles)

    own = table().experts(batch, k, shape.num_experts, 2)
    assert isinstance(own, GroupedTiles)
    mean = batch * k / shape.num_experts
    rows = [r for r in (16, 32, 64, 128) if r <= 4 * mean + 12 and r >= mean / 8][-3:]
    columns = ((32, 64), (64, 128)) if mean <= 32 else ((64, 128), (128, 256), (128, 128))
    others = [
        GroupedTiles(r, GemmTiles(up, depth, warps, stages), GemmTiles(down, depth, warps, stages))
        for r, (up, down), depth, (warps, stages) in itertools.product(
            rows, columns, (64, 128), ((4, 3), (4, 4), (8, 3), (8, 4))
        )
    ]
    return Case("experts", name, str(batch), make, [own, *others])


def cases() -> Iterator[Callable[[], Case]]:
    """Every case, made when it is its turn."""
    for name, shape in SHAPES.items():
        for batch, context in ((32, 272), (256, 272), (512, 896)):
            yield lambda n=name, s=shape, b=batch, c=context: decode_case(n, s, b, c)
        for length in (1024, 4096):
            yield lambda n=name, s=shape, m=length: prefill_case(n, s, m)
    moe = SHAPES["30b-a3b"]
    for batch in (32, 128, 256, 512, 2048, 8192):
        yield lambda b=batch: expert_case("30b-a3b", moe, b)


def try_all(case: Case, timed: bool) -> list[tuple[float, Any]]:
    """Return the microseconds of each candidate that this GPU can run, the table's own first."""
    found = []
    for tiles in case.candidates:
        try:
            run = case.make(tiles)
            run(0)
            torch.cuda.synchronize()
            found.append((graph_us(run, calls=8) if timed else 0.0, tiles))
        except Exception as error:  # too much shared memory, or not to be compiled
            print(f"{case.op} {case.size} {tiles}: {str(error)[:120]}", file=sys.stderr)
            found.append((float("inf"), tiles))
    return found


def shown(tiles: Any) -> object:
    """Return tiles as JSON has them."""
    if isinstance(tiles, tuple):
        return [shown(part) for part in tiles]
    return tiles if isinstance(tiles, int) else asdict(tiles)


def main() -> None:
    """Compile, measure and write lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="ops whose name has one of these")
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile (12)")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.share is None:
        words = [sys.executable, "-m", "benchmarks.tiles", "--jobs", str(args.jobs)]
        words += ["--only", *args.only]
        jobs = [subprocess.Popen([*words, "--share", str(n)]) for n in range(args.jobs)]
        assert not any(job.wait() for job in jobs)
    facts = gpu_facts() if args.share is None else None  # those who share write no line
    about = describe_run(["-m", "benchmarks.tiles"], "triton", gpu=facts)
    about |= {"device": torch.cuda.get_device_name()}
    for make in cases():
        case = make()
        if args.only and not any(word in case.op for word in args.only):
            continue
        if args.share is not None:
            mine = case.candidates[args.share :: args.jobs]
            try_all(Case(case.op, case.shape, case.size, case.make, mine), timed=False)
            continue
        found = try_all(case, timed=True)
        own, best = found[0], sorted(found, key=lambda pair: pair[0])[:NUM_BEST]
        line: dict[str, Any] = {"work": f"tiles: {case.op}", "shape": case.shape}
        line |= {"batch": case.size, "value": round(best[0][0], 2), "unit": "us"}
        line |= {"own_us": round(own[0], 2), "own": shown(own[1])}
        line["best"] = [[round(us, 2), shown(tiles)] for us, tiles in best]
        print(json.dumps(line), flush=True)
        add_line(args.out, {"floor": None, **line, **about})


if __name__ == "__main__":
    main()
