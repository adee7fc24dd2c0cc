"""The client of capture files against a server that dies at a bad moment."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dovetail.replay.files import CaptureFileClient, CaptureFileError
from dovetail.wire.capture import FileInfo

ROWS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)


class Mortal:
    """Answers one registration, and dies when it is told to."""

    def __init__(self, event: bytes) -> None:
        self._event = event
        self._door = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        self._connection, _ = self._door.accept()
        self._connection.recv(65536)
        self._connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + self._event
        )
        if not self._event:
            self._connection.close()

    def die(self) -> None:
        self._thread.join(10)
        assert self._connection is not None
        self._connection.close()
        self._door.close()


@pytest.fixture
def info(tmp_path: Path) -> FileInfo:
    path = tmp_path / "rows"
    path.write_bytes(ROWS.tobytes() + bytes(4096 - ROWS.nbytes))
    return FileInfo(capture_file="rows", path=str(path), num_slots=1, slot_bytes=4096)


@pytest.fixture
def mortal(info: FileInfo) -> Iterator[Mortal]:
    server = Mortal(b"data: " + msgspec.json.encode(info) + b"\n\n")
    yield server
    server.die()


def test_rows_outlive_their_server(mortal: Mortal) -> None:
    """What is mapped can be read; that nobody is left to take the slot back costs nothing."""
    column = {"start": 0, "dtype": "uint8", "shape": [3, 2, 2], "offset": 0, "nbytes": 12}
    transport = {"type": "file", "capture_file": "rows", "slot": 0, "generation": 1}
    with CaptureFileClient(mortal.url) as file:
        mortal.die()
        taken = file.take({"captured": {"experts": column}, "capture_transport": transport})
    np.testing.assert_array_equal(taken["experts"], ROWS)


def test_a_server_that_dies_before_it_tells_of_the_file() -> None:
    server = Mortal(b"")
    with pytest.raises((CaptureFileError, OSError)):
        CaptureFileClient(server.url)
    server.die()


def test_a_reply_without_routes_is_named(mortal: Mortal) -> None:
    with (
        CaptureFileClient(mortal.url) as file,
        pytest.raises(CaptureFileError, match=r'no routes; ask for them with "capture"'),
    ):
        file.take_routes({"id": "a"})


@pytest.mark.parametrize("url", ["127.0.0.1:30471", "localhost:30000", "http://", "ftp://a"])
def test_a_url_that_is_not_whole_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"url is '.*'; give it whole, such as http://"):
        CaptureFileClient(url)
