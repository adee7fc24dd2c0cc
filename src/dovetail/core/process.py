"""The engine in a process of its own, seen from the front end.

Owns that process, from its start to its end, and the streams that are open on it. Must not load a
model; imports no torch.
"""

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing import Pipe
from pathlib import Path

import msgspec

from dovetail.config.resolve import options_from
from dovetail.config.schema import EngineConfig, EngineOptions
from dovetail.core.link import Link
from dovetail.core.mailbox import Deliver, Outbox
from dovetail.core.port import HEALTH_TIMEOUT_SECONDS, Home, Progress, health_of
from dovetail.errors import ConfigError, EngineClosed, InvariantError, RequestError
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
)
from dovetail.wire.request import Request
from dovetail.wire.status import EngineStats, Health

CLOSE_SECONDS, TERMINATE_SECONDS, KILL_SECONDS = 4.0, 0.5, 0.5
"""How long the process is waited for when it is asked to close, told to, and made to."""

READER_SECONDS = 2.0
"""How long its last news, and the end of the connection, may take after that: see ``core.link``."""

_log = logging.getLogger(__name__)


class RemoteEngine:
    """An ``EnginePort`` to an engine in a process of its own.

        client = EngineClient(RemoteEngine("Qwen/Qwen3-0.6B", max_running=64))

    The process sees no interrupt from the keyboard; it ends with this one, however that ends.

    Args:
        model: as for ``Engine``.
        on_progress: told how the start gets on; see ``core.port.Progress``.
        health_timeout_s: a loop of which no turn is known for longer is ``stalled``. An idle loop
            turns every half second and tells of it as often, so give at least 2.
        options: see ``EngineOptions``.

    Raises:
        ConfigError: the options or the model folder cannot be used.
        EngineClosed: the process ended, or failed in another way, before it could serve.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        on_progress: Progress | None = None,
        health_timeout_s: float = HEALTH_TIMEOUT_SECONDS,
        **options: object,
    ) -> None:
        if model is not None:
            options["model"] = str(model)
        self._health_timeout_s = health_timeout_s
        self.home = Home()
        self._is_closing = False
        with ExitStack() as undo:
            self._process, self._link = _launch(options_from(options))
            # Also on an interrupt: nothing is left behind.
            undo.callback(self._link.close, KILL_SECONDS)
            undo.callback(_kill, self._process)
            ready = self._wait_until_ready(on_progress)
            undo.pop_all()
        self.config = msgspec.msgpack.decode(ready.config, type=EngineConfig)
        self._last_heard = ready.heartbeat, time.monotonic()
        self._outbox = Outbox(max_open=self.config.max_open)
        self._reader = threading.Thread(target=self._read, name="dovetail-reader", daemon=True)
        self._reader.start()
        atexit.register(self.close)

    @property
    def process_id(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def start(self, request: Request, deliver: Deliver) -> None:
        """Begin a request; see ``EnginePort``."""
        self.home.check()
        frame = TO_ENGINE.encode(Admit(request))
        self._outbox.open(request.request_id, deliver, num_samples=request.sampling.n)
        self._link.send(frame)

    def send(self, message: Abort | AbortGroup) -> None:
        """Pass a message to the loop."""
        self._link.send(TO_ENGINE.encode(message))

    def refit(self, named_tensors: object, *, version: int | None = None) -> int:
        """Refuse: tensors do not cross to another process yet."""
        del named_tensors, version
        raise RequestError(
            "refit",
            "an engine in a process of its own takes no new weights yet; use dovetail.Engine, "
            "which runs in this one",
        )

    def stats(self) -> EngineStats:
        """Return the counts of the last heartbeat, which are half a second old or less."""
        heartbeat, _ = self._last_heard
        return heartbeat.stats

    def health(self) -> Health:
        """Say whether the loop turns, as far as its heartbeats tell."""
        heartbeat, heard_at = self._last_heard
        return health_of(
            self.home.failure or self._outbox.failure,
            turn_age_s=heartbeat.turn_age_s + time.monotonic() - heard_at,
            timeout_s=self._health_timeout_s,
        )

    def close(self) -> None:
        """Abort what is open and end the process, within 5 seconds and by force if need be.

        In a fork, which also comes here when it exits: nothing; the engine is another's.
        """
        if self.home.failure is not None:
            return
        self._is_closing = True
        atexit.unregister(self.close)
        _end_process(self._process, self._link)
        self._reader.join(READER_SECONDS)

    # -- inside --------------------------------------------------------------------------

    def _wait_until_ready(self, on_progress: Progress | None) -> Ready:
        while True:
            try:
                message = FROM_ENGINE.decode(self._link.receive())
            except EOFError:
                raise EngineClosed(f"{_obituary(self._process)} before it could serve") from None
            match message:
                case Loading(what, num_done, num_total):
                    if on_progress is not None:
                        on_progress(what, num_done, num_total)
                case Ready():
                    return message
                case Refused(field, text):
                    if field is not None:
                        raise ConfigError(field, text)
                    raise EngineClosed(f"the engine could not start: {text}")
                case _:
                    raise InvariantError(f"the engine was not ready and said {message!r}")

    def _read(self) -> None:
        """Pass news on. Whatever ends the reading, every open request gets its answer."""
        try:
            while True:
                self._apply(FROM_ENGINE.decode(self._link.receive()))
        except EOFError:
            self._end(_obituary(self._process))
        except Exception as error:  # a bug of ours, on either side
            self._end(f"the engine's news could not be passed on: {error!r}")
            self._process.kill()
        finally:
            self._link.close(KILL_SECONDS)

    def _apply(self, message: FromEngine) -> None:
        match message:
            case Events(events):
                self._outbox.put(events)
            case Heartbeat():
                self._last_heard = message, time.monotonic()
            case Ended(reason):
                self._end(reason)
            case _:
                raise InvariantError(f"the engine was ready and said {message!r}")

    def _end(self, reason: str) -> None:
        """Let everybody know that the engine has ended; the first reason counts."""
        if self._outbox.failure is not None:
            return
        if self._is_closing:
            reason = "the engine has been closed"
        else:
            _log.error("process %d: %s", self._process.pid, reason)
        self._outbox.close(EngineClosed(reason))


def _launch(options: EngineOptions) -> "tuple[subprocess.Popen[bytes], Link]":
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            # Not from the current folder, whose files may have the names of modules.
            [sys.executable, "-P", "-m", "dovetail.core.child", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            process_group=0,  # else the keyboard's interrupt reaches it before it can ignore it
        )
    link = Link(ours, lambda: process.poll() is None)
    link.send(TO_ENGINE.encode(Start(msgspec.msgpack.encode(options))))
    return process, link


def _obituary(process: "subprocess.Popen[bytes]") -> str:
    """Return how the process ended, for its front end's users."""
    try:
        code = process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return "the engine's process closed its connection"
    if code < 0:
        return f"the engine's process was killed by {signal.Signals(-code).name}"
    return f"the engine's process ended with exit code {code}"


def _end_process(process: "subprocess.Popen[bytes]", link: Link) -> None:
    """Ask the process to end, then tell it, then make it."""
    steps: list[tuple[Callable[[], None], float]] = [
        (lambda: link.send(TO_ENGINE.encode(Close())), CLOSE_SECONDS),
        (process.terminate, TERMINATE_SECONDS),
        (process.kill, KILL_SECONDS),
    ]
    for step, patience_s in steps:
        step()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        return


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
