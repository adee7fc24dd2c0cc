"""One end of the connection between a front end and its engine's process.

Owns the writing thread and the noticing of a peer that is gone. Carries frames of bytes, in order;
must not know what they say.
"""

import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

LOOK_SECONDS = 1.0
"""How often the peer is looked at. Its death closes the connection at once, unless something that
it has forked holds the other end open."""


class Link:
    """Frames to and from one peer. Any thread sends and never waits; one thread receives.

    Args:
        connection: this end.
        is_peer_alive: whether the process at the other end is there.
    """

    def __init__(
        self, connection: "Connection[bytes, bytes]", is_peer_alive: Callable[[], bool]
    ) -> None:
        self._connection = connection
        self._is_peer_alive = is_peer_alive
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="dovetail-writer", daemon=True)
        self._writer.start()

    def send(self, frame: bytes) -> None:
        """Queue a frame. To a peer that is gone it is lost."""
        self._frames.put(frame)

    def receive(self) -> bytes:
        """Wait for the next frame.

        Raises:
            EOFError: the peer is gone, and all that it sent has been received.
        """
        try:
            while True:
                is_alive = self._is_peer_alive()
                if self._connection.poll(LOOK_SECONDS):
                    return self._connection.recv_bytes()
                if not is_alive:
                    raise EOFError("the peer has ended")
        except OSError as error:  # it ended while it wrote or before it had read all
            raise EOFError(str(error)) from error

    def finish(self, timeout_s: float) -> None:
        """Send what is queued, as far as that takes no longer than ``timeout_s``."""
        self._frames.put(None)
        self._writer.join(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish, and let go of the connection; nobody may be receiving."""
        self.finish(timeout_s)
        self._connection.close()

    def _write(self) -> None:
        try:
            while (frame := self._frames.get()) is not None:
                self._connection.send_bytes(frame)
        except OSError:
            return  # the peer is gone, which whoever receives will notice
