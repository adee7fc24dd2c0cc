"""Dovetail: an LLM rollout and serving engine whose every token can be replayed.

Owns the public names. They are loaded on first use (PEP 562), so that importing
the package is quick and needs no torch; the torch-free half of the engine and
the trainer's side depend on that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dovetail.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    EngineClosed,
    EngineError,
    InvariantError,
    RequestError,
)

if TYPE_CHECKING:
    from dovetail.config.schema import EngineOptions
    from dovetail.core.engine import Engine, Generation
    from dovetail.wire.request import CaptureParams, LogprobParams, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "CapacityError",
    "CaptureParams",
    "ConfigError",
    "DeviceError",
    "Engine",
    "EngineClosed",
    "EngineError",
    "EngineOptions",
    "Generation",
    "InvariantError",
    "LogprobParams",
    "RequestError",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "CaptureParams": "dovetail.wire.request",
    "Engine": "dovetail.core.engine",
    "EngineOptions": "dovetail.config.schema",
    "Generation": "dovetail.core.engine",
    "LogprobParams": "dovetail.wire.request",
    "SamplingParams": "dovetail.wire.request",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
