"""How long the rows of a long sequence take from a generation's end into a client's hands.

    python -m benchmarks.capture_transport [--rounds N] [--output FILE.jsonl]

The server is the real one, but for its engine: a port that answers each request at once with the
rows of 32,768 tokens x 48 layers x 8. A client in a process of its own asks in each form in turn
and decodes what comes to an array. Time counts from the engine's last event; CPU time is that of
both processes, from sending the request on.
"""

import argparse
import base64
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.common import describe_run
from dovetail.config.hub import locate_model
from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig
from dovetail.core.client import EngineClient
from dovetail.core.mailbox import Deliver
from dovetail.core.port import Home
from dovetail.replay.files import CaptureFileClient
from dovetail.server.capture_files import CaptureFolder
from dovetail.server.run import HttpServer, bound_socket, url_of
from dovetail.server.settings import ServerSettings
from dovetail.wire.capture import CapturedRows, CaptureSpan
from dovetail.wire.control import Abort, AbortGroup
from dovetail.wire.request import Request
from dovetail.wire.result import FinishReason, TokenEvent, Usage
from dovetail.wire.status import EngineStats, Health
from dovetail.wire.tensor import TensorEnvelope

NUM_ROWS, NUM_LAYERS, K, NUM_EXPERTS = 32_768, 48, 8, 128

Line = dict[str, Any]
Rows = NDArray[np.generic]


class RowsPort:
    """An engine that has computed all rows before it is asked."""

    def __init__(self, config: EngineConfig) -> None:
        self.home = Home()
        self.config = config
        self._rows = rows_of_all()
        self._span = CaptureSpan(start=0, end=NUM_ROWS, epoch=0)

    def start(self, request: Request, deliver: Deliver) -> None:
        """Answer with the prompt's rows and one token; note when."""
        rows = CapturedRows(start=0, rows=TensorEnvelope.pack(self._rows), spans=(self._span,))
        event = TokenEvent(
            request_id=request.request_id,
            token_ids=(3,),
            logprobs=(0.0,),
            epochs=(0,),
            finish=FinishReason(type="length"),
            usage=Usage(prompt_tokens=NUM_ROWS, completion_tokens=1),
            captured={"experts": rows} if request.capture.columns else None,
        )
        print(time.monotonic(), flush=True)  # one clock for all processes
        deliver((event,))

    def send(self, message: Abort | AbortGroup) -> None:
        """Nothing runs long enough."""

    def stats(self) -> EngineStats:
        """Return nothing of interest."""
        return EngineStats(
            num_running=0,
            num_waiting=0,
            num_pages=1,
            num_free_pages=1,
            num_cached_pages=0,
            num_cached_tokens=0,
        )

    def health(self) -> Health:
        """Say yes."""
        return Health(state="alive")

    def close(self) -> None:
        """Nothing is open."""


def rows_of_all() -> NDArray[np.uint8]:
    """Return the rows that the server sends, and the client expects."""
    shape = NUM_ROWS, NUM_LAYERS, K
    return np.random.default_rng(0).integers(0, NUM_EXPERTS, shape, dtype=np.uint8)


def serve(folder: Path) -> int:
    """Serve a model of which only the configuration exists."""
    options: dict[str, object] = {
        "model": str(folder),
        "load_format": "dummy",
        "capture": "experts",
    }
    config = resolve(options_from(options | {"num_pages": NUM_ROWS}))  # of no engine: no memory
    sock = bound_socket("127.0.0.1", 0)
    files = CaptureFolder(folder / "files")
    settings = ServerSettings(model_name="rows", version="0")
    server = HttpServer(
        EngineClient(RowsPort(config)),
        settings,
        sock,
        files,
        on_ready=lambda: print(url_of(sock), flush=True),
    )
    try:
        return server.run()
    finally:
        files.close()


def write_model(folder: Path) -> None:
    """Write a configuration in the shape of Qwen3-30B-A3B's experts."""
    embedded, _ = locate_model(None)
    raw = json.loads((embedded / "config.json").read_text())
    raw |= {
        "num_hidden_layers": NUM_LAYERS,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": K,
        "max_position_embeddings": NUM_ROWS + 64,
    }
    (folder / "config.json").write_text(json.dumps(raw))


