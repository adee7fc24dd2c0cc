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


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA GPU that answers.

    Attributes:
        name: as its driver says it.
        problem: what keeps the engine from running on it; None if nothing does.
    """

    name: str
    problem: str | None = None


def has_nvidia_driver() -> bool:
    """Return whether there may be a GPU: a quick look, for who would rather not load torch."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def check_gpu_limits(*, max_running: int, page_size: int, lanes: str, model: ModelConfig) -> None:
    """Refuse what the GPU's kernels cannot do.

    Raises:
        ConfigError: names the option.
    """
    if lanes != "inline":
        raise ConfigError("lanes", "are CUDA streams on a GPU; leave out lanes")
    if max_running > MAX_RUNNING:
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
