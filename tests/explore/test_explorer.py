"""The explorer: random scenarios under whatever order of device work lanes and events allow.

Mixed prefill and decode, shared prefixes, retractions, aborts around the end, early stops,
read-outs and tight pools; every token, logprob, finish reason and read-out must be the right one.
To repeat a seed that fails: ``python -m tests.explore MODEL SEED``.
"""

import pytest

from tests.explore.scenario import explore

BLOCK = 10
BLOCKS = {"count": 9, "tag": 8, "moe": 5}
FULL_BLOCK = 100
FULL_BLOCKS = {"count": 30, "tag": 30, "moe": 20}
FULL_FIRST = 10_000
"""The seeds of the full run are others than those of every day."""


@pytest.mark.parametrize(
    ("name", "block"), [(name, i) for name, count in BLOCKS.items() for i in range(count)]
)
def test_seeds(name, block, model_of):
    """220 seeds on the simulated device; each block meets what this is about."""
    seen = explore(model_of(name), range(block * BLOCK, (block + 1) * BLOCK))
    finishes = {output.finish.type for output in seen if output.finish}
    usages = [output.usage for output in seen if output.usage]
    assert {"abort", "length"} <= finishes and ("stop" in finishes or name == "moe")
    assert any(usage.num_retractions for usage in usages)
    assert any(usage.cached_tokens for usage in usages)
    assert any(output.captured for output in seen)


@pytest.mark.full
@pytest.mark.parametrize(
    ("block", "name"), [(i, name) for i in range(30) for name, n in FULL_BLOCKS.items() if i < n]
)
def test_many_seeds(block, name, model_of):
    """8,000 more."""
    first = FULL_FIRST + block * FULL_BLOCK
    explore(model_of(name), range(first, first + FULL_BLOCK))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("device", ["threads", "cpu"])
def test_other_devices(name, device, model_of):
    """The same scenarios with real threads, and with work done inline."""
    explore(model_of(name), range(300, 304), device)


@pytest.mark.parametrize("name", BLOCKS)
def test_deep_pipeline(name, model_of):
    """Nothing is a function of one step in flight: five are."""
    explore(model_of(name), range(400, 405), depth=5)
