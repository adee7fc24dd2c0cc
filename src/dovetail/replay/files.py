# pyright: strict
"""Captured rows from a memory file, for a client on the server's machine.

Owns the client's side: the registration, the reading, the acknowledging. Must not know how rows are
used; needs numpy, msgspec and the standard library only. The server must run with
``--capture-files``; docs/capture.md has the protocol.
"""

import base64
import http.client
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.replay.records import RouteHeader, RouteTrace
from dovetail.wire.capture import FileInfo, FileSlot, RowTransport

TIMEOUT_S = 30.0

Columns = dict[str, NDArray[np.generic]]


class CaptureFileError(Exception):
    """The server gives no file, no rows, or takes no acknowledgement; or its file is not here."""


class CaptureFileClient:
    """A file of captured rows that a server writes for this process.

        with CaptureFileClient("http://127.0.0.1:30000") as file:
            body = {"text": "KING", "capture": ["experts"], "capture_file": file.name}
            reply = post("/generate", body)
            routes = file.take_routes(reply["meta_info"])

    The file lives as long as the connection that this object holds: until ``close``, or until this
    process, and those that it forked, have ended. Thread-safe.

    Args:
        url: of the server.
        num_slots: generations whose rows are under way at once; None leaves it to the server. Rows
            that find no free slot come inside their reply, and are read from there.
        api_key: of the server, if it has one.

    Attributes:
        info: name, place and size of the file.

    Raises:
        ValueError: the URL is not whole.
        CaptureFileError: the server refuses, or the file cannot be opened here.
        OSError: there is no server.
    """

    info: FileInfo

    def __init__(
        self, url: str, *, num_slots: int | None = None, api_key: str | None = None
    ) -> None:
        self._url = urlsplit(url)
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ValueError(f"url is {url!r}; give it whole, such as http://127.0.0.1:30000")
        self._key = api_key
        body = {} if num_slots is None else {"num_slots": num_slots}
        self._connection, reply = self._post("/register_capture_file", body)
        try:
            event = reply.readline().removeprefix(b"data: ")
            self.info = msgspec.json.decode(event, type=FileInfo)
            self._bytes = np.memmap(self.info.path, dtype=np.uint8, mode="r")
        except msgspec.DecodeError:
            self.close()
            raise CaptureFileError("the server ended before it told of the file") from None
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise CaptureFileError(
                f"{error}; the server is on another machine, or another user's: leave "
                "capture_file out"
            ) from None

    @property
    def name(self) -> str:
        """What a request gives as ``capture_file``."""
        return self.info.capture_file

    def take(self, meta_info: Mapping[str, Any]) -> Columns:
        """Copy the columns of a reply, wherever they are, and give their slot back.

        Args:
            meta_info: of a reply, or of a stream's event with ``captured``, as JSON or msgpack.

        Returns:
            Column name -> [rows, ...]; empty if the reply has none.

        Raises:
            CaptureFileError: the slot has been given back before. A server that has ended is no
                error: its slots need not be given back.
        """
        columns = {name: rows.copy() for name, rows in self._views(meta_info).items()}
        self._acknowledge(meta_info)
        return columns

    def take_routes(self, meta_info: Mapping[str, Any]) -> RouteTrace:
        """Copy the expert rows of a whole reply, and give their slot back; see ``take``.

        Raises:
            CaptureFileError: the reply has none; or as ``take``.
        """
        if "routes" not in meta_info:
            raise CaptureFileError(
                'meta_info has no routes; ask for them with "capture": ["experts"] in the request'
            )
        header = msgspec.convert(meta_info["routes"], RouteHeader)
        rows = np.ascontiguousarray(self._views(meta_info)["experts"])
        routes = RouteTrace.from_header(header, rows.reshape(-1).view(np.uint8).data)  # a copy
        self._acknowledge(meta_info)
        return routes

    def give_up(self, rid: str) -> None:
        """Give back what a request has, or will have: it was cancelled, or took too long.

        A reply that came at that very moment has a slot that nobody was told of. Call it when the
        request's own call has ended; slots of it that were taken before are no error.

        Args:
            rid: as the request gave it.

        Raises:
            CaptureFileError: the server refuses.
        """
        self._tell({"rids": [rid]})

    def close(self) -> None:
        """End the registration: the server removes the file. What was taken stays valid."""
        self._connection.close()

    def __enter__(self) -> "CaptureFileClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------

    def _views(self, meta_info: Mapping[str, Any]) -> Columns:
        """Return the columns where they are: in the file until it is acknowledged."""
        captured = cast(Mapping[str, Mapping[str, Any]], meta_info.get("captured", {}))
        return {name: self._view(column) for name, column in captured.items()}

    def _view(self, column: Mapping[str, Any]) -> NDArray[np.generic]:
        if "offset" in column:
            begin = int(column["offset"])
            data: Any = self._bytes[begin : begin + int(column["nbytes"])]
        else:
            data = column["data"]
            data = base64.b64decode(data) if isinstance(data, str) else data
        dtype = np.dtype(str(column["dtype"])).newbyteorder("<")
        return np.frombuffer(data, dtype=dtype).reshape(cast(list[int], column["shape"]))

    def _acknowledge(self, meta_info: Mapping[str, Any]) -> None:
        transport = msgspec.convert(meta_info.get("capture_transport"), RowTransport | None)
        if transport is None or transport.type != "file":
            return
        assert transport.slot is not None and transport.generation is not None
        slot = FileSlot(slot=transport.slot, generation=transport.generation)
        self._tell({"slots": [slot]})

    def _tell(self, fields: Mapping[str, Any]) -> None:
        try:
            body = {"capture_file": self.name, **fields}
            connection, _ = self._post("/acknowledge_capture", body)
        except ConnectionError:
            return  # the server has ended, and its slots with it; what it wrote is still mapped
        connection.close()

    def _post(
        self, path: str, body: Mapping[str, Any]
    ) -> "tuple[http.client.HTTPConnection, http.client.HTTPResponse]":
        """Call a route; return the open connection and a reply whose status is 200."""
        kind = http.client.HTTPConnection
        if self._url.scheme == "https":
            kind = http.client.HTTPSConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            path = self._url.path.rstrip("/") + path
            connection.request("POST", path, msgspec.json.encode(body), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                text = reply.read(2000).decode(errors="replace")
                raise CaptureFileError(f"{path}: {reply.status} {text}")
        except BaseException:
            connection.close()
            raise
        return connection, reply
