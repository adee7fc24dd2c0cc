"""One wrong request gets an error that names the field, and hurts nobody else (B111-B119).

[LIVE] after each: a fixed request is answered as before.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.support.bad_requests import BAD_REQUESTS, BadRequest
from tests.support.server import Server, right, start_server, strict_json

GOLDEN = {"text": "ROMEO\n", "sampling_params": {"temperature": 0, "max_new_tokens": 6}}
GOLDEN_IDS = [43, 555, 263, 281, 1290, 201]
MAX_BODY_BYTES = 2**20


@pytest.fixture(scope="module")
def small_server() -> Iterator[Server]:
    flags = ("--num-pages", "512", "--max-body-bytes", str(MAX_BODY_BYTES))
    with start_server(*flags) as made:
        yield made
        made.wait_until_idle()
        log = made.log.read_text()
        assert "Traceback" not in log and log == "", log


@pytest.fixture(autouse=True)
def unharmed(small_server: Server) -> Iterator[None]:
    yield
    assert small_server.generate(**GOLDEN)["output_ids"] == GOLDEN_IDS


def refused(reply: httpx.Response, status: int) -> dict:
    """The one form of an error."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = strict_json(reply.content)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert len(reply.content) < 2000, "an error does not echo what it refuses"
    assert "Traceback" not in error["message"] and ".py" not in error["message"]
    return error


def name_of(bad: BadRequest) -> str:
    return f"{bad.route}-{bad.param}-{bad.words}"[:60]


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=name_of)
def test_the_error_names_the_field(small_server: Server, bad: BadRequest) -> None:
    content = bad.body if isinstance(bad.body, bytes) else json.dumps(bad.body)
    headers = {"Content-Type": "application/json"}
    error = refused(small_server.http.post(bad.route, content=content, headers=headers), bad.status)
    assert error["param"] == bad.param
    assert bad.words in error["message"]
    if "context length" in error["message"]:
        assert error["code"] == "context_length_exceeded"


def test_streams_are_refused_with_a_status_too(small_server: Server) -> None:
    for route in ("/generate", "/v1/chat/completions", "/v1/completions"):
        error = refused(small_server.post(route, {"stream": True, "temperature": -1}), 400)
        assert error["param"] in ("text", "messages", "prompt")


@pytest.mark.parametrize(
    ("accept", "is_refused"),
    [
        ("application/msgpack", True),
        ("application/msgpack;q=1, application/json", True),
        ("application/msgpack, text/event-stream", False),
        ("application/msgpack, */*", False),
        ("APPLICATION/MsgPack", True),
        ("application/msgpack;q=0, application/json", False),
        ("application/json", False),
    ],
)
def test_a_stream_is_no_msgpack(small_server: Server, accept: str, is_refused: bool) -> None:
    body = GOLDEN | {"stream": True}
    reply = small_server.post("/generate", body, headers={"Accept": accept})
    if is_refused:
        error = refused(reply, 400)
        assert error["param"] == "stream" and "leave out Accept" in error["message"]
    else:
        assert reply.headers["content-type"].startswith("text/event-stream")


