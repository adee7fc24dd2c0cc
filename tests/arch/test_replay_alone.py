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
REPLAY = """
import torch
from torch import nn
from dovetail.replay.layout import pad_right
from dovetail.replay.packing import TokenTable
from dovetail.replay.records import RouteTrace
from dovetail.replay.session import ReplaySession

class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def forward(self, hidden):
        values, ids = torch.topk(hidden @ self.weight.T, 2)
        self.ids = ids
        return values.softmax(-1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.router = nn.Embedding(16, 8), Router()

    def forward(self, input_ids, use_cache=False):
        return self.router(self.embed(input_ids).flatten(0, 1))

model, ids = Model(), [[3, 1, 2], [5, 4]]
rows = [torch.randint(0, 2, (n - 1, 1, 1)) * 2 + torch.tensor([0, 1]) for n in (3, 2)]
traces = [
    RouteTrace.of_tokens(r.numpy(), i, layer_ids=(0,), num_experts=4) for r, i in zip(rows, ids)
]
table = TokenTable(ids, traces)
index = pad_right(table.indices())
routes = table.routes(index)
with ReplaySession(model).replay(routes):
    model(table.tokens(index)).square().sum().backward()
assert torch.equal(model.router.ids[routes.has_row_N], torch.cat(rows)[:, 0])
"""
# Requirements of torch, by the names they are imported by
TORCHS = (
    "torchgen,functorch,filelock,typing_extensions,sympy,mpmath,networkx,jinja2,markupsafe,fsspec,"
    "setuptools,pkg_resources,_distutils_hack,triton,nvidia"
)


def import_alone(names: list[str], then: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + then, TORCHS, *names],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_replay_imports_and_works_alone() -> None:
    names = [source.name for source in sources() if source.layer == "replay"]
    assert len(names) > 5
    done = import_alone(names, then=REPLAY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(names))


def test_the_block_catches_another_package() -> None:
    for name in ("rich", "dovetail.cli.generate", "transformers"):
        done = import_alone([name])
        assert done.returncode != 0 and "is blocked" in done.stderr, name
