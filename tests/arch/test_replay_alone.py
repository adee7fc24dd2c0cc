"""``dovetail.replay`` works where nothing but numpy, torch and msgspec is installed."""

import os
import subprocess
import sys

from tests.arch.sources import SRC, sources

BLOCKED = """
import importlib, sys

SITE = ("/site-packages/", "/dist-packages/")
ALLOWED = {"numpy", "torch", "msgspec"}
TORCHS = set(sys.argv[1].split(","))  # what torch itself needs

class Alone:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in ALLOWED | TORCHS | {"dovetail"} and is_installed(top):
            raise ImportError(f"{top} is blocked")

def is_installed(top):
    found = importlib.machinery.PathFinder.find_spec(top)
    return bool(found and found.origin and any(part in found.origin for part in SITE))

import importlib.machinery
sys.meta_path.insert(0, Alone())
for name in sys.argv[2:]:
    importlib.import_module(name)
print(len(sys.argv) - 2)
"""
# Requirements of torch, by the names they are imported by
TORCHS = (
    "torchgen,functorch,filelock,typing_extensions,sympy,mpmath,networkx,jinja2,markupsafe,fsspec,"
    "setuptools,pkg_resources,_distutils_hack,triton,nvidia"
)


def import_alone(names: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, TORCHS, *names],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_replay_imports_alone() -> None:
    names = [source.name for source in sources() if source.layer == "replay"]
    assert len(names) > 5
    done = import_alone(names)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(names))


def test_the_block_catches_another_package() -> None:
    for name in ("rich", "dovetail.cli.generate", "transformers"):
        done = import_alone([name])
        assert done.returncode != 0 and "is blocked" in done.stderr, name
