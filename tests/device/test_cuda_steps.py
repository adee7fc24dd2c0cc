"""The loop does not wait: what the driver did in a step, as CUPTI saw it."""

import ctypes

import pytest
import torch

from benchmarks.gpu_steps import prompt_counts, steady_counts
from benchmarks.stepped import SteppedEngine
from dovetail.exec.cuda.runner import CudaRunner
from tests.support.gpu_engine import let_pytorch_watch

pytestmark = pytest.mark.cuda

ROWS, STEPS = 32, 200


def engine_of(**options: object) -> SteppedEngine:
    defaults = {"context_len": 1024, "chunk_size": 512, "num_pages": 4096}
    engine = SteppedEngine(device="cuda", max_running=ROWS + 8, **defaults | options)
    engine.fill(ROWS, 64, max_new_tokens=500)
    return engine


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("capture", [(), ("experts",)])
def test_a_steady_step_is_one_graph_one_copy_out_and_no_wait(
    capture, depth, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(capture=capture, depth=depth)
    let_pytorch_watch(monkeypatch)
    with engine.executor.adopt_thread():
        found = steady_counts(engine, STEPS)
    print(dict(found))
    engine.executor.close()
    assert found["graph launches"] == STEPS  # it really was a steady step
    assert found["kernel launches"] == 0  # and all of it, new pages too, was recorded
    assert found["HtoD"] == 0 and found["packets"] == STEPS  # which the graph fetches
    assert STEPS - depth <= found["DtoH"] <= STEPS + depth
    assert found["pageable"] == 0
    assert found["allocations"] == found["allocating calls"] == 0
    # Stopping the profile waits for the device once or twice.
    assert found["waiting calls"] <= 2 and 0 <= found["waits"] <= 2


def test_a_step_with_a_prompt_is_one_copy_out_too() -> None:
    engine = engine_of()
    with engine.executor.adopt_thread():
        found = prompt_counts(engine, 40)
    print(dict(found))
    engine.executor.close()
    assert found["HtoD"] == 0 and 39 <= found["DtoH"] <= 41
    assert found["packets"] == 2 * 40  # new tenants look at it before the step takes it
    assert found["pageable"] == 0 and found["waiting calls"] <= 2 and 0 <= found["waits"] <= 2


def test_a_step_too_large_for_a_graph_copies_and_waits_no_more() -> None:
    """3,000 prompt tokens beside the rows that decode are launched kernel by kernel."""
    engine = engine_of(chunk_size=4096, prefix_cache=False)
    prompts = {"num_prompts": 3, "prompt_len": 1000}
    with engine.executor.adopt_thread():
        prompt_counts(engine, 3, **prompts)  # compiles
        found = prompt_counts(engine, 20, **prompts)
    print(dict(found))
    engine.executor.close()
    assert found["graph launches"] == 0 and found["kernel launches"] > 20 * 50
    assert found["HtoD"] == 0 and 19 <= found["DtoH"] <= 21
    assert found["packets"] == 2 * 20
    assert found["pageable"] == found["allocating calls"] == 0
    assert found["waiting calls"] <= 2 and 0 <= found["waits"] <= 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_wait_within_a_step_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching itself: PyTorch sees its own waits."""
    engine = engine_of()
    run = CudaRunner.run

    def run_and_look(self, *args):
        run(self, *args)
        self.blocks.results[0, 0].item()

    let_pytorch_watch(monkeypatch)
    monkeypatch.setattr(CudaRunner, "run", run_and_look)
    with engine.executor.adopt_thread(), pytest.raises(RuntimeError, match="synchronizing"):
        engine.loop.step()
    monkeypatch.undo()
    engine.executor.close()


@pytest.mark.parametrize("num_extra", [1, 3])
def test_copies_that_are_too_many_are_counted(num_extra) -> None:
    """The counting itself: copies of each kind, waits of the runtime and an allocation are seen."""
    engine = engine_of()
    step, pageable = engine.loop.step, torch.zeros(8)

    def noisy_step() -> None:
        step()
        for _ in range(num_extra):
            pageable.to("cuda").cpu()
            torch.cuda.current_stream().synchronize()

    engine.loop.step = noisy_step
    found = steady_counts(engine, 10)
    engine.executor.close()
    assert found["HtoD"] == 10 * num_extra and found["pageable"] == 20 * num_extra
    assert found["waiting calls"] >= 10 * num_extra and found["waits"] >= 10 * num_extra
    assert found["allocations"] >= 10 * num_extra


@pytest.mark.parametrize("num_extra", [1, 3])
def test_waits_that_the_driver_is_asked_for_are_counted(num_extra) -> None:
    """For a stream and for an event, by way of ctypes, as the engine calls the driver."""
    engine = engine_of()
    step, driver = engine.loop.step, ctypes.CDLL("libcuda.so.1")
    stream, event = torch.cuda.current_stream(), torch.cuda.Event()
    event.record(stream)

    def waiting_step() -> None:
        step()
        for _ in range(num_extra):
            assert driver.cuStreamSynchronize(ctypes.c_void_p(stream.cuda_stream)) == 0
            assert driver.cuEventSynchronize(ctypes.c_void_p(event.cuda_event)) == 0

    engine.loop.step = waiting_step
    found = steady_counts(engine, 10)
    engine.executor.close()
    assert found["waiting calls"] <= 2 < 2 * 10 * num_extra <= found["waits"]
