"""Lanes that sleep change nothing; a protection that is switched off is missed. See ``races``."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.races import MUTANTS, Mutant

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).resolve().parents[2]
ALLOCATORS = {
    "default": "",
    "expandable segments": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}


def played(*words: str, allocator: str = "") -> dict:
    """Run ``races`` in a process of its own and return its line."""
    env = os.environ | {"PYTHONPATH": f"src{os.pathsep}."}
    if allocator:
        env["PYTORCH_ALLOC_CONF"] = allocator
    done = subprocess.run(
        [sys.executable, "-m", "tests.device.races", *words],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    line = done.stdout.splitlines()[-1]
    print(line)
    return json.loads(line)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_sleeping_lanes_change_nothing(allocator: str, depth: int) -> None:
    line = played("healthy", "--depth", str(depth), "--seeds", "6", allocator=ALLOCATORS[allocator])
    assert line["backend"] == ("cudaMallocAsync" if "Async" in allocator else "native")
    assert {name: [how for how in found if how] for name, found in line["found"].items()} == {
        name: [] for name in ("count", "tag", "moe", "stamp")
    }


def test_graphs_are_refused_with_an_allocator_that_cannot_keep_them() -> None:
    env = os.environ | {"PYTHONPATH": "src", "PYTORCH_ALLOC_CONF": ALLOCATORS["cudaMallocAsync"]}
    words = ["dovetail.cli", "generate", "--device", "cuda", "--max-new-tokens", "1", "A"]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and "--no-graphs" in done.stderr, done.stderr[-2000:]


def fault_of(mutant: Mutant, found: list[str | None]) -> str | None:
    """Say why this is not how the mutant should have been caught; None if it is."""
    caught = [how for how in found if how]
    if not mutant.caught_by:
        return f"outputs changed: {caught}" if caught else None
    if not any(re.match(mutant.caught_by, how) for how in caught):
        return f"the mutant lives, or is caught in another way: {found}"
    strange = [how for how in caught if not re.match(f"{mutant.caught_by}|{mutant.or_by}", how)]
    return f"strange: {strange}" if strange else None


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    line = played(name)
    assert fault_of(mutant, line["found"][mutant.model]) is None
