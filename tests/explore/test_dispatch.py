"""All device work is lane work: no torch operation runs on the loop thread outside a lane item.

On a GPU each would be a launch, a copy or a wait that the design does not know of.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.exec.device import CpuDevice, InlineLane
from dovetail.exec.executor import Executor
from dovetail.wire.request import LogprobParams
from tests.support.harness import Harness


class WatchedLane(InlineLane):
    """An inline lane that tells the watch while an item runs."""

    def __init__(self, watch: "DispatchWatch") -> None:
        self._watch = watch

    def submit(
        self,
        fn: Callable[..., None],
        *args: object,
        reads: tuple[Tensor, ...] = (),
        writes: tuple[Tensor, ...] = (),
    ) -> None:
        """Run ``fn(*args)`` as an item."""
        self._watch.is_inside = True
        try:
            fn(*args)
        finally:
            self._watch.is_inside = False


class DispatchWatch(TorchDispatchMode):
    """Sees every operation of its thread; one outside an item is an error that names it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_inside = False
        self.num_ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert self.is_inside, f"{func} runs on the loop thread, outside a lane item"
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "sampling_seed": 5},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "sampling_seed": 2**64 - 1},
    {"temperature": 0.0, "max_new_tokens": 0},
    {"temperature": 1.0, "stop": "\n", "stop_token_ids": (40,)},
    {
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "logit_bias": {7: -5.0},
        "min_new_tokens": 2,
        "stop_token_ids": (41,),
        "n": 2,
        "logprobs": LogprobParams(logprob_start_len=0, top_logprobs_num=2, token_ids_logprob=(5,)),
    },
    {"temperature": 0.5, "top_k": 9, "logprobs": LogprobParams(kind="truncated")},
]


def run_traffic(folder) -> DispatchWatch:
    """Prefill, decode, retraction, abort, prefix hits, read-outs and all kinds of sampling.

    Penalties, biases, prompt scores and several samples as well.
    """
    watch = DispatchWatch()
    device = CpuDevice()
    device.compute, device.copy = WatchedLane(watch), WatchedLane(watch)
    harness = Harness(
        folder, device=device, depth=1, page_size=4, num_pages=20, context_len=64, chunk_size=8
    )
    with watch:
        for turn in range(2):
            for i, sampling in enumerate(SAMPLING):
                prompt = [*range(3, 15), *range(100, 100 + 3 * i)]
                harness.add(prompt, capture=("tokens",), **{"max_new_tokens": 7} | sampling)
            for _ in range(6):
                harness.step()
            harness.scheduler.retract_last()
            harness.step()
            harness.abort(len(SAMPLING) * turn + 1)
            harness.run()
        usages = [output.usage for output in harness.outputs.values() if output.usage]
        assert any(usage.num_retractions for usage in usages)
        assert any(usage.cached_tokens for usage in usages)
        assert any(output.prompt_scores for output in harness.outputs.values())
        harness.close()
    return watch


@pytest.mark.parametrize("name", ["fx_tag", "fx_moe"])
def test_loop_thread_runs_no_torch_op(name, request):
    assert run_traffic(request.getfixturevalue(f"{name}_folder")).num_ops > 1000


@pytest.mark.parametrize("place", ["_stage", "_collect"])
def test_an_op_outside_is_seen(place, fx_tag_folder, monkeypatch):
    """See the test above fail: staging and collecting are on the loop thread."""
    original = getattr(Executor, place)

    def with_an_op(self: Executor, *args: Any) -> Any:
        torch.zeros(3).add_(1)
        return original(self, *args)

    monkeypatch.setattr(Executor, place, with_an_op)
    with pytest.raises(AssertionError, match=r"aten\.zeros\.default runs on the loop thread"):
        run_traffic(fx_tag_folder)
