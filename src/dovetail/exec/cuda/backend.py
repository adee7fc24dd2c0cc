"""One NVIDIA GPU as a backend of the executor."""

from functools import partial

import torch

from dovetail.config.resolve import with_measured_pool
from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError, InvariantError
from dovetail.exec.backend import Backend, OnProgress
from dovetail.exec.cuda.arena import step_memory
from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.cuda.graphs import CudaGraphs, Tiers
from dovetail.exec.cuda.profile import drop_unused, memory_use
from dovetail.exec.cuda.runner import CudaRunner
from dovetail.exec.cuda.shaped_graphs import ShapedGraphs
from dovetail.exec.cuda.upload import staged_copies
from dovetail.exec.device import Device
from dovetail.exec.executor import Runner
from dovetail.kernels.registry import load_kernels
from dovetail.models.causal_lm import CausalLM

MEASURING, RECORDING = "measuring memory", "recording graphs"
RECORDING_DRAWS = "recording shaped draws"


def backend(config: EngineConfig, device: Device | None) -> Backend:
    """Return the backend; a device is given by tests.

    Raises:
        ConfigError: no GPU answers.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "device", "'cuda' needs an NVIDIA GPU and a CUDA build of PyTorch; none answers here"
        )
    if config.graphs and torch.cuda.memory.get_allocator_backend() == "cudaMallocAsync":
        raise ConfigError(
            "graphs",
            "PyTorch's allocator cudaMallocAsync cannot give back what a recorded graph returns; "
            "run with --no-graphs, or take backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF",
        )
    gpu = device or CudaDevice()
    if not isinstance(gpu, CudaDevice):
        raise InvariantError("'cuda' was given a device that is no GPU")
    kernels = load_kernels("triton", gpu.torch_device, moe_backend=config.moe_backend)
    memory = step_memory(gpu.torch_device)

    group = config.model.num_heads // config.model.num_kv_heads
    tiers = Tiers(
        max_rows=config.max_running,
        max_tokens=config.max_step_tokens,
        tile_tokens=kernels.tile_tokens(group),
    )

    def size_pool(model: CausalLM, on_progress: OnProgress) -> EngineConfig:
        if config.memory_fraction is None:
            return config
        graphs = CudaGraphs(tiers) if config.graphs else None
        use = memory_use(
            config, model, gpu, kernels, graphs, memory, partial(on_progress, MEASURING)
        )
        del graphs
        drop_unused()
        return with_measured_pool(config, use)

    def make_runner(config: EngineConfig, model: CausalLM, on_progress: OnProgress) -> Runner:
        graphs = CudaGraphs(tiers) if config.graphs else None
        shaped_graphs = ShapedGraphs()
        runner = CudaRunner(config, model, gpu, kernels, graphs, shaped_graphs, memory)
        # Memory was allocated and filled on another stream than the lanes'.
        torch.cuda.synchronize(gpu.torch_device)
        if graphs is not None:  # before the first packet: what is recorded runs on padding
            steps = runner.step, runner.step_alone
            gpu.compute.submit(graphs.record, *steps, partial(on_progress, RECORDING))
            draws = runner.draw_shaped, runner.draw_alone, graphs.forwards
            gpu.compute.submit(shaped_graphs.record, *draws, partial(on_progress, RECORDING_DRAWS))
            torch.cuda.synchronize(gpu.torch_device)
        return runner

    return Backend(gpu, kernels, partial(staged_copies, gpu), size_pool, make_runner)
