"""The process of an engine: what ``core.process`` starts.

Owns the life of this process: it serves one front end, and ends when that says so, when that is
gone, on SIGTERM, and when the loop has failed. An interrupt is for the front end to act on.

    python -m dovetail.core.child FD        # FD: this end of the connection
"""

import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

import msgspec

from dovetail.config.resolve import resolve
from dovetail.config.schema import EngineOptions
from dovetail.core.link import Link
from dovetail.core.local import LocalEngine
from dovetail.core.mailbox import News
from dovetail.errors import ConfigError, EngineClosed, EngineError
from dovetail.exec.gpu import find_gpu
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.codec import FROM_ENGINE, TO_ENGINE
from dovetail.wire.control import Abort, AbortGroup, Admit, Close
from dovetail.wire.process import (
    Ended,
    Events,
    FromEngine,
    Heartbeat,
    Loading,
    Ready,
    Refused,
    Start,
    ToEngine,
)

HEARTBEAT_SECONDS = 0.5
FLUSH_SECONDS = 2.0


class EngineServer:
    """One engine and the link to its front end. The main thread loads, then beats the heart."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._engine: LocalEngine | None = None

    def run(self) -> int:
        """Serve until the end; return the exit code."""
        start = TO_ENGINE.decode(self._link.receive())
        assert isinstance(start, Start)
        # From now on, so that a front end that is gone also ends a load that takes minutes.
        threading.Thread(target=self._read, name="dovetail-reader", daemon=True).start()
        try:
            engine = self._load(start)
        except ConfigError as error:
            self._send(Refused(error.field, error.message))
            return 1
        except Exception as error:
            self._send(Refused(None, repr(error)))
            raise
        self._engine = engine

        def stop(signum: int, frame: object) -> None:
            engine.stop()

        signal.signal(signal.SIGTERM, stop)
        self._send(Ready(msgspec.msgpack.encode(engine.config), _heartbeat(engine)))
        while not engine.wait(HEARTBEAT_SECONDS):
            self._send(_heartbeat(engine))
        self._send(Ended(str(engine.failure)))
        return 0 if engine.loop.is_closing else 1

    def _load(self, start: Start) -> LocalEngine:
        options = msgspec.msgpack.decode(start.options, type=EngineOptions)
        config = resolve(options, find_gpu())
        return LocalEngine(
            config,
            Tokenizer.from_folder(config.tokenizer_folder),
            on_progress=lambda what, done, total: self._send(Loading(what, done, total)),
        )

    def _read(self) -> None:
        """Do what the front end says. When it is gone, nobody is left to end properly for."""
        try:
            while True:
                self._apply(TO_ENGINE.decode(self._link.receive()))
        except EOFError:
            pass
        except Exception:
            traceback.print_exc()
        os._exit(1)

    def _apply(self, message: ToEngine) -> None:
        engine = self._engine
        assert engine is not None, "a message came before the engine was ready"
        match message:
            case Admit(request):
                try:
                    engine.start(request, self._deliver)
                except EngineClosed:
                    return  # the front end is about to learn of it
            case Abort() | AbortGroup():
                engine.send(message)
            case Close():
                engine.stop()
            case Start():
                raise AssertionError("the engine is started twice")

    def _deliver(self, news: News) -> None:
        if not isinstance(news, EngineError):  # an error is the loop's end, of which ``run`` tells
            self._send(Events(tuple(news)))

    def _send(self, message: FromEngine) -> None:
        self._link.send(FROM_ENGINE.encode(message))


def _heartbeat(engine: LocalEngine) -> Heartbeat:
    return Heartbeat(engine.turn_age_s, engine.stats())


def main() -> int:
    """Serve the front end at the connection whose descriptor is the only argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, parent_id = int(sys.argv[1]), os.getppid()
    os.set_inheritable(descriptor, False)
    link = Link(Connection(descriptor), lambda: os.getppid() == parent_id)
    try:
        return EngineServer(link).run()
    finally:
        link.finish(FLUSH_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
