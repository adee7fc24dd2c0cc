"""Which implementation of each operation a device gets, and why: what a user is told.

Owns the words. A choice follows from the kind of device, from ``moe_backend`` and, on a CPU, from
the number of tokens. Optional backends are packages that could compute an operation as well:
whether they are installed here, whether they were chosen, and why.
"""

from dataclasses import dataclass
from importlib.util import find_spec

_CPU_OPERATIONS = (
    ("layers, one token in float32", "numpy", "there a call costs more than its arithmetic"),
    ("all else", "torch", "plain torch, the reference of all others"),
)
_GPU_OPERATIONS = (
    ("matrix products, embedding", "torch", "cuBLAS: dense products are what it is made for"),
    ("rms_norm, add_rms_norm", "triton", "norm and residual in one pass"),
    ("silu_mul", "triton", "one pass, rounded once"),
    ("rotate_and_store", "triton", "norms, rotation and the write of keys and values in one pass"),
    (
        "split_keys, paged_attention",
        "triton",
        "reads work lists on the device, so one graph serves any mix of lengths",
    ),
    ("route", "triton", "writes captured experts where they are kept"),
    ("sample_plain", "triton", "one pass without a sort, and the documented noise"),
    (
        "truncate, sample_shaped, spread",
        "triton",
        "borders by counting instead of a sort, and the noise of sample_plain",
    ),
    ("penalties, biases", "triton", "on the device's tables, in rows that ask for them"),
    ("masks, top lists", "torch", "only in steps that ask for them"),
)
_MOE_REASONS = {
    "triton": "no wait for group sizes, on any GPU and in any dtype, so graphs can hold it",
    "torch": "grouped_mm, as moe_backend says; sort and sum are Triton's",
}
_ATTENTION_PACKAGES = (
    ("FlashAttention", ("flash_attn", "flash_attn_interface")),
    ("FlashInfer", ("flashinfer",)),
)
_NO_ADAPTER = "there is no adapter: none could be run where this engine is tested (decision 0026)"
_CPU_ATTENTION = "computes on GPUs alone"
_ON_CPU_GROUPED_MM = "one call for all experts, where rows are multiples of 16 bytes"


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The implementation of some operations on one kind of device."""

    operations: str
    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class OptionalBackend:
    """A package that could compute some operations.

    Attributes:
        name: as people call it.
        operations: which ones.
        is_installed: whether this Python can import it.
        is_chosen: whether it computes them here.
        reason: why, or why not.
    """

    name: str
    operations: str
    is_installed: bool
    is_chosen: bool
    reason: str


def kernel_choices(device_type: str, moe_backend: str) -> tuple[KernelChoice, ...]:
    """Return who computes what on ``cpu`` or ``cuda``."""
    if device_type == "cpu":
        return tuple(KernelChoice(*row) for row in _CPU_OPERATIONS)
    moe = ("fused_moe", moe_backend, _MOE_REASONS[moe_backend])
    return tuple(KernelChoice(*row) for row in (*_GPU_OPERATIONS, moe))


def optional_backends(device_type: str, moe_backend: str) -> tuple[OptionalBackend, ...]:
    """Return what is to be said of each optional backend on ``cpu`` or ``cuda``."""
    attention = (
        OptionalBackend(
            name,
            "paged_attention",
            is_installed=any(find_spec(module) is not None for module in modules),
            is_chosen=False,
            reason=_CPU_ATTENTION if device_type == "cpu" else _NO_ADAPTER,
        )
        for name, modules in _ATTENTION_PACKAGES
    )
    is_chosen = moe_backend == "torch"
    reason = _MOE_REASONS[moe_backend] if device_type == "cuda" else _ON_CPU_GROUPED_MM
    grouped_mm = OptionalBackend(
        "torch grouped_mm", "fused_moe", is_installed=True, is_chosen=is_chosen, reason=reason
    )
    return (*attention, grouped_mm)
