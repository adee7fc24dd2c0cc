"""Backends by name, on a machine without a GPU and without Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dovetail.errors import ConfigError
from dovetail.kernels.ref.backend import RefKernels
from dovetail.kernels.registry import load_kernels

SRC = Path(__file__).resolve().parents[2] / "src"
CPU = torch.device("cpu")

WITHOUT_TRITON = """
import importlib, pathlib, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("blocked", name="triton")

sys.meta_path.insert(0, NoTriton())
import torch
from dovetail.errors import ConfigError
from dovetail.kernels.registry import load_kernels

root = pathlib.Path(sys.argv[1])
names = [".".join(p.with_suffix("").parts) for p in
         (q.relative_to(root) for q in (root / "dovetail").rglob("*.py"))]
own = (".triton.", ".exec.cuda.")  # loaded by name alone, where a GPU is asked for
names = [n for n in names if not any(part in n for part in own) and "__" not in n]
for name in names:
    importlib.import_module(name)
try:
    load_kernels("triton", torch.device("cuda"))
except ConfigError as error:
    print(len(names), error)
"""


def test_the_reference_runs_everywhere() -> None:
    assert isinstance(load_kernels("ref", CPU), RefKernels)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"kernels: no backend is called 'cuda' \(ref, triton\)"):
        load_kernels("cuda", CPU)


def test_triton_is_refused_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"kernels: 'triton' needs (an NVIDIA GPU|the package)"):
        load_kernels("triton", CPU)


def test_nothing_else_needs_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON, str(SRC)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    count, _, message = done.stdout.strip().partition(" ")
    assert int(count) > 50
    assert message == "kernels: 'triton' needs the package 'triton'"
