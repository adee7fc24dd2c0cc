"""Typed reading of the JSON files of a model folder.

Owns the checks that turn "some JSON value" into an integer, number, flag or list of token ids, with
an error that names the field. Must not know what any field means.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from dovetail.errors import ConfigError


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: the file cannot be read, or is no JSON object.
    """
    try:
        value = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise ConfigError("model", f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            "model", f"{file} is not valid JSON ({error}); download or write it again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("model", f"{file} must hold a JSON object, not {type(value).__name__}")
    return cast(dict[str, Any], value)


class Fields:
    """The fields of one JSON object, read with a type and a range.

    A field that is absent or null has its default; without a default it is an error. Where null
    means something of its own, the method says so.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.raw = raw
        self._prefix = prefix

    def section(self, name: str) -> "Fields":
        """Return the fields of a nested object, empty if it is absent."""
        value = self.raw.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self._error(name, "an object", value)
        return Fields(cast(dict[str, Any], value), prefix=f"{self._prefix}{name}.")

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer. Several names are spellings: the first one present counts."""
        name = next((name for name in names if self.raw.get(name) is not None), names[0])
        return self._positive(name, self._value(name, default))

    def optional_integer(self, name: str, *, default: int | None) -> int | None:
        """Return a positive integer; absent means the default, null means None."""
        value = self.raw.get(name, default)
        return None if value is None else self._positive(name, value)

    def number(self, name: str, *, default: float | None = None) -> float:
        """Return a positive finite number."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._error(name, "a positive number", value)
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if type(value) is not bool:
            raise self._error(name, "true or false", value)
        return value

    def items(self, name: str) -> list[Any]:
        """Return a list, empty if it is absent or null."""
        value = self.raw.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._error(name, "a list", value)
        return cast(list[Any], value)

    def token_ids(self, name: str, default: int | None) -> tuple[int, ...]:
        """Return token ids spelled as an integer, a list of integers, or null for none."""
        value = self.raw.get(name, default)
        if value is None:
            return ()
        ids = cast(list[Any], value) if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise self._error(name, "a token id or a list of token ids", value)
        return tuple(ids)

    def _positive(self, name: str, value: Any) -> int:
        if type(value) is not int or value < 1:
            raise self._error(name, "a positive integer", value)
        if value >= 2**31:
            raise self._error(name, "below 2**31", value)
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(self._prefix + name, "is missing in config.json")
        return value

    def _error(self, name: str, expected: str, value: Any) -> ConfigError:
        return ConfigError(self._prefix + name, f"must be {expected}, not {value!r}")
