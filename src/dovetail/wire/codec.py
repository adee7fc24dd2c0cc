"""Messages as bytes: msgpack, checked against their types when they are read."""

from typing import Any, Final, Generic, TypeVar

import msgspec

from dovetail.errors import InvariantError
from dovetail.wire.process import FromEngine, ToEngine

MessageT = TypeVar("MessageT")


class Codec(Generic[MessageT]):
    """Writes and reads the messages of one direction, a frame each. Thread-safe.

    Args:
        kind: their union, as a type.
    """

    def __init__(self, kind: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)

    def encode(self, message: MessageT) -> bytes:
        """Return the frame of a message."""
        return self._encoder.encode(message)

    def decode(self, frame: bytes) -> MessageT:
        """Return the message of a frame.

        Raises:
            InvariantError: it is none; both ends are of the same version, so this is a bug.
        """
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise InvariantError(f"a frame of {len(frame)} bytes is no message: {error}") from error


TO_ENGINE: Final = Codec[ToEngine](ToEngine)
FROM_ENGINE: Final = Codec[FromEngine](FromEngine)
