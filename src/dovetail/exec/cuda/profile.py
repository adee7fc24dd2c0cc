"""What the largest step takes of a GPU's memory: measured, before the KV pool is allocated.

Owns the measurement. Steps of some sizes are run by themselves, which makes the arena of all later
ones, and are recorded as graphs, with the smallest pool there can be; pool and graphs are dropped
again.
"""

import gc
from collections.abc import Callable
from functools import partial

import torch

from dovetail.config.pool import MemoryUse
from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError, DeviceError
from dovetail.exec.blocks import transfer_bytes
from dovetail.exec.cuda.arena import StepMemory
from dovetail.exec.cuda.device import CudaDevice
from dovetail.exec.cuda.graphs import CudaGraphs
from dovetail.exec.cuda.runner import CudaRunner
from dovetail.exec.cuda.shaped_graphs import ShapedGraphs
from dovetail.kernels.backend import Kernels
from dovetail.models.causal_lm import CausalLM


def memory_use(
    config: EngineConfig,
    model: CausalLM,
    device: CudaDevice,
    kernels: Kernels,
    graphs: CudaGraphs | None,
    memory: StepMemory,
    on_progress: Callable[[int, int], None],
) -> MemoryUse:
    """Return what will be taken beside the pool.

    Args:
        config: with the smallest pool.
        model: on the device.
        device: whose memory is measured; nobody else may start anything on it meanwhile.
        kernels: the operations of a step.
        graphs: empty ones, to record and drop; None if steps are not recorded.
        memory: of steps; it keeps what it needs.
        on_progress: see ``CudaGraphs.record``.

    Raises:
        ConfigError: the largest step does not fit beside the weights.
    """
    before = _taken(device)
    weights = device.memory.num_bytes("weights")
    try:
        runner = CudaRunner(config, model, device, kernels, graphs, memory=memory)
        smallest_pool = device.memory.num_bytes("kv")
        torch.cuda.synchronize(device.torch_device)
        for num_tokens in rehearsed_sizes(config):
            device.compute.submit(memory.fit, partial(runner.rehearse, num_tokens))
        if graphs is not None:
            steps = runner.step, runner.step_alone
            device.compute.submit(graphs.record, *steps, on_progress)
            # Rerecorded with the pool; what they say of progress, those will say again.
            draws = runner.draw_shaped, runner.draw_alone, graphs.forwards
            shaped_graphs = ShapedGraphs()
            device.compute.submit(shaped_graphs.record, *draws, lambda done, total: None)
        torch.cuda.synchronize(device.torch_device)
    except (DeviceError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            "memory_fraction",
            f"cannot be kept: the largest step ({config.max_step_tokens} tokens, "
            f"{config.max_running} rows) does not fit beside {weights} bytes of weights; lower "
            f"chunk_size or max_running ({error})",
        ) from error
    for block in runner.blocks.packets:  # the pool's runner has its own
        device.release_host_block(block.host)
    free, total = torch.cuda.mem_get_info(device.torch_device)
    after = total - free
    return MemoryUse(
        total=total,
        weights=weights,
        step=max(0, after - before - smallest_pool) + transfer_bytes(config),
        others=max(0, before - weights),
    )


def rehearsed_sizes(config: EngineConfig) -> list[int]:
    """Return the tokens of steps to try: the largest, and some that divide memory anew.

    What a step takes grows with them, but how well it fits into one piece follows no rule.
    """
    tokens, rows = config.max_step_tokens, config.max_running
    return [max(rows, tokens * eighths // 8) for eighths in range(8, 0, -1)]


def _taken(device: CudaDevice) -> int:
    """Return the bytes that are taken, by whomever."""
    drop_unused()
    free, total = torch.cuda.mem_get_info(device.torch_device)
    return total - free


def drop_unused() -> None:
    """Give the device the memory of all that is gone."""
    gc.collect()
    torch.cuda.empty_cache()