def test_a_mask_that_is_too_large_is_the_items_own_mistake(small_server: Server) -> None:
    """Neither the other items of a batch nor those who run beside it notice."""
    small = {"temperature": 9, "top_k": 512, "sampling_seed": 1, "max_new_tokens": 6}
    body = {"text": ["A", "A"], "return_sampling_mask": True}
    fine, large = small_server.generate(**body, sampling_params=[small, small | {"top_k": 600}])
    reason = large["meta_info"]["finish_reason"]
    assert (reason["type"], reason["param"]) == ("error", "return_sampling_mask")
    assert "more than 512 ids; give top_k of 512 at most" in reason["message"]
    alone = small_server.generate(text="A", return_sampling_mask=True, sampling_params=small)
    assert fine["output_ids"] == alone["output_ids"] and len(fine["output_ids"]) == 6
    body = {"text": "A", "return_sampling_mask": True, "sampling_params": small | {"top_k": 600}}
    assert small_server.events("/generate", body)[-1]["meta_info"]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/generate/", 404),
        ("GET", "/v1", 404),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/generate", 405),
        ("DELETE", "/generate", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/chat/completions", 405),
        ("OPTIONS", "/v1/models", 405),
        ("PATCH", "/generate", 405),
    ],
)
def test_routes_and_methods(small_server: Server, method: str, path: str, status: int) -> None:
    reply = small_server.http.request(method, path)
    refused(reply, status)
    assert ("allow" in reply.headers) == (status == 405)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_content_types(small_server: Server, kind: str) -> None:
    for path in ("/generate", "/v1/chat/completions"):
        error = refused(small_server.post(path, GOLDEN, headers={"Content-Type": kind}), 415)
        assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "APPLICATION/JSON"])
def test_content_types_of_json(small_server: Server, kind: str) -> None:
    reply = right(small_server.post("/generate", GOLDEN, headers={"Content-Type": kind}))
    assert reply["output_ids"] == GOLDEN_IDS


def test_a_compressed_body_is_refused(small_server: Server) -> None:
    reply = small_server.post("/generate", GOLDEN, headers={"Content-Encoding": "gzip"})
    assert "'gzip'; send the body as it is" in refused(reply, 415)["message"]


def test_no_content_type_is_json(small_server: Server) -> None:
    body = json.dumps(GOLDEN).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    assert raw(small_server, head.encode() + b"Connection: close\r\n\r\n" + body).startswith(
        b"HTTP/1.1 200"
    )


def raw(server: Server, data: bytes) -> bytes:
    """Send bytes, and return all that comes until the server closes."""
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=20) as sock:
        sock.sendall(data)
        reply = b""
        while part := sock.recv(65536):
            reply += part
        return reply


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_long_body_is_refused_before_it_is_read(small_server: Server, is_chunked: bool) -> None:
    """The error comes while most of the body has not been sent."""
    url = httpx.URL(small_server.url)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    if is_chunked:
        chunk = b"%x\r\n" % 2**20 + b" " * 2**20 + b"\r\n"
        data = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + chunk
    else:
        data = head + b"Content-Length: 50000000\r\n\r\n{"
    with socket.create_connection((url.host, url.port), timeout=20) as sock:
        sock.sendall(data)
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_body_of_50_mb_is_refused(small_server: Server) -> None:
    """Whether the client still reads the error after its pipe broke is the client's affair."""
    try:
        reply = small_server.http.post(
            "/generate", content=b" " * 50_000_000, headers={"Content-Type": "application/json"}
        )
    except httpx.TransportError:
        return
    assert refused(reply, 413)["code"] == "body_too_large"


