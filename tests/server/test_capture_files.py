"""Rows by a memory file are those that come inside a reply, and no dead client keeps a slot."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from dovetail.cli import main
from dovetail.replay.files import CaptureFileClient, CaptureFileError
from tests.support.server import SRC, Server, read_events, start_server

PROMPT = [5, 17, 40, 8, 9, 33, 7, 100, 3, 21, 6]
COLUMNS = ["experts", "expert_weights"]
SAMPLING = {"temperature": 1.0, "sampling_seed": 3, "ignore_eos": True, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("capture")


@pytest.fixture(scope="module")
def server(folder: Path, fx_moe_folder: Path) -> Iterator[Server]:
    flags = ("--capture", ",".join(COLUMNS), "--capture-files", str(folder))
    with start_server(*flags, model=fx_moe_folder) as made:
        yield made
        check_end(made, folder)


def check_end(server: Server, folder: Path) -> None:
    """An ending server ends registrations, and leaves nothing of them."""
    with CaptureFileClient(server.url) as file:
        reply = server.generate(**body_of(file))
        assert list(folder.rglob(file.name))
        assert server.end() == 0
        assert list(folder.iterdir()) == []
        begin = reply["meta_info"]["captured"]["experts"]["offset"]
        assert file._bytes[begin : begin + 19 * 6].any(), "what was mapped can still be read"
    assert server.log.read_text() == ""


@pytest.fixture
def file(server: Server) -> Iterator[CaptureFileClient]:
    with CaptureFileClient(server.url, num_slots=2) as made:
        yield made


def body_of(file: CaptureFileClient | None, **fields: Any) -> dict[str, Any]:
    sampling = SAMPLING | fields.pop("sampling_params", {})
    body = {"input_ids": PROMPT, "capture": COLUMNS, "sampling_params": sampling} | fields
    return body if file is None else body | {"capture_file": file.name}


def transport(reply: dict[str, Any]) -> dict[str, Any]:
    return reply["meta_info"]["capture_transport"]


def check_same(file: CaptureFileClient, replies: Any, inline: Any, kind: str = "file") -> None:
    """Each reply has the rows of its neighbour, which has them inside, and gives its slot back."""
    replies = replies if isinstance(replies, list) else [replies]
    inline = inline if isinstance(inline, list) else [inline]
    assert len(replies) == len(inline)
    for reply, plain in zip(replies, inline, strict=True):
        assert reply["output_ids"] == plain["output_ids"]
        assert reply["meta_info"].get("routes") == plain["meta_info"].get("routes")
        assert transport(reply)["type"] == kind and "capture_transport" not in plain["meta_info"]
        for column in reply["meta_info"]["captured"].values():
            assert ("data" in column) == (kind == "inline") != ("offset" in column)
        found, want = file.take(reply["meta_info"]), file.take(plain["meta_info"])
        assert list(found) == list(want) == COLUMNS
        for name in COLUMNS:
            assert want[name].size
            # A batch's weights round apart from those of its neighbour that hits its prefixes.
            np.testing.assert_allclose(found[name], want[name], atol=1e-5 * (name != "experts"))


def wait_until_gone(path: Path) -> None:
    deadline = time.monotonic() + 5
    while path.exists():
        assert time.monotonic() < deadline, "the file of a client that has gone is still there"
        time.sleep(0.01)


# -- rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"routed_experts_start_len": 4},
        {"input_ids": [PROMPT, PROMPT[:4]]},
        {"sampling_params": {"n": 2}},
        {"sampling_params": {"max_new_tokens": 0}},
    ],
)
@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
def test_the_rows_are_those_of_the_inline_reply(
    server: Server, file: CaptureFileClient, fields: dict[str, Any], accept: str
) -> None:
    decode = msgspec.json.decode if accept.endswith("json") else msgspec.msgpack.decode
    for _ in range(3):  # more than there are slots: each is given back
        replies = [
            decode(
                server.post("/generate", body_of(to, **fields), headers={"Accept": accept}).read()
            )
            for to in (file, None)
        ]
        check_same(file, *replies)


def test_a_trace_of_the_rows(server: Server, file: CaptureFileClient) -> None:
    body = body_of(file) | {"return_routed_experts": True}
    reply = server.generate(**body)
    routes = file.take_routes(reply["meta_info"])
    routes.validate(PROMPT + reply["output_ids"], layer_ids=(1, 2, 3), num_experts=8)
    inline = file.take(server.generate(**body_of(None))["meta_info"])
    np.testing.assert_array_equal(routes.ids, inline["experts"])
    assert reply["meta_info"]["routed_experts"], "SGLang's form is where it always is"


@pytest.mark.parametrize("interval", [0, 4])
def test_streams(server: Server, file: CaptureFileClient, interval: int) -> None:
    """Each row once; slots that a slow client does not give back in time make no difference."""
    fields = {"capture_interval": interval, "sampling_params": {"max_new_tokens": 30}}
    events = server.events("/generate", body_of(file, **fields))
    parts = [event["meta_info"] for event in events if "captured" in event["meta_info"]]
    kinds = [part["capture_transport"]["type"] for part in parts]
    assert kinds == ["file"] if interval == 0 else kinds[:3] == ["file", "file", "inline"]
    [plain] = [server.generate(**body_of(None, sampling_params={"max_new_tokens": 30}))]
    found, want = [file.take(part) for part in parts], file.take(plain["meta_info"])
    for name in COLUMNS:
        joined = np.concatenate([part[name] for part in found])
        np.testing.assert_array_equal(joined, want[name])
    assert events[-1]["meta_info"]["routes"] == plain["meta_info"]["routes"]
    assert transport(server.generate(**body_of(file)))["type"] == "file"


# -- slots ---------------------------------------------------------------------------------


def test_without_a_free_slot_rows_come_inline_and_say_so(
    server: Server, file: CaptureFileClient
) -> None:
    plain = server.generate(**body_of(None))
    held = [server.generate(**body_of(file)) for _ in range(2)]
    late = server.generate(**body_of(file))
    assert transport(late) == {"type": "inline", "reason": "no slot of the file is free"}
    check_same(file, late, plain, kind="inline")
    check_same(file, held[0], plain)
    again = server.generate(**body_of(file))
    assert transport(again) == transport(held[0]) | {"generation": 2}
    check_same(file, [again, held[1]], [plain, plain])


def test_a_late_acknowledgement_is_refused(server: Server, file: CaptureFileClient) -> None:
    first = server.generate(**body_of(file))["meta_info"]
    file.take(first)
    second = server.generate(**body_of(file))["meta_info"]
    assert second["capture_transport"]["slot"] == first["capture_transport"]["slot"]
    with pytest.raises(CaptureFileError, match="400"):
        file.take(first)
    slot = {key: first["capture_transport"][key] for key in ("slot", "generation")}
    reply = server.post("/acknowledge_capture", {"capture_file": file.name, "slots": [slot]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "slots[0].generation")
    assert "is 1 of slot" in error["message"] and "generation is 2" in error["message"]
    assert file.take(second)


def test_clients_have_nothing_to_do_with_each_other(
    server: Server, file: CaptureFileClient
) -> None:
    with CaptureFileClient(server.url, num_slots=1) as other:
        assert other.info.path != file.info.path
        mine = [server.generate(**body_of(file)) for _ in range(2)]
        its = server.generate(**body_of(other, input_ids=PROMPT[::-1]))
        assert transport(its)["type"] == "file", "one client's slots are no other's"
        slot = {key: transport(mine[1])[key] for key in ("slot", "generation")}
        assert slot == {"slot": 1, "generation": 1}
        body = {"capture_file": other.name, "slots": [slot]}
        assert server.post("/acknowledge_capture", body).status_code == 400
        check_same(other, its, server.generate(**body_of(None, input_ids=PROMPT[::-1])))
    wait_until_gone(Path(other.info.path))
    reply = server.post("/generate", body_of(other))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "capture_file"
    check_same(file, mine, [server.generate(**body_of(None))] * 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_client_leaves_keeps_no_slot(server: Server, stream: bool) -> None:
    body = {"stream": stream, "sampling_params": {"max_new_tokens": 100}}
    with CaptureFileClient(server.url, num_slots=1) as file:
        for patience_s in (0.02, 0.04):
            left = httpx.stream(
                "POST", f"{server.url}/generate", json=body_of(file, **body), timeout=patience_s
            )
            with suppress(httpx.TimeoutException), left as reply:
                assert stream and next(reply.iter_lines()), "it should have taken longer"
            server.wait_until_idle()
            reply = server.generate(**body_of(file))
            assert transport(reply)["type"] == "file"
            file.take(reply["meta_info"])


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
def test_a_reply_that_nobody_read_keeps_no_slot(server: Server, accept: str) -> None:
    """Its client closes when the reply has come; or has read it, and keeps the slot."""
    url = httpx.URL(server.url)
    with CaptureFileClient(server.url, num_slots=1) as file:
        body = json.dumps(body_of(file)).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAccept: {accept}\r\nContent-Length: "
        request = head.encode() + f"{len(body)}\r\n\r\n".encode() + body
        for num_read in (0, 0, 100, 2**20):
            sock = socket.create_connection((url.host, url.port), timeout=20)
            with sock:
                sock.sendall(request)
                assert sock.recv(2**20, socket.MSG_PEEK).startswith(b"HTTP/1.1 200")
                time.sleep(0.05)  # the rest of it
                if num_read:
                    sock.recv(num_read)
            time.sleep(0.1)
            reply = server.generate(**body_of(file))
            assert transport(reply)["type"] == ("inline" if num_read == 2**20 else "file")
            file.take(reply["meta_info"])


def test_a_request_that_is_given_up_keeps_no_slot(server: Server) -> None:
    """Neither one whose reply was read into nothing, nor one that still runs, nor parts of it."""
    with CaptureFileClient(server.url, num_slots=2) as file:
        for fields in ({"rid": "a"}, {"rid": "a", "sampling_params": {"n": 2}}):
            server.generate(**body_of(file, **fields))
            file.give_up("a")
        server.generate(**body_of(file, rid="a", input_ids=[PROMPT, PROMPT]))
        file.give_up("another")
        kept = server.generate(**body_of(file))
        assert transport(kept)["type"] == "inline"
        file.give_up("a")
        body = body_of(file, rid=["b", "c"], input_ids=[PROMPT] * 2) | {"stream": True}
        body["sampling_params"]["max_new_tokens"] = 100
        kept = server.generate(**body_of(file, rid="d"))
        with server.http.stream("POST", "/generate", json=body) as reply:
            events = iter(read_events(reply))
            next(events)
            file.give_up("c")
            rest = [event["meta_info"] for event in events]
        assert all(
            part["capture_transport"]["type"] == "file" for part in rest if "captured" in part
        )
        both = [server.generate(**body_of(file)) for _ in range(2)]
        assert [transport(one)["type"] for one in both] == ["file", "inline"]
        assert file.take(kept["meta_info"])
        reply = server.post("/acknowledge_capture", {"capture_file": file.name})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "slots"


def test_an_aborted_generation_has_its_rows_in_the_file(
    server: Server, file: CaptureFileClient
) -> None:
    body = body_of(file, rid="to-abort", sampling_params={"max_new_tokens": 100}, stream=True)
    with server.http.stream("POST", "/generate", json=body) as reply:
        for event in read_events(reply):
            if len(event["output_ids"]) == 5:
                server.post("/abort_request", {"rid": "to-abort"})
    assert event["meta_info"]["finish_reason"]["type"] == "abort"
    num_rows = len(PROMPT) + len(event["output_ids"]) - 1
    routes = file.take_routes(event["meta_info"])
    assert routes.num_rows == num_rows
    routes.validate(PROMPT + event["output_ids"])


# -- life and death --------------------------------------------------------------------------

CLIENT = """
import sys, time
from dovetail.replay.files import CaptureFileClient
file = CaptureFileClient(sys.argv[1], num_slots=1)
print(file.name, flush=True)
time.sleep(60)
"""


def test_a_killed_client_leaves_nothing(server: Server, folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    [path] = folder.rglob(name)
    body = body_of(None) | {"capture_file": name}
    assert transport(server.generate(**body))["type"] == "file"
    assert transport(server.generate(**body))["type"] == "inline"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    wait_until_gone(path)
    assert server.post("/generate", body).status_code == 400


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/generate", {"input_ids": [5], "capture": COLUMNS, "capture_file": "../x"},
         "capture_file", "no registered file"),
        ("/generate", {"input_ids": [5], "capture_file": "x"}, "capture_file", "capture names"),
        ("/acknowledge_capture", {"capture_file": "/etc/passwd", "slots": []}, "capture_file",
         "no registered file"),
        ("/acknowledge_capture", {"slots": []}, "capture_file", "missing"),
        ("/register_capture_file", {"num_slots": 0}, "num_slots", "legal range is 1 to 256"),
        ("/register_capture_file", {"num_slots": 10**9}, "num_slots", "legal range is 1 to 256"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    server: Server, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    reply = server.post(path, body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param) and words in error["message"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--capture-files", "/dev/null"), "capture_files: nothing is captured; give --capture"),
        (
            ("--capture", "experts", "--capture-files", "/dev/null"),
            "capture_files: /dev/null cannot",
        ),
    ],
)
def test_a_server_that_could_not_keep_it_does_not_start(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", *flags]) == 2
    said = capsys.readouterr()
    assert words in said.err and len(said.err.splitlines()) == 1
