"""Which implementations of the operations there are, and how one is loaded.

Owns the names. An implementation is a module with ``kernels(device, moe_backend) -> Kernels``,
imported when it is asked for and never before: Triton is absent from machines without a GPU. The
object is then passed down to whoever computes; nothing remembers it here.
"""

import importlib
from types import MappingProxyType

import torch

from dovetail.errors import ConfigError
from dovetail.kernels.backend import Kernels

BACKENDS = MappingProxyType(
    {
        "ref": "dovetail.kernels.ref.backend",
        "triton": "dovetail.kernels.triton.backend",
    }
)


def load_kernels(name: str, device: torch.device, *, moe_backend: str | None = None) -> Kernels:
    """Return the operations of one backend, with the tile sizes of ``device``.

    Args:
        name: one of ``BACKENDS``.
        device: where they run.
        moe_backend: who computes ``fused_moe``; None leaves it to the backend.

    Raises:
        ConfigError: there is no such backend, or it does not run here.
    """
    if name not in BACKENDS:
        raise ConfigError("kernels", f"no backend is called '{name}' ({', '.join(BACKENDS)})")
    try:
        module = importlib.import_module(BACKENDS[name])
    except ModuleNotFoundError as error:
        raise ConfigError("kernels", f"'{name}' needs the package '{error.name}'") from error
    return module.kernels(device, moe_backend)
