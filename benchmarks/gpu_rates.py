"""Timing on a GPU: its rates, and how long work takes inside a CUDA graph."""

import statistics
import subprocess
from collections.abc import Callable

import torch

from benchmarks.common import cpu_name

L2_BYTES = 64 * 2**20
"""What has to be read in between for memory to be cold, at least."""


def graph_us(run: Callable[[int], object], *, copies: int = 1, calls: int = 20) -> float:
    """Return the microseconds of one call of ``run``, the median of replays of a graph of many.

    Args:
        run: called with 0 .. copies - 1 in turn, so that each call finds its own memory cold.
        copies: how many sets of inputs there are.
        calls: how many calls the graph holds, at least; rounded up to whole turns.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for copy in range(min(copies, 2)):
            run(copy)
    torch.cuda.current_stream().wait_stream(stream)
    total = -(-calls // copies) * copies
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(total):
            run(call % copies)
    graph.replay()
    torch.cuda.synchronize()
    found = _median_us(graph.replay) / total
    del graph
    return found


def stream_us(run: Callable[[], object], *, calls: int) -> float:
    """Return the microseconds of one call of ``run``, launched one after another on a stream."""
    run()

    def all_calls() -> None:
        for _ in range(calls):
            run()

    return _median_us(all_calls) / calls


def gpu_rates() -> dict[str, float]:
    """Return this GPU's rates: memory, and bf16 matrix products.

    ``copy`` is PyTorch's copy of 2 GiB, read and written bytes counted. ``graph_copy`` is the same
    as the node that a CUDA graph makes of it, which is a copy by another engine, and slower;
    ``kernel_copy`` is an elementwise kernel. ``read`` reduces; ``gemv`` is a product with a vector.
    """
    source = torch.randn(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copy = stream_us(lambda: target.copy_(source), calls=4)
    graph_copy = graph_us(lambda _: target.copy_(source), calls=4)
    kernel_copy = graph_us(lambda _: torch.neg(source, out=target), calls=4)
    read = graph_us(lambda _: source.view(torch.int32).amax(), calls=4)
    matrix, vector = source.view(2**15, 2**15), torch.randn_like(source[: 2**15])
    gemv = graph_us(lambda _: torch.mv(matrix, vector), calls=4)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = graph_us(lambda _: a @ b, calls=10)
    small = torch.zeros(1, device="cuda")
    return {
        "copy_GB_per_s": round(2 * 2**31 / copy / 1e3, 1),
        "graph_copy_GB_per_s": round(2 * 2**31 / graph_copy / 1e3, 1),
        "kernel_copy_GB_per_s": round(2 * 2**31 / kernel_copy / 1e3, 1),
        "read_GB_per_s": round(2**31 / read / 1e3, 1),
        "gemv_GB_per_s": round(2**31 / gemv / 1e3, 1),
        "gemm_TFLOP_per_s": round(2 * 8192**3 / product / 1e6, 1),
        "empty_kernel_us": round(graph_us(lambda _: small.zero_(), calls=200), 3),
    }


def gpu_facts() -> dict[str, object]:
    """Return what a line says of the GPU that it was measured on, for ``describe_run``."""
    facts = {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "host": cpu_name(),
        "rates": gpu_rates(),
    }
    torch.cuda.empty_cache()  # a few GiB that an engine may want
    return facts


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None where nobody tells."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.partition("\n")[0].strip() or None


def _median_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)
