"""What is known of this machine's GPU when a configuration is decided, and what it can run.

Owns the facts, which ``exec.gpu`` finds, and the limits of the GPU's kernels. Must not touch a
device.
"""

import shutil
from pathlib import Path

import msgspec

from dovetail.config.model import ModelConfig
from dovetail.errors import ConfigError

MAX_RUNNING = 4095
MIN_HEAD_DIM = 16

DEFAULT_MAX_RUNNING = 512
_LEAST_MAX_RUNNING = 128
_DRAW_BYTES = 64
"""Of memory that a logit takes at most while a step shapes all draws: 62 were measured when they
sorted, and it is less now."""
_DRAW_SHARE = 0.05
"""Of a GPU, that draws may take by default."""

_CHUNK_SIZE, _SMALL_CHUNK_SIZE = 8192, 2048
_SMALL_BYTES = 40 * 2**30
"""What a GPU has less of takes small chunks by default: activations grow with them."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA GPU that answers.

    Attributes:
        name: as its driver says it.
        memory_bytes: all it has.
        problem: what keeps the engine from running on it; None if nothing does.
        has_grouped_mm: whether PyTorch has a grouped matrix product for it that waits for nothing
            (in bfloat16).
    """

    name: str
    memory_bytes: int
    problem: str | None = None
    has_grouped_mm: bool = False


def has_nvidia_driver() -> bool:
    """Return whether there may be a GPU: a quick look, for who would rather not load torch."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def default_max_running(gpu: Gpu | None, vocab_size: int) -> tuple[int, str]:
    """Return how many sequences run at once on a GPU unless somebody says it, and the reason.

    With each row a step has one more row of logits, and several like it while it draws.
    """
    rows = DEFAULT_MAX_RUNNING
    if gpu is not None:
        rows = int(_DRAW_SHARE * gpu.memory_bytes / (_DRAW_BYTES * vocab_size)) // 32 * 32
    if rows >= DEFAULT_MAX_RUNNING:
        return DEFAULT_MAX_RUNNING, "default on a GPU"
    return max(_LEAST_MAX_RUNNING, rows), (
        f"default on a GPU of this size: {DEFAULT_MAX_RUNNING}, or fewer where drawing for so many "
        "rows of this vocabulary would take much of its memory"
    )


def default_chunk_size(gpu: Gpu | None) -> tuple[int, str]:
    """Return how many prompt tokens a GPU forwards in a step unless somebody says it, and why.

    The weights of experts are read once a step, however few tokens of a prompt it has.
    """
    if gpu is None or gpu.memory_bytes >= _SMALL_BYTES:
        return _CHUNK_SIZE, "default on a GPU"
    return _SMALL_CHUNK_SIZE, f"default on a GPU with less than {_SMALL_BYTES >> 30} GiB"


def check_gpu_limits(
    *, max_running: int | None, page_size: int, lanes: str, model: ModelConfig
) -> None:
    """Refuse what the GPU's kernels cannot do.

    Raises:
        ConfigError: names the option.
    """
    if lanes != "inline":
        raise ConfigError("lanes", "are CUDA streams on a GPU; leave out lanes")
    if max_running is not None and max_running > MAX_RUNNING:
        raise ConfigError(
            "max_running",
            f"is {max_running}; on a GPU one kernel goes through all rows of a step, so "
            f"give at most {MAX_RUNNING}",
        )
    if not _is_power_of_two(page_size):
        raise ConfigError(
            "page_size", f"is {page_size}; on a GPU it must be a power of two, such as 16"
        )
    if model.head_dim < MIN_HEAD_DIM or not _is_power_of_two(model.head_dim):
        raise ConfigError(
            "model",
            f"has heads of {model.head_dim} dimensions; the GPU's kernels take powers of two from "
            f"{MIN_HEAD_DIM} on, so run it with --device cpu",
        )


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
