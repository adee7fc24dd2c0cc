"""The exception tree: what can go wrong, and whose fault it is.

    EngineError
    |-- ConfigError      the engine was set up wrongly; raised at start, names the field
    |-- RequestError     a request is wrong; hurts nobody else (HTTP 400)
    |-- CapacityError    there is no room now; try later (HTTP 429 or 503)
    |-- DeviceError      the device failed; the engine ends
    |-- EngineClosed     the engine has been closed or has failed
    `-- InvariantError   a bug of ours; the engine ends

Users' mistakes are found at the two doors (request validation and
``config.resolve``); inside, a broken expectation is an ``InvariantError``.
"""


class EngineError(Exception):
    """Any error this package raises on purpose."""


class ConfigError(EngineError):
    """A configuration or model folder cannot be used.

    ``field`` names the option, file or tensor at fault, ``message`` says what is wrong with it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class RequestError(EngineError):
    """A request cannot be served as asked.

    ``field`` names the request field at fault, ``message`` says what is wrong with it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class CapacityError(EngineError):
    """The engine has no room for this request now.

    ``retry_after_s`` suggests when to try again.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeviceError(EngineError):
    """The device failed; nothing on it can be trusted any more."""


class EngineClosed(EngineError):
    """The engine has been closed, or it failed and cannot serve any more."""


class InvariantError(EngineError):
    """An internal rule was broken: a bug in the engine, never a user's mistake."""
