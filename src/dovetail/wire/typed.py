"""From plain values to typed structs, with errors that name the field and what is legal."""

import re
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from dovetail.errors import RequestError

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class FieldsByName(msgspec.StructMeta):
    """Makes structs that users write out by hand: a name that is no field lists those that are.

    Raises:
        RequestError: names what is no field.
    """

    # Typed so that checkers go on to look at the fields that each struct declares.
    def __call__(cls: type[S], *args: Any, **fields: Any) -> S:  # pyright: ignore[reportGeneralTypeIssues]
        """Make a struct."""
        for name in fields:
            if name not in cls.__struct_fields__:
                legal = ", ".join(cls.__struct_fields__)
                raise RequestError(name, f"is no field of {cls.__name__}; its fields are {legal}")
        return super().__call__(*args, **fields)


def typed(raw: object, kind: type[T], *, prefix: str = "", strict: bool = False) -> T:
    """Return ``raw`` as a struct.

    Args:
        raw: what was given, by name.
        kind: of the struct.
        prefix: of the fields' names in errors.
        strict: take no numbers as strings, which some clients send.

    Raises:
        RequestError: names the field.
    """
    try:
        return msgspec.convert(raw, kind, strict=strict, str_keys=not strict)
    except (msgspec.ValidationError, TypeError, RecursionError, OverflowError) as error:
        field, message = field_and_message(error, kind)
        field = ".".join(part for part in (prefix, field) if part) or "body"
        raise RequestError(field, message) from None


def field_and_message(error: Exception, kind: type[Any]) -> tuple[str, str]:
    """Split what msgspec says of a struct: it names the place last, or a missing field within.

    The legal values of a field that has few are added.
    """
    message, _, place = str(error).partition(" - at `")
    path = place.removeprefix("key` in `").rstrip("`").removeprefix("$").removeprefix(".")
    path = path.replace("[...]", "")
    missing = re.match(r"Object missing required field `(\w+)`", message)
    if missing:
        return f"{path}.{missing[1]}".removeprefix("."), "is missing"
    legal = _literals(get_type_hints(kind).get(path))
    ending = f"; legal are {', '.join(legal)}" if legal else ""
    wrong = re.fullmatch("Invalid enum value (.*)", message)
    if wrong:
        return path, f"is {wrong[1]}{ending}"
    return path, message[:1].lower() + message[1:] + ending


def _literals(hint: object) -> list[str]:
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    return [value for part in get_args(hint) for value in _literals(part)]
