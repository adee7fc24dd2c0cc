"""How many pages the KV pool gets.

Owns the arithmetic, of a size that is given and of what a GPU has left. Must not touch a device:
what was measured is passed in.
"""

import os
import re
from dataclasses import dataclass

from dovetail.config.capture import column_specs
from dovetail.config.gpu import Gpu
from dovetail.config.model import ModelConfig
from dovetail.errors import ConfigError

DEFAULT_KV_MEMORY = "512MiB"
DEFAULT_MEMORY_FRACTION = 0.9

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2}
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
}


def parse_bytes(field: str, value: int | str) -> int:
    """Return a number of bytes from ``1048576``, ``"512MiB"`` or ``"1.5GB"``.

    Raises:
        ConfigError: not a positive size; the message shows the accepted forms.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2] not in _UNITS:
        raise ConfigError(field, f"{value!r} is not a size; write bytes, 512MiB or 2GB")
    size = int(float(match[1]) * _UNITS[match[2]])
    if size <= 0:
        raise ConfigError(field, f"{value!r} is no memory at all")
    return size


def kv_page_bytes(
    model: ModelConfig, *, dtype: str, page_size: int, capture: tuple[str, ...] = ()
) -> int:
    """Return the bytes of one page: keys and values of all layers, and the captured columns."""
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * BYTES_PER_ELEMENT[dtype]
    rows = sum(spec.row_bytes for spec in column_specs(model, capture).values())
    return page_size * (kv + rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """What a pool must serve.

    Attributes:
        page_size: tokens of a page.
        page_bytes: see ``kv_page_bytes``.
        context_len, max_running: as configured.
    """

    page_size: int
    page_bytes: int
    context_len: int
    max_running: int

    @property
    def least_pages(self) -> int:
        """Those of one sequence of ``context_len`` tokens."""
        return -(-self.context_len // self.page_size)

    @property
    def most_pages(self) -> int:
        """Those of ``max_running`` such sequences; more would never be used at once."""
        return self.max_running * self.least_pages


def pages_of_size(shape: PoolShape, kv_memory: int | str) -> tuple[int, str]:
    """Return how many pages a size gives, and the reason."""
    num_pages = parse_bytes("kv_memory", kv_memory) // shape.page_bytes
    if num_pages < shape.most_pages:
        return num_pages, f"kv_memory {kv_memory} at {shape.page_bytes} bytes a page"
    return shape.most_pages, (
        "max_running sequences of context_len tokens; kv_memory would hold more"
    )


def check_pool(shape: PoolShape, num_pages: int, field: str, *, gpu: Gpu | None) -> None:
    """Refuse a pool that cannot hold one context, or that its memory cannot hold.

    Args:
        shape: the pool's.
        num_pages: asked for.
        field: that asks for them.
        gpu: whose memory it is in; None for this machine's.

    Raises:
        ConfigError: with the numbers.
    """
    if num_pages < shape.least_pages:
        raise ConfigError(
            field,
            f"gives {num_pages} pages of {shape.page_size} tokens, but one sequence of "
            f"context_len {shape.context_len} needs {shape.least_pages} pages "
            f"({shape.least_pages * shape.page_bytes} bytes); "
            "raise it or lower context_len",
        )
    owner, memory = "this machine", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if gpu is not None:
        owner, memory = gpu.name, gpu.memory_bytes
    if num_pages * shape.page_bytes > memory:
        raise ConfigError(
            field,
            f"asks for {num_pages * shape.page_bytes} bytes of KV, but {owner} has {memory}; "
            f"give at most {memory // shape.page_bytes} pages",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What was measured of a GPU's memory before its pool is allocated, in bytes.

    Attributes:
        total: of the GPU.
        weights: the model's parameters.
        step: what the largest step takes beside them, with recorded graphs and transfer blocks.
        others: all else that is taken: CUDA's own, what else the process holds, other processes.
    """

    total: int
    weights: int
    step: int
    others: int


def pages_of_fraction(shape: PoolShape, fraction: float, use: MemoryUse) -> tuple[int, str]:
    """Return how many pages fill a GPU up to a share of its memory, and the reason.

    Raises:
        ConfigError: too little is left for one context; with the numbers.
    """
    taken = use.weights + use.step + use.others
    left = int(fraction * use.total) - taken - shape.page_bytes  # a page for sink rows and rounding
    num_pages = max(0, left) // shape.page_bytes
    sums = (
        f"of {_gib(use.total)}: {_gib(use.weights)} weights, {_gib(use.step)} for the largest step "
        f"and its graphs, {_gib(use.others)} CUDA and others"
    )
    if num_pages < shape.least_pages:
        need = (shape.least_pages + 1) * shape.page_bytes
        least = -(-100 * (taken + need) // use.total) / 100
        raise ConfigError(
            "memory_fraction",
            f"is {fraction:g} {sums}; so {_gib(max(0, left))} are left for KV, but one sequence of "
            f"context_len {shape.context_len} needs {_gib(need)}; "
            + (
                f"give at least {least:g}, or lower context_len, max_running or chunk_size"
                if least < 1
                else "lower context_len, max_running or chunk_size"
            ),
        )
    if num_pages < shape.most_pages:
        return num_pages, f"memory_fraction {fraction:g} {sums}"
    return shape.most_pages, (
        f"max_running sequences of context_len tokens; memory_fraction {fraction:g} would hold more"
    )


def _gib(num_bytes: int) -> str:
    if num_bytes < 2**26:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
