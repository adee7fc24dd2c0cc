"""Where no memory can be pinned, the same calls give the same tokens and rows."""

import pytest
import torch
from torch import Tensor

from dovetail.core.engine import Engine
from dovetail.exec.cuda.device import CudaDevice
from dovetail.wire.request import SamplingParams
from tests.support.compare import assert_same_generations

pytestmark = pytest.mark.cuda

PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 33, 120)]
SAMPLING = [
    SamplingParams(
        max_new_tokens=12 + 5 * i, temperature=0.8, sampling_seed=i, ignore_eos=True
    )
    for i in range(len(PROMPTS))
]  # fmt: skip
OPTIONS = {"dtype": "float32", "kv_memory": "64MiB", "max_running": 3, "capture": ("experts",)}


def generate(device: CudaDevice) -> list:
    with Engine(device="cuda", on_device=device, **OPTIONS) as engine:
        return engine.generate(PROMPTS, SAMPLING, capture=("experts",))


def test_an_engine_without_pinned_memory_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = generate(CudaDevice())
    num_blocks = 0

    def plain_block(self: CudaDevice, num_bytes: int) -> Tensor:
        nonlocal num_blocks
        num_blocks += 1
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(CudaDevice, "host_block", plain_block)
    ours = generate(CudaDevice())
    assert num_blocks >= 9  # three rings of three
    assert_same_generations(ours, wanted)