class Client:
    """Asks one server for the rows in each form."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self._process = process
        self._url = url.removeprefix("http://")
        self._file = CaptureFileClient(url, num_slots=2)
        self._body = {"input_ids": [i % 900 + 3 for i in range(NUM_ROWS)]}
        own = {"capture": ["experts"]}
        self.forms: dict[str, Callable[[], Rows]] = {
            "no rows": lambda: self._ask({}, "json", lambda meta: np.zeros(0)),
            "SGLang's, in JSON": lambda: self._ask(
                {"return_routed_experts": True}, "json", _of_sglang
            ),
            "our own, in JSON": lambda: self._ask(own, "json", _of_own),
            "our own, in msgpack": lambda: self._ask(own, "msgpack", _of_own),
            "our own, by a file": lambda: self._ask(
                own | {"capture_file": self._file.name},
                "json",
                lambda meta: self._file.take(meta)["experts"],
            ),
        }

    def measure(self, form: str) -> tuple[float, float]:
        """Return milliseconds from the last event to the array, and of CPU time."""
        cpu_started = time.process_time() + cpu_s(self._process.pid)
        rows = self.forms[form]()
        ended = time.monotonic()
        cpu_ended = time.process_time() + cpu_s(self._process.pid)
        assert self._process.stdout is not None
        delivered = float(self._process.stdout.readline())
        assert rows.size in (0, NUM_ROWS * NUM_LAYERS * K)
        return 1e3 * (ended - delivered), 1e3 * (cpu_ended - cpu_started)

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _ask(
        self, fields: dict[str, Any], kind: str, rows_of: Callable[[dict[str, Any]], Rows]
    ) -> Rows:
        connection = http.client.HTTPConnection(self._url)
        headers = {"Content-Type": "application/json", "Accept": f"application/{kind}"}
        body = self._body | {"sampling_params": {"max_new_tokens": 1}} | fields
        connection.request("POST", "/generate", msgspec.json.encode(body), headers)
        data = connection.getresponse().read()
        connection.close()
        decode = msgspec.json.decode if kind == "json" else msgspec.msgpack.decode
        return rows_of(decode(data)["meta_info"])


def _of_sglang(meta: dict[str, Any]) -> Rows:
    data = base64.b64decode(meta["routed_experts"])
    return np.frombuffer(data, dtype="<i4").reshape(NUM_ROWS, NUM_LAYERS, K)


def _of_own(meta: dict[str, Any]) -> Rows:
    column = meta["captured"]["experts"]
    data = column["data"]
    data = base64.b64decode(data) if isinstance(data, str) else data
    return np.frombuffer(data, dtype=column["dtype"]).reshape(column["shape"])


def cpu_s(process_id: int) -> float:
    """Return the CPU time of a process's threads that live; it keeps those that it starts."""
    tasks = Path(f"/proc/{process_id}/task")
    return 1e-9 * sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())


def transport(rounds: int) -> list[Line]:
    """Return time and CPU time of each form, in turn, after a round that does not count."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as name:
        write_model(Path(name))
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.capture_transport", "--serve", name],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            client = Client(process, process.stdout.readline().strip())
            want = rows_of_all()
            found: dict[str, list[tuple[float, float]]] = {form: [] for form in client.forms}
            for turn in range(rounds + 1):
                for form, values in found.items():
                    value = client.measure(form)
                    if turn:
                        values.append(value)
            for form, ask in client.forms.items():
                assert form == "no rows" or np.array_equal(ask(), want), form
            client.close()
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()
    return [
        {
            "work": f"rows from a generation's end to a client's array, {form}",
            "shape": f"{NUM_ROWS} rows x {NUM_LAYERS} layers x {K}, another process, HTTP",
            "batch": 1,
            "value": round(statistics.median(ms for ms, _ in values), 1),
            "unit": "ms, median of rounds",
            "least_ms": round(min(ms for ms, _ in values), 1),
            "cpu_ms": round(statistics.median(cpu for _, cpu in values), 1),
            "rounds": rounds,
        }
        for form, values in found.items()
    ]


def memory_folder() -> str | None:
    """Return a folder in memory, None if there is none."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def main() -> int:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(description="What it takes to hand rows to a client.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=Path, metavar="FOLDER", help="be the server (inside)")
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve)
    lines, run = transport(args.rounds), describe_run(sys.argv)
    text = "\n".join(json.dumps({"floor": None, **line, **run}) for line in lines)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
