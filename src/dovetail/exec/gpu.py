"""Which GPU there is: the facts that ``config.resolve`` is given."""

from importlib.util import find_spec

import torch

from dovetail.config.gpu import Gpu

_LEAST_CAPABILITY = (8, 0)
"""Ampere: the first whose matrix units take bfloat16."""

_GROUPED_MM_MAJORS = (9, 10)
"""Hopper and Blackwell: for these PyTorch's ``grouped_mm`` has one kernel; for others it reads the
sizes of the groups back and multiplies one by one."""


def find_gpu() -> Gpu | None:
    """Return this process's first NVIDIA GPU; None if none answers."""
    if not torch.cuda.is_available():
        return None
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    problem = None
    if torch.version.hip is not None:
        problem = "its kernels are made for NVIDIA GPUs"
    elif capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (capability, _LEAST_CAPABILITY))
        problem = f"its compute capability is {found}, and the kernels need {least}"
    elif find_spec("triton") is None:
        problem = "its kernels need the package triton"
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        problem=problem,
        has_grouped_mm=torch.version.hip is None and capability[0] in _GROUPED_MM_MAJORS,
    )
