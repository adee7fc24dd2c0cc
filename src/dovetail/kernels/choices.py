"""Which implementation of each operation a device gets, and why: what a user is told.

Owns the words. The choice itself is made where a device is set up; it follows from the kind of
device and, on a CPU, from the number of tokens. ``benchmarks/gpu_kernels.py`` keeps others, to
compare.
"""

from dataclasses import dataclass

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
    (
        "fused_moe",
        "triton",
        "no wait for group sizes; torch's grouped_mm is slower at all sizes measured",
    ),
    ("sample_plain", "triton", "one pass without a sort, and the documented noise"),
    ("penalties, truncation, top lists", "torch", "only in steps that ask for them"),
)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The implementation of some operations on one kind of device."""

    operations: str
    backend: str
    reason: str


def kernel_choices(device_type: str) -> tuple[KernelChoice, ...]:
    """Return who computes what on ``cpu`` or ``cuda``."""
    if device_type == "cpu":
        return tuple(KernelChoice(*row) for row in _CPU_OPERATIONS)
    return tuple(KernelChoice(*row) for row in _GPU_OPERATIONS)