def test_half_a_body(small_server: Server) -> None:
    """A client that leaves in the middle of its body costs nothing."""
    url = httpx.URL(small_server.url)
    with socket.create_connection((url.host, url.port), timeout=20) as sock:
        sock.sendall(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"text"')
    assert right(small_server.post("/generate", GOLDEN))["output_ids"] == GOLDEN_IDS


def test_what_is_no_http(small_server: Server) -> None:
    assert b"400" in raw(small_server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")


CHUNKED = b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
MANY = b"".join(b"a%05d: v\r\n" % number for number in range(20_000))
WITHOUT_END = {
    "path": (b"POST /", b"u" * 2**20),
    "one header": (b"GET /health HTTP/1.1\r\nHost: ", b"x" * 2**20),
    "many headers": (b"GET /health HTTP/1.1\r\n", MANY),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n", MANY),
    "extensions of a chunk": (CHUNKED + b"2;", b"e" * 2**20),
    "a whole head": (b"GET /health HTTP/1.1\r\nHost: ", b"x" * 70_000 + b"\r\n\r\n"),
}


@pytest.mark.parametrize("kind", WITHOUT_END)
def test_what_is_no_body_has_an_end(small_server: Server, kind: str) -> None:
    """A head of 100 MB held a quarter of a second of everybody's time, and twice its memory."""
    url = httpx.URL(small_server.url)
    with socket.create_connection((url.host, url.port), timeout=20) as sock:
        with suppress(ConnectionError):  # it does not read to the end
            for part in WITHOUT_END[kind]:
                sock.sendall(part)
        head, _, body = sock.recv(65536).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert strict_json(body)["error"]["code"] == "head_too_large"
    right(small_server.post("/generate", GOLDEN))


def test_a_large_head_is_taken(small_server: Server) -> None:
    """Also behind another request on the same connection."""
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: " + b"c" * 60_000
    once = head + b"\r\n\r\n"
    replies = raw(small_server, once * 2 + head + b"\r\nConnection: close\r\n\r\n")
    assert replies.count(b"HTTP/1.1 200 OK") == 3


def test_leniency_that_clients_rely_on(small_server: Server) -> None:
    """Nulls, numbers as strings, huge top_k, unknown keys outside of sampling_params."""
    body = {
        "text": GOLDEN["text"],
        "input_ids": None,
        "image_data": [],
        "video_data": None,
        "audio_data": [None],
        "lora_path": None,
        "return_routed_experts": False,
        "return_hidden_states": False,
        "session_params": None,
        "log_metrics": True,
        "background": False,
        "made_up_by_a_newer_client": {"x": [1]},
        "bootstrap_room": None,
        "rid": None,
        "stream": None,
        "sampling_params": {
            "temperature": "0",
            "max_new_tokens": "6",
            "top_k": 100_000_000,
            "top_p": None,
            "stop": None,
            "stop_token_ids": [],
            "n": 1,
            "json_schema": None,
            "spaces_between_special_tokens": False,
            "min_p": "0.0",
            "sampling_seed": "5",
        },
    }
    assert small_server.generate(**body)["output_ids"] == GOLDEN_IDS
    params = body["sampling_params"] | {"top_k": 2**40}
    assert small_server.generate(**body | {"sampling_params": params})["output_ids"] == GOLDEN_IDS
    assert small_server.generate(**body | {"sampling_params": [params]})


def test_leniency_of_chats(small_server: Server) -> None:
    body = {
        "model": "tiny-moe",
        "messages": [
            {"role": "system", "content": None, "tool_calls": []},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None},
        ],
        "max_completion_tokens": 3,
        "max_tokens": 500,
        "user": "somebody",
        "metadata": {"x": "y"},
        "store": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "separate_reasoning": True,
        "log_metrics": True,
        "stop": None,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "min_tokens": 1,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "rid": "mine",
    }
    assert right(small_server.post("/v1/chat/completions", body))["usage"]["completion_tokens"] <= 3


@pytest.mark.parametrize("words", [" ", "\n\n", "\u200b"])
def test_b115_what_is_nearly_empty_is_answered(small_server: Server, words: str) -> None:
    """White space is a prompt, and so is a chat of one empty message: its template is not empty."""
    limit = {"sampling_params": {"max_new_tokens": 1}}
    assert small_server.generate(text=words, **limit)["meta_info"]["completion_tokens"] == 1
    for content in (words, ""):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        usage = right(small_server.post("/v1/chat/completions", body))["usage"]
        assert usage["completion_tokens"] == 1 and usage["prompt_tokens"] > 1


def test_of_equal_keys_the_last_counts(small_server: Server) -> None:
    body = b'{"text": "X", "text": "ROMEO\\n", "sampling_params": {"temperature": 1, '
    body += b'"temperature": 0, "max_new_tokens": 6}}'
    headers = {"Content-Type": "application/json"}
    reply = right(small_server.http.post("/generate", content=body, headers=headers))
    assert reply["output_ids"] == GOLDEN_IDS
