"""The host half of the engine must import, and so be testable, where torch is absent."""

import os
import subprocess
import sys

from tests.arch.sources import SRC, sources

TORCH_FREE = ("errors", "wire", "config", "text", "cache", "sched")

QUICK_COMMANDS = ("commands", "generate", "serve", "explain")
"""What a user sees of these before an engine is made, help and errors, is there at once."""

BLOCKED = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, NoTorch())
try:
    import torch
except ImportError as error:
    assert str(error) == "torch is blocked"
else:
    raise SystemExit("the block does not work")
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f"{name}: {error}")
assert "torch" not in sys.modules
print(len(sys.argv) - 1)
"""


def import_without_torch(names: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *names],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_host_half_imports_without_torch() -> None:
    names = [source.name for source in sources() if source.layer in TORCH_FREE]
    names += ["dovetail", "dovetail.exec.fake", "dovetail.replay.records"]
    names += ["dovetail.core.client", "dovetail.core.process"]  # what a server's process loads
    names += [source.name for source in sources() if source.layer == "server"]
    names += [f"dovetail.cli.{name}" for name in QUICK_COMMANDS]
    done = import_without_torch(names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(names))


def test_public_names_that_need_no_torch_load_without_it() -> None:
    code = BLOCKED + "\nimport dovetail\ndovetail.SamplingParams\ndovetail.EngineOptions\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_block_catches_a_module_that_needs_torch() -> None:
    done = import_without_torch(["torch.nn"])
    assert done.returncode != 0
    assert "torch is blocked" in done.stderr
