"""Each GPU kernel at the shapes of two models, beside its floor and what torch has.

    python -m benchmarks.gpu_kernels [--only WORD ...] [--output FILE.jsonl]

Microseconds of one call inside a CUDA graph; weights and cached keys come from memory, not from the
second-level cache, activations from wherever the call before left them. The floor is the larger of
bytes / copy rate and FLOPs / matrix-product rate of this very GPU. Prints one JSON line a case and
a table at the end. Shapes: Qwen3-0.6B ("0.6b") and Qwen3-30B-A3B ("30b-a3b").
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.common import add_line, describe_run
from benchmarks.gpu_rates import L2_BYTES, gpu_facts, graph_us
from dovetail.kernels.backend import Borders, Capture, Kernels, QueryTiles, ShapedLogits
from dovetail.kernels.registry import load_kernels
from dovetail.kernels.triton import experts
from dovetail.kernels.triton.grouped_mm import torch_grouped_moe
from dovetail.kernels.triton.tiles import GroupedTiles, RowTiles, TileTable

DEVICE = torch.device("cuda")
DECODE, PREFILL = (1, 32, 128, 256), (2048, 4096)
FEW = (1, 32, 256, 4096)
CONTEXT, PAGE_SIZE, VOCAB = 271, 16, 151_936


@dataclass(frozen=True)
class Shape:
    """The numbers of one model."""

    width: int
    heads: int
    kv_heads: int
    inner: int
    num_experts: int = 0
    top_k: int = 0
    head_dim: int = 128


SHAPES = {
    "0.6b": Shape(width=1024, heads=16, kv_heads=8, inner=3072),
    "30b-a3b": Shape(width=2048, heads=32, kv_heads=4, inner=768, num_experts=128, top_k=8),
}


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        run: one call, on the given copy of the inputs.
        num_bytes, flops: what one call must move and compute.
        baselines: other ways to the same result.
    """

    work: str
    shape: str
    batch: int
    run: Callable[[int], object]
    num_bytes: float
    flops: float = 0.0
    copies: int = 1
    baselines: dict[str, Callable[[int], object]] = field(default_factory=dict)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def row_cases(kernels: Kernels, name: str, shape: Shape) -> Iterator[Case]:
    """Norm, activation, routing."""
    for batch in FEW:
        x, residual = randn(batch, shape.width), randn(batch, shape.width)
        weight = randn(shape.width)
        yield Case(
            "add_rms_norm", name, batch,
            lambda _, x=x, r=residual, w=weight: kernels.add_rms_norm(x, r, w, 1e-6),
            num_bytes=4 * x.nbytes,
            baselines={
                "torch": lambda _, x=x, r=residual, w=weight: F.rms_norm(x + r, w.shape, w, 1e-6)
            },
        )  # fmt: skip
        if not shape.num_experts:
            both = randn(batch, 2 * shape.inner)
            yield Case(
                "silu_mul", name, batch, lambda _, x=both: kernels.silu_mul(x),
                num_bytes=1.5 * both.nbytes,
                baselines={"torch": lambda _, x=both: F.silu(x.chunk(2, 1)[0]) * x.chunk(2, 1)[1]},
            )  # fmt: skip
            continue
        logits, k = randn(batch, shape.num_experts), shape.top_k
        routes = torch.zeros(8192, 48, k, dtype=torch.uint8, device=DEVICE)
        capture = Capture(routes, torch.arange(batch, device=DEVICE), 3)
        yield Case(
            "route + capture", name, batch,
            lambda _, x=logits, k=k, c=capture: kernels.route(x, k, True, capture=c),
            num_bytes=logits.nbytes + batch * k * 9,
            baselines={"torch": lambda _, x=logits, k=k: torch.topk(x.float().softmax(-1), k)},
        )  # fmt: skip


