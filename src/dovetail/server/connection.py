"""A client's connection: uvicorn's, with bounds, and with news of replies that were not read.

Owns what uvicorn leaves open: how long and how large all may be that is no body (a request's head,
trailers, extensions of chunks), which would otherwise cost the others memory and time; and the
kernel's word on whether a client closed with a reply unread. Must not know routes.
"""

import asyncio
import socket
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dovetail.server.delivery import EXTENSION, Delivery
from dovetail.server.errors import HttpError, error_body

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's head; and of what is no body between two parts of a body, and behind it."""

HEAD_S = 60.0
"""How long a head may take: from the connection on, or from its first byte. The same is left for
the rest of a body that was answered before it had come."""


class Connection(HttpToolsProtocol):
    """A protocol for ``uvicorn.Config(http=...)``.

    Its callbacks run on the event loop, those of the parser within ``data_received``.
    """

    head_s = HEAD_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_stray_bytes = 0  # since there was progress: the end of a head, a part of a body
        self._is_in_head = self._is_head_too_large = False
        self._deadline: asyncio.TimerHandle | None = None
        self._delivery = Delivery()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, though not for ever."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Parse what has come; refuse what is too much of nothing."""
        self._num_stray_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_stray_bytes > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        elif self._is_in_head and self._deadline is None:
            self._await_head()

    def eof_received(self) -> None:
        """Say so too if the client has left before its reply: what is written now is dropped."""
        if not self._is_answered:
            self._delivery.fail()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Say so to whoever sent a reply that was not read.

        To close with bytes unread, or to be sent bytes after closing, makes the kernel reset the
        connection: an error here, or one that waits on the socket.
        """
        self._stop_waiting()
        sock = self.transport.get_extra_info("socket")
        is_reset = exc is not None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        super().connection_lost(exc)
        if is_reset or not self._is_answered:
            self._delivery.fail()

    # -- the parser's callbacks ------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a request: its client has read the reply before, or has not waited for it."""
        super().on_message_begin()
        self._is_in_head = True
        self._delivery = Delivery()
        self.scope["extensions"] = {EXTENSION: self._delivery}  # type: ignore[typeddict-item]

    def on_headers_complete(self) -> None:
        """Start the request, unless its head is too large: however its bytes were cut."""
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > MAX_HEAD_BYTES:
            self._is_head_too_large = True
            raise ValueError("the head is too large")  # ends the parsing
        self._is_in_head, self._num_stray_bytes = False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._num_stray_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._num_stray_bytes = 0
        super().on_message_complete()

    # -- ends ------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be parsed."""
        if self._is_head_too_large:
            self._refuse(_too_large())
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        """End a reply. What has begun to come has its full time from now on: the next request, or
        the rest of a body that nobody wants."""
        super().on_response_complete()
        is_coming = self._is_in_head or self.cycle.more_body
        if is_coming and not self.transport.is_closing():
            self._await_head()

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self.head_s, self._lose_patience)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _lose_patience(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if not self._is_answered:
            self._await_head()  # that is answered first, and then this has its time
        elif self._is_in_head:
            message = f"the head of the request did not arrive within {self.head_s:g} s"
            self._refuse(HttpError(408, f"{message}; send it at once", code="head_too_slow"))
        else:  # nothing has been asked
            self.transport.close()

    def _refuse(self, error: HttpError) -> None:
        """Close with an error, unless a reply is on its way, which it would break."""
        if self._is_answered or not self.cycle.response_started:
            body = msgspec.json.encode(error_body(error))
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            head = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self.transport.close()


def _too_large() -> HttpError:
    return HttpError(
        431,
        f"the request's head, its trailers or its chunk extensions have more than {MAX_HEAD_BYTES} "
        "bytes; send fewer headers, or put what is long into the body",
        code="head_too_large",
    )
