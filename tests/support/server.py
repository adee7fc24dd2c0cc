"""A real server in a process of its own, and small clients for it.

``start_server`` is a context manager; what it yields knows its URL and its process, and leaves
nothing behind. Everything waits for bounded times.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SRC = Path(__file__).resolve().parents[2] / "src"
START_S = 90
END_S = 15


@dataclass
class Server:
    """A running ``dovetail serve``."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        """Post JSON, as ``json.dumps`` writes it."""
        headers = {"Content-Type": "application/json"} | kwargs.pop("headers", {})
        return self.http.post(path, content=json.dumps(body), headers=headers, **kwargs)

    def generate(self, **body: Any) -> Any:
        """Call /generate and return the reply."""
        return right(self.post("/generate", body))

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Stream a call to its end and return its events."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            return list(read_events(reply))

    def metric(self, name: str) -> float:
        """Return one number of /metrics; 0 if it is not there yet."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        return 0.0

    def wait_until_idle(self, seconds: float = 20) -> None:
        """Wait until no sequence runs or waits."""
        deadline = time.monotonic() + seconds
        names = ("dovetail_running_sequences", "dovetail_waiting_sequences")
        while any(self.metric(name) for name in names):
            assert time.monotonic() < deadline, "sequences are still open"
            time.sleep(0.05)

    def children(self) -> list[int]:
        """Return the ids of the process's children."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal the server, wait, and return its exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_S)


@contextmanager
def start_server(*flags: str, model: Path | None = None) -> Iterator[Server]:
    """Start ``dovetail serve`` on a free port; it is ended, or killed, on the way out."""
    words = [sys.executable, "-m", "dovetail.cli", "serve", "--port", "0", *flags]
    if model is not None:
        words += ["--model", str(model)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                words,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
            )
        server = None
        try:
            server = Server(process, _url(process, log), log)
            yield server
        finally:
            if server is not None:
                server.http.close()
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            finally:
                assert process.stdout is not None
                process.stdout.close()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    """Wait for the line that the server prints when it is ready."""
    assert process.stdout is not None
    watchdog = time.monotonic() + START_S
    line = process.stdout.readline()  # ends with the process at the latest
    assert time.monotonic() < watchdog and " at http" in line, line + log.read_text()
    return line.split(" at ")[1].strip()


def right(reply: httpx.Response) -> Any:
    """Return the JSON of a reply that must be 200; its numbers must be legal JSON."""
    assert reply.status_code == 200, (reply.status_code, reply.text)
    return strict_json(reply.content)


def strict_json(data: bytes | str) -> Any:
    """Parse JSON and refuse what Python alone allows."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(data, parse_constant=refuse)


def read_events(reply: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a reply; it must end with [DONE], and nothing after it."""
    is_done = False
    for line in reply.iter_lines():
        if not line:
            continue
        assert not is_done and line.startswith("data: "), line
        data = line.removeprefix("data: ")
        is_done = data == "[DONE]"
        if not is_done:
            yield strict_json(data)
    assert is_done, "the stream broke off"