def rotate_cases(kernels: Kernels, name: str, shape: Shape) -> Iterator[Case]:
    """Norms, rotation and the write of keys and values."""
    dim, num_kv = shape.head_dim, shape.kv_heads
    table = randn(8192, 2, dim, dtype=torch.float32)
    caches = [torch.zeros(8192, num_kv, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    norms = (randn(dim), randn(dim), 1e-6)
    for batch in FEW:
        qkv = randn(batch, (shape.heads + 2 * num_kv) * dim)
        index = torch.arange(batch, device=DEVICE)

        def run(_: int, qkv: Tensor = qkv, index: Tensor = index) -> object:
            return kernels.rotate_and_store(
                qkv, qk_norm=norms, cos_sin_P2D=table, positions_T=index, kv_slots_T=index,
                k_cache_CKD=caches[0], v_cache_CKD=caches[1],
            )  # fmt: skip

        yield Case("rotate_and_store", name, batch, run, 2 * qkv.nbytes + batch * 4 * dim)


def decode_cases(kernels: Kernels, name: str, shape: Shape) -> Iterator[Case]:
    """One token a row, after CONTEXT cached ones; one row after many."""
    for work, batch, context in (
        *(("decode attention", batch, CONTEXT) for batch in DECODE),
        ("decode attention, 8k", 1, 8192),
        ("decode attention, 8k", 32, 8192),
    ):
        pages = -(-context // PAGE_SIZE)
        row_bytes = context * shape.kv_heads * shape.head_dim * 4
        copies = max(1, min(128, -(-2 * L2_BYTES // (batch * row_bytes))))
        pool = (copies * batch * pages * PAGE_SIZE, shape.kv_heads, shape.head_dim)
        k_cache, v_cache = randn(*pool), randn(*pool)
        order = torch.randperm(copies * batch * pages, device=DEVICE)
        page_table = order.view(copies * batch, pages).int()
        q = randn(batch, shape.heads, shape.head_dim)
        works = []
        for copy in range(copies):
            rows = [(copy * batch + r, r, 1, context) for r in range(batch)]
            queries = QueryTiles(torch.tensor(rows, dtype=torch.int32, device=DEVICE), 1)
            works.append(kernels.split_keys(queries, **_numbers(shape)))

        def run(copy: int, q=q, k=k_cache, v=v_cache, table=page_table, works=works) -> object:
            return kernels.paged_attention(
                q, k, v, page_table_SB=table, page_size=PAGE_SIZE, work=works[copy]
            )

        # Gathered beforehand, which no engine could afford: the least that dense attention takes.
        dense = (copies, batch, pages * PAGE_SIZE, shape.kv_heads, shape.head_dim)
        k_dense, v_dense = k_cache.view(dense), v_cache.view(dense)

        def sdpa(copy: int, q=q, k=k_dense, v=v_dense) -> object:
            return F.scaled_dot_product_attention(
                q[:, :, None], k[copy].transpose(1, 2), v[copy].transpose(1, 2), enable_gqa=True
            )

        yield Case(
            work, name, batch, run, batch * row_bytes + 2 * q.nbytes,
            flops=4 * batch * context * shape.heads * shape.head_dim, copies=copies,
            baselines={"SDPA, gathered": sdpa},
        )  # fmt: skip


def chunk_cases(kernels: Kernels, name: str, shape: Shape) -> Iterator[Case]:
    """A whole prompt in one chunk, and a chunk of 2048 after as many cached tokens."""
    table = TileTable(torch.cuda.get_device_properties(DEVICE).multi_processor_count)
    max_tokens = table.prefill_tokens(shape.heads // shape.kv_heads)
    for work, batch, prefix in (
        *(("prefill attention", batch, 0) for batch in PREFILL),
        ("prefill attention, after as many", 2048, 2048),
    ):
        total = prefix + batch
        pool = (total, shape.kv_heads, shape.head_dim)
        k_cache, v_cache = randn(*pool), randn(*pool)
        q = randn(batch, shape.heads, shape.head_dim)
        page_table = torch.randperm(total // PAGE_SIZE, device=DEVICE)[None].int()
        tiles = [(0, i, max_tokens, prefix + i + max_tokens) for i in range(0, batch, max_tokens)]
        queries = QueryTiles(torch.tensor(tiles, dtype=torch.int32, device=DEVICE), max_tokens)
        items = kernels.split_keys(queries, **_numbers(shape))

        def run(_: int, q=q, k=k_cache, v=v_cache, table=page_table, items=items) -> object:
            return kernels.paged_attention(
                q, k, v, page_table_SB=table, page_size=PAGE_SIZE, work=items
            )

        def sdpa(_: int, q=q, k=k_cache, v=v_cache) -> object:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        pairs = batch * prefix + batch * (batch + 1) / 2
        yield Case(
            work, name, batch, run, k_cache.nbytes * 2 + q.nbytes * 2,
            flops=4 * pairs * shape.heads * shape.head_dim,
            baselines={} if prefix else {"SDPA, gathered": sdpa},
        )  # fmt: skip


def _numbers(shape: Shape) -> dict[str, int]:
    return {
        "num_heads": shape.heads, "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim,
    }  # fmt: skip


def expert_cases(kernels: Kernels, name: str, shape: Shape) -> Iterator[Case]:
    """The experts as a whole, and what the grouped way spends on each part."""
    table = TileTable(torch.cuda.get_device_properties(DEVICE).multi_processor_count)
    width, inner, k = shape.width, shape.inner, shape.top_k
    w_up = randn(shape.num_experts, 2 * inner, width).mul_(width**-0.5)
    w_down = randn(shape.num_experts, width, inner).mul_(inner**-0.5)
    for batch in (1, 2, 8, 32, 64, 128, 256, *PREFILL):
        copies = 16 if batch <= 2 else 1
        x = randn(batch, width)
        # Each copy has experts of its own as far as they last, so that their weights are cold.
        order = torch.stack([torch.randperm(shape.num_experts) for _ in range(copies * batch)])
        if batch <= 2:
            order = torch.randperm(shape.num_experts)[None].expand(copies * batch, -1)
            order = torch.stack([row.roll(-k * i) for i, row in enumerate(order)])
        ids = order[:, :k].contiguous().view(copies, batch, k).to(DEVICE, torch.int32)
        weights = torch.full((batch, k), 1 / k, device=DEVICE)
        distinct = len(ids[0].unique())
        moved = distinct * 3 * inner * width * 2 + 2 * x.nbytes
        flops = batch * k * 3 * 2 * inner * width

        def run(copy: int, x=x, ids=ids, weights=weights) -> object:
            return kernels.fused_moe(x, ids[copy], weights, w_up, w_down)

        def torchs(copy: int, x=x, ids=ids, weights=weights) -> object:
            tiles = RowTiles(num_warps=4)
            return torch_grouped_moe(x, ids[copy], weights, w_up, w_down, tiles=tiles)

        yield Case(
            f"experts ({distinct} distinct)", name, batch, run, moved, flops, copies,
            {"grouped_mm": torchs},
        )  # fmt: skip
        tiles = table.experts(batch, k, shape.num_experts, 2)
        if not isinstance(tiles, GroupedTiles):
            continue
        runs = experts.sort_slots(ids[0], shape.num_experts, rows=tiles.rows)
        y, hidden = randn(batch * k, width), randn(batch * k, inner)
        parts: dict[str, tuple[Callable[[int], object], float, float]] = {
            "sort": (
                lambda _, ids=ids, t=tiles: experts.sort_slots(ids[0], 128, rows=t.rows),
                12 * batch * k, 0,
            ),
            "up": (
                lambda _, x=x, r=runs, t=tiles: experts.up_product(
                    x, w_up, r, top_k=k, rows=t.rows, tiles=t.up
                ),
                distinct * 2 * inner * width * 2, flops * 2 / 3,
            ),
            "down": (
                lambda _, h=hidden, r=runs, t=tiles: experts.down_product(
                    h, w_down, r, rows=t.rows, tiles=t.down
                ),
                distinct * inner * width * 2, flops / 3,
            ),
            "combine": (
                lambda _, y=y, w=weights: experts.combine(y, w), y.nbytes + x.nbytes, 0,
            ),
        }  # fmt: skip
        for part, (call, part_bytes, part_flops) in parts.items():
            yield Case(f"experts: {part}", name, batch, call, part_bytes, part_flops)


def sample_cases(kernels: Kernels, name: str) -> Iterator[Case]:
    """Draws from the whole vocabulary, of float32: so the last layer leaves its logits."""
    for batch in DECODE:
        logits = randn(batch, VOCAB).float()
        index = torch.arange(batch, device=DEVICE)
        temperature = torch.full((batch,), 0.6, device=DEVICE)

        def run(_: int, logits=logits, index=index, temperature=temperature) -> object:
            return kernels.sample_plain(
                logits, temperature_N=temperature, seed_N=index, position_N=index,
                sample_index_N=index,
            )  # fmt: skip

        def torchs(_: int, logits=logits, temperature=temperature) -> object:
            scores = logits / temperature[:, None]
            shares = scores.softmax(-1)
            ids = shares.div(torch.empty_like(shares).exponential_()).argmax(-1)
            return shares.gather(1, ids[:, None]).log()

        yield Case(
            "sample_plain", name, batch, run, logits.nbytes, baselines={"torch": torchs}
        )  # fmt: skip


RULES: dict[str, tuple[float, int, float]] = {
    "nothing": (1.0, 0, 1.0),
    "top-k 50": (1.0, 50, 1.0),
    "top-p 0.95, flat": (1.0, 0, 0.95),
    "top-p 0.95, steep": (4.0, 0, 0.95),
    "top-k 50, top-p 0.95": (4.0, 50, 0.95),
}
"""Name -> spread of the logits, k, p."""


def shaped_cases(kernels: Kernels, name: str) -> Iterator[Case]:
    """Truncation alone, beside a sort, and the draw from what it leaves."""
    for batch, (rule, (spread, top_k, top_p)) in itertools.product(DECODE, RULES.items()):
        raw = randn(batch, VOCAB).float() * spread
        index = torch.arange(batch, device=DEVICE)
        logits = ShapedLogits(raw, raw, torch.zeros_like(index, dtype=torch.int32))
        temperature = torch.full((batch,), 0.6, device=DEVICE)
        out = Borders(torch.empty_like(temperature), torch.empty_like(logits.is_changed_N))
        cuts = {
            "top_k_N": torch.full_like(logits.is_changed_N, top_k),
            "top_p_N": torch.full_like(temperature, top_p),
            "min_p_N": torch.zeros_like(temperature),
        }
        work = torch.empty_like(raw, dtype=torch.int32)

        def truncate(
            _: int, logits=logits, temperature=temperature, cuts=cuts, work=work, out=out
        ) -> object:
            return kernels.truncate(
                logits, temperature_N=temperature, **cuts, work_NV=work, out=out
            )

        def draw(_: int, logits=logits, temperature=temperature, index=index, out=out) -> object:
            return kernels.sample_shaped(
                logits, out, temperature_N=temperature, seed_N=index, position_N=index,
                sample_index_N=index, logprob_kind_N=logits.is_changed_N,
            )  # fmt: skip

        def by_sort(_: int, raw=raw, cuts=cuts, temperature=temperature) -> object:
            order = torch.sort(raw / temperature[:, None], dim=-1, descending=True, stable=True)
            shares = order.values.softmax(-1)
            keep = shares.cumsum(-1) - shares < cuts["top_p_N"][:, None]
            return torch.zeros_like(keep).scatter_(1, order.indices, keep)

        baselines = {"sort": by_sort} if rule == "top-p 0.95, flat" else {}
        yield Case(f"sample_shaped: truncate, {rule}", name, batch, truncate, raw.nbytes,
                   baselines=baselines)  # fmt: skip
        truncate(0)
        yield Case(f"sample_shaped: draw, {rule}", name, batch, draw, raw.nbytes)


def cases(kernels: Kernels) -> Iterator[Case]:
    """Every case, made when it is its turn."""
    for name, shape in SHAPES.items():
        yield from row_cases(kernels, name, shape)
        yield from rotate_cases(kernels, name, shape)
        yield from decode_cases(kernels, name, shape)
        yield from chunk_cases(kernels, name, shape)
    yield from expert_cases(kernels, "30b-a3b", SHAPES["30b-a3b"])
    yield from sample_cases(kernels, "0.6b")
    yield from shaped_cases(kernels, "0.6b")


def measure(case: Case, run: dict[str, object], rates: dict[str, float]) -> dict[str, object]:
    """Return the case's line."""
    by_bytes = case.num_bytes / rates["copy_GB_per_s"] / 1e3
    by_flops = case.flops / rates["gemm_TFLOP_per_s"] / 1e6
    value = graph_us(case.run, copies=case.copies)
    others = {
        name: round(graph_us(call, copies=case.copies), 2) for name, call in case.baselines.items()
    }
    return {
        "work": f"kernel: {case.work}",
        "shape": case.shape,
        "batch": case.batch,
        "value": round(value, 2),
        "unit": "us",
        "floor": round(max(by_bytes, by_flops), 2),
    } | (run | {"best_peer": min(others.values(), default=None), "peers": others})


def show(lines: list[dict[str, object]], rates: dict[str, float]) -> None:
    """Print a table for people."""
    console = Console(width=110)
    table = Table(box=None)
    for column in ("work", "shape", "batch", "us", "floor", "x floor", "peers"):
        table.add_column(column, justify="left" if column in ("work", "peers") else "right")
    for line in lines:
        value, floor = float(str(line["value"])), float(str(line["floor"]))
        table.add_row(
            str(line["work"]).removeprefix("kernel: "), str(line["shape"]), str(line["batch"]),
            f"{value:.1f}", f"{floor:.1f}", f"{value / max(floor, 0.01):.2f}",
            str(line["peers"]).strip("{}"),
        )  # fmt: skip
    console.print(rates)
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="cases whose name has one of these")
    parser.add_argument("--output", type=Path, help="a file that gets the lines too")
    args = parser.parse_args()
    torch.manual_seed(0)
    run = describe_run(sys.argv, "triton", gpu=gpu_facts())
    rates: Any = run["rates"]
    lines = []
    for case in cases(load_kernels("triton", DEVICE)):
        if args.only and not any(word in case.work for word in args.only):
            continue
        lines.append(measure(case, run, rates))
        print(json.dumps(lines[-1]), flush=True)
        add_line(args.output, lines[-1])
    show(lines, rates)


if __name__ == "__main__":
    main()
