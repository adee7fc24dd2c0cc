"""Which kinds of device there are, and how the code of one is loaded.

Owns the names. A kind is a module with ``backend(config, device) -> Backend``, imported when it is
asked for and never before: what a GPU needs is absent from machines without one.
"""

import importlib
from types import MappingProxyType

from dovetail.config.schema import EngineConfig
from dovetail.errors import ConfigError
from dovetail.exec.backend import Backend
from dovetail.exec.device import Device

BACKENDS = MappingProxyType({"cpu": "dovetail.exec.cpu", "cuda": "dovetail.exec.cuda.backend"})


def load_backend(config: EngineConfig, device: Device | None = None) -> Backend:
    """Return the backend of the configured device, on ``device`` if one is given.

    Raises:
        ConfigError: it does not run here.
    """
    try:
        module = importlib.import_module(BACKENDS[config.device])
    except ModuleNotFoundError as error:
        raise ConfigError(
            "device", f"'{config.device}' needs the package '{error.name}'; install it"
        ) from error
    return module.backend(config, device)
