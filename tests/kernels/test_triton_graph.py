"""A step's operations recorded once and replayed with other lengths, slots and rows.

Nothing may wait for the device while a graph is recorded (CUDA refuses), and nothing that differs
from step to step may have been frozen into it.

Shape legend: as in ``kernels.backend``.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dovetail.kernels.backend import Capture, Kernels, QueryTiles
from dovetail.kernels.registry import load_kernels
from tests.support.gpu import DEVICE, big_randn, ints

pytestmark = pytest.mark.cuda

HEADS, KV_HEADS, DIM, WIDTH, EXPERTS, TOP_K, INNER = 8, 2, 64, 256, 16, 4, 128
NUM_SLOTS, PAGES, PAGE_SIZE, TOKENS = 8, 40, 16, 64
SINK = NUM_SLOTS * PAGES * PAGE_SIZE


@dataclass
class Inputs:
    """What an unpack fills, at fixed addresses: two decode rows, one chunk, padding."""

    x_TM: Tensor
    positions_T: Tensor
    kv_slots_T: Tensor
    decode_N4: Tensor
    chunks_N4: Tensor
    page_table_SB: Tensor
    seed_N: Tensor
    position_N: Tensor

    def fill(self, kv_lens: tuple[int, int], prefix: int, width: int) -> None:
        slots_T = torch.full((TOKENS,), SINK)
        positions_T = torch.zeros(TOKENS, dtype=torch.int64)
        pages = torch.randperm(NUM_SLOTS * PAGES).view(NUM_SLOTS, PAGES)
        places = [(0, kv_lens[0] - 1), (1, kv_lens[1] - 1)]
        places += [(2, prefix + i) for i in range(width)]
        for token, (slot, position) in enumerate(places):
            positions_T[token] = position
            slots_T[token] = pages[slot, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        chunks = [
            (2, 2 + i, min(8, width - i), prefix + min(i + 8, width)) for i in range(0, width, 8)
        ]
        chunks += [(0, i, min(8, TOKENS - i), 0) for i in range(2 + width, TOKENS, 8)]
        chunks += [(0, 0, 0, 0)] * (len(self.chunks_N4) - len(chunks))
        self.x_TM.copy_(big_randn(TOKENS, WIDTH, seed=prefix))
        self.positions_T.copy_(positions_T)
        self.kv_slots_T.copy_(slots_T)
        self.page_table_SB.copy_(pages)
        self.decode_N4.copy_(ints([(0, 0, 1, kv_lens[0]), (1, 1, 1, kv_lens[1])]))
        self.chunks_N4.copy_(ints(chunks))
        self.seed_N.copy_(torch.tensor([prefix, 77]))
        self.position_N.copy_(torch.tensor(kv_lens))


def new_inputs() -> Inputs:
    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    return Inputs(
        zeros(TOKENS, WIDTH, dtype=torch.bfloat16),
        zeros(TOKENS),
        zeros(TOKENS),
        zeros(2, 4, dtype=torch.int32),
        zeros(20, 4, dtype=torch.int32),
        zeros(NUM_SLOTS, PAGES),
        zeros(2),
        zeros(2),
    )


def step(kernels: Kernels, at: Inputs, weights: dict[str, Tensor], state: dict[str, Tensor]):
    """One layer and a draw; all that the operations return."""
    heads = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    lists = [QueryTiles(at.decode_N4, 1), QueryTiles(at.chunks_N4, 8)]
    works = [kernels.split_keys(queries, **heads) for queries in lists]
    normed = kernels.rms_norm(at.x_TM, weights["norm"], 1e-6)
    q = kernels.rotate_and_store(
        normed @ weights["qkv"],
        qk_norm=None,
        cos_sin_P2D=weights["cos_sin"],
        positions_T=at.positions_T,
        kv_slots_T=at.kv_slots_T,
        k_cache_CKD=state["k"],
        v_cache_CKD=state["v"],
    )
    attended = torch.empty_like(q)
    for work in works:
        kernels.paged_attention(
            q,
            state["k"],
            state["v"],
            page_table_SB=at.page_table_SB,
            page_size=PAGE_SIZE,
            work=work,
            out_THD=attended,
        )
    normed, total = kernels.add_rms_norm(
        attended.flatten(1) @ weights["o"], at.x_TM, weights["norm"], 1e-6
    )
    capture = Capture(state["routes"], at.kv_slots_T, 1)
    router_weights, ids = kernels.route(normed @ weights["router"], TOP_K, True, capture=capture)
    y = kernels.fused_moe(normed, ids, router_weights, weights["up"], weights["down"])
    draws = kernels.sample_plain(
        (y + total)[:2] @ weights["head"],
        temperature_N=state["temperature"],
        seed_N=at.seed_N,
        position_N=at.position_N,
        sample_index_N=torch.zeros_like(at.seed_N),
    )
    return attended, y, total, *draws


def test_a_recorded_step_replays_with_other_inputs() -> None:
    kernels = load_kernels("triton", DEVICE)
    shapes = {
        "norm": (WIDTH,),
        "qkv": (WIDTH, (HEADS + 2 * KV_HEADS) * DIM),
        "o": (HEADS * DIM, WIDTH),
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, 2 * INNER, WIDTH),
        "down": (EXPERTS, WIDTH, INNER),
        "head": (WIDTH, 999),
    }
    weights = {n: big_randn(*s, seed=i) / s[-1] ** 0.5 for i, (n, s) in enumerate(shapes.items())}
    weights["cos_sin"] = big_randn(PAGES * PAGE_SIZE, 2, DIM, dtype=torch.float32)
    at = new_inputs()

    def fresh_state() -> dict[str, Tensor]:
        cache = big_randn(SINK + 1, KV_HEADS, DIM, seed=9)
        routes = torch.full((SINK + 1, 2, TOP_K), 255, dtype=torch.uint8, device=DEVICE)
        temperature = torch.tensor([0.0, 0.8], device=DEVICE)
        return {"k": cache, "v": cache.clone() * 0.5, "routes": routes, "temperature": temperature}

    at.fill((3, 200), 40, 21)
    state = fresh_state()
    step(kernels, at, weights, state)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step(kernels, at, weights, state)
    for kv_lens, prefix, width in (((3, 200), 40, 21), ((639, 1), 0, 60), ((64, 65), 500, 1)):
        at.fill(kv_lens, prefix, width)
        for name, tensor in fresh_state().items():
            state[name].copy_(tensor)
        graph.replay()
        eager_state = fresh_state()
        wanted = step(kernels, at, weights, eager_state)
        for ours, eager in zip(recorded, wanted, strict=True):
            assert torch.isfinite(ours).all()
            assert torch.equal(ours, eager)
        real = at.kv_slots_T[: 2 + width]
        for name in ("k", "v", "routes"):
            assert torch.equal(state[name][:SINK], eager_state[name][:SINK])
        assert (state["routes"][real, 1] < EXPERTS).all()
        assert state["routes"][real, 0].eq(255).all()
        assert recorded[0][2 + width :].eq(0).all()
