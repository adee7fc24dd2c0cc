"""From plain JSON values to typed structs, with errors that name the field at fault."""

import re
from typing import TypeVar

import msgspec

from dovetail.errors import RequestError

T = TypeVar("T")


def typed(raw: object, kind: type[T], *, prefix: str = "") -> T:
    """Return ``raw`` as a struct; numbers may come as strings, as some clients send them.

    Raises:
        RequestError: names the field, under ``prefix``.
    """
    try:
        return msgspec.convert(raw, kind, strict=False, str_keys=True)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        field, message = _field_and_message(str(error))
        field = ".".join(part for part in (prefix, field) if part) or "body"
        raise RequestError(field, message) from None


def _field_and_message(text: str) -> tuple[str, str]:
    """Split what msgspec says: it names the place last, or a missing field in the sentence."""
    message, _, place = text.partition(" - at `")
    path = place.removeprefix("key` in `").rstrip("`").removeprefix("$").removeprefix(".")
    path = path.replace("[...]", "")
    missing = re.match(r"Object missing required field `(\w+)`", message)
    if missing:
        return f"{path}.{missing[1]}".removeprefix("."), "is missing"
    return path, message[:1].lower() + message[1:]
