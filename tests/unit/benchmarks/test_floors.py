"""The floors of benchmarks, against numbers worked out by hand."""

from pathlib import Path

import pytest

from benchmarks.floors import COPY_BYTES_PER_S, FLOP_PER_S, Floor, even_distinct
from dovetail.config.model import ModelConfig

SHAPES = Path(__file__).parents[3] / "benchmarks" / "shapes"


def floor_of(shape: str) -> Floor:
    return Floor(ModelConfig.from_folder(SHAPES / shape))


def test_a_step_reads_weights_and_keys() -> None:
    # 28 layers of 4 * 1024 * 1024 + 2 * 1024 * 1024 (attention) and 3 * 1024 * 3072, and the head
    weights = 28 * (6 * 2**20 + 9 * 2**20) + 151_936 * 1024
    kv_bytes = 2 * 28 * 8 * 128 * 2
    floor = floor_of("0.6b")
    assert floor.kv_bytes == kv_bytes
    assert floor.step(1, 100) == pytest.approx((2 * weights + 100 * kv_bytes) / COPY_BYTES_PER_S)
    products = 2 * 256 * weights / FLOP_PER_S
    assert floor.step(256, 100) == pytest.approx(products + 256 * 100 * kv_bytes / COPY_BYTES_PER_S)


def test_experts_are_read_as_often_as_they_are_distinct() -> None:
    floor, expert = floor_of("30b-a3b"), 3 * 2048 * 768 * 2
    more = floor.step(1, 0, distinct=9) - floor.step(1, 0)
    assert more == pytest.approx(48 * expert / COPY_BYTES_PER_S)
    assert even_distinct(128, 8, 1) == 8
    assert even_distinct(128, 8, 32) == pytest.approx(111.8, abs=0.05)


def test_prompts_cost_products_and_pairs() -> None:
    floor = floor_of("0.6b")
    one, both = floor.prefill([1000]), floor.prefill([2000])
    pairs = 4 * (2000**2 - 2 * 1000**2) / 2 * 16 * 128 * 28
    head = 2 * 151_936 * 1024
    assert both - 2 * one == pytest.approx((pairs - head) / FLOP_PER_S)


def test_whole_requests_are_their_steps() -> None:
    floor = floor_of("0.6b")
    alone = floor.prefill([10]) + floor.step(1, 10) + floor.step(1, 11)
    assert floor.generate([10], [3], rows=1) == pytest.approx(alone)
    assert floor.generate([10, 10], [3, 3], rows=1) == pytest.approx(2 * alone)
    together = floor.prefill([10, 10]) + floor.step(2, 10) + floor.step(2, 11)
    assert floor.generate([10, 10], [3, 3], rows=2) == pytest.approx(together)
