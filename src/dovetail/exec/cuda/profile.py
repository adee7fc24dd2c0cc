"""What the largest step takes of a GPU's memory: measured, before the KV pool is allocated.

Owns the measurement. The step is run by itself and recorded as graphs, with the smallest pool there
can be; both are dropped again.
"""

import gc
from collections.abc import Callable

import torch

from dovetail.config.pool import MemoryUse
from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError, DeviceError
from dovetail.exec.blocks import transfer_bytes
from dovetail.exec.cuda.graphs import CudaGraphs
from dovetail.exec.cuda.runner import CudaRunner
from dovetail.exec.cuda.shaped_graphs import ShapedGraphs
from dovetail.exec.device import Device
from dovetail.kernels.backend import Kernels
from dovetail.models.causal_lm import CausalLM


def memory_use(
    config: EngineConfig,
    model: CausalLM,
    device: Device,
    kernels: Kernels,
    graphs: CudaGraphs | None,
    on_progress: Callable[[int, int], None],
) -> MemoryUse:
    """Return what will be taken beside the pool.

    Args:
        config: with the smallest pool.
        model: on the device.
        device: whose memory is measured; nobody else may start anything on it meanwhile.
        kernels: the operations of a step.
        graphs: empty ones, to record and drop; None if steps are not recorded.
        on_progress: see ``CudaGraphs.record``.

    Raises:
        ConfigError: the largest step does not fit beside the weights.
    """
    before = _taken(device)
    weights = device.memory.num_bytes("weights")
    try:
        runner = CudaRunner(config, model, device, kernels, graphs)
        smallest_pool = device.memory.num_bytes("kv")
        torch.cuda.synchronize(device.torch_device)
        if graphs is not None:
            device.compute.submit(graphs.record, runner.step, on_progress)
            # Rerecorded with the pool; what they say of progress, those will say again.
            shaped_graphs = ShapedGraphs()
            device.compute.submit(
                shaped_graphs.record, runner.draw_shaped, graphs.forwards, lambda done, total: None
            )
        device.compute.submit(runner.rehearse)
        torch.cuda.synchronize(device.torch_device)
    except DeviceError as error:
        raise ConfigError(
            "memory_fraction",
            f"cannot be kept: the largest step ({config.max_step_tokens} tokens, "
            f"{config.max_running} rows) does not fit beside {weights} bytes of weights; lower "
            f"chunk_size or max_running ({error})",
        ) from error
    free, total = torch.cuda.mem_get_info(device.torch_device)
    after = total - free  # torch keeps what it took, so this is the most there was
    return MemoryUse(
        total=total,
        weights=weights,
        step=max(0, after - before - smallest_pool) + transfer_bytes(config),
        others=max(0, before - weights),
    )


def _taken(device: Device) -> int:
    """Return the bytes that are taken, by whomever."""
    drop_unused()
    free, total = torch.cuda.mem_get_info(device.torch_device)
    return total - free


def drop_unused() -> None:
    """Give the device the memory of all that is gone."""
    gc.collect()
    torch.cuda.empty_cache()
