"""Lanes that sleep change nothing; a protection that is switched off is missed. See ``races``."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.races import MUTANTS, Mutant

pytestmark = pytest.mark.cuda

ROOT = Path(__file__).resolve().parents[2]
ALLOCATORS = {
    "default": "",
    "expandable_segments": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
}
LONGEST_S = 240


class Player:
    """A process of ``races`` that plays what it is asked, and another one when it has no GPU left.

    To start one takes longer than most of what it plays.
    """

    def __init__(self, allocator: str, errors: Path) -> None:
        self._errors = errors
        self._env = os.environ | {"PYTHONPATH": f"src{os.pathsep}."}
        if allocator:
            self._env["PYTORCH_ALLOC_CONF"] = allocator
        self._process: subprocess.Popen[str] | None = None

    def play(self, name: str, **how: object) -> dict:
        """Return the line that says what was seen."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(LONGEST_S, process.kill)
        timer.start()
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"name": name, **how}), file=process.stdin, flush=True)
        lines = (line for line in process.stdout if line.startswith('{"mutant"'))
        found = next(lines, None)
        timer.cancel()
        if found is None or not json.loads(found)["has_gpu"]:
            self.close()
        if found is None:
            raise AssertionError(f"no answer: {self._errors.read_text()[-4000:]}")
        print(found)
        return json.loads(found)

    def close(self) -> None:
        """Let the process end."""
        if self._process is not None:
            process, self._process = self._process, None
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> subprocess.Popen[str]:
        with self._errors.open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.device.races"],
                cwd=ROOT, env=self._env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors,
            )  # fmt: skip


@pytest.fixture(scope="module")
def players(tmp_path_factory) -> Iterator[dict[str, Player]]:
    folder = tmp_path_factory.mktemp("errors")
    made = {name: Player(words, folder / name) for name, words in ALLOCATORS.items()}
    yield made
    for player in made.values():
        player.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_sleeping_lanes_change_nothing(players, allocator: str, depth: int) -> None:
    line = players[allocator].play("healthy", depth=depth)
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


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(players, name: str, depth: int) -> None:
    """The first seed that meets it is enough."""
    mutant = MUTANTS[name]
    line = players["default"].play(name, depth=depth, until_caught=True)
    assert fault_of(mutant, line["found"][mutant.model]) is None
