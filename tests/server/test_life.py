"""A server's life: flags, keys, a full queue, probes, and how it ends."""

import json
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dovetail.cli import main
from tests.support.processes import is_running
from tests.support.server import Server, read_events, right, start_server
from tests.support.waiting import until

LONG = {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True}
END_S = 6.5  # the promise is 5 s; the rest is Python's own end on a busy machine


# -- start ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--port", "70000"), "port: is 70000; the legal range is 0 to 65535"),
        (("--host", "no.such.host.invalid"), "host: 'no.such.host.invalid' is no address"),
        (("--api-key", ""), "api_key: is empty"),
        (("--api-key", " s3cret"), "api_key: no client could send it"),
        (("--api-key", "geh\u00e4im"), "api_key: no client could send it"),
        (("--api-key", "\udcff"), "api_key: no client could send it"),
        (("--port", "0", "--model", "no-such-folder"), "model:"),
        (("--port", "0", "--context-len", "1"), "context_len: is 1"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.out == "" and len(said.err.splitlines()) == 1


def test_a_taken_port_is_noticed_before_the_model_is_loaded(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(httpx.URL(server.url).port)
    assert main(["serve", "--port", port, "--model", "no-such-folder"]) == 2
    said = capsys.readouterr().err
    assert f"port: {port} on 127.0.0.1 cannot be used" in said and "--port" in said


def test_every_network_without_a_key_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ([], ["--api-key", "s3cret"]):
        words = ["serve", "--host", "0.0.0.0", "--port", "0", "--model", "no-such-folder", *flags]
        assert main(words) == 2
        assert ("lets in everybody" in capsys.readouterr().err) == (not flags)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    for words in ("curl", "/generate", "/v1/chat/completions", "--api-key", "--max-queued"):
        assert words in said


# -- one server with a key and a short queue --------------------------------------------------


@pytest.fixture(scope="module")
def locked():
    flags = ("--api-key", "s3cret", "--served-model-name", "my/model", "--num-pages", "256")
    with start_server(*flags, "--max-running", "2", "--max-queued", "2") as made:
        made.http.headers["Authorization"] = "Bearer s3cret"
        yield made


@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3cret2"]
)
def test_a_wrong_key(locked: Server, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    routes = ("/generate", "/v1/models", "/metrics", "/nothing", "/v1/chat/completions")
    for path in routes:
        reply = httpx.post(locked.url + path, headers=headers, json={"text": "A"})
        assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert "s3cret" not in reply.text
    assert httpx.get(locked.url + "/health", headers=headers).status_code == 200


def test_a_right_key_in_any_case_of_the_scheme(locked: Server) -> None:
    for given in ("Bearer s3cret", "bearer s3cret", "BEARER  s3cret"):
        reply = httpx.get(locked.url + "/v1/models", headers={"Authorization": given})
        assert right(reply)["data"][0]["id"] == "my/model"


def test_the_served_name(locked: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert right(locked.post("/v1/chat/completions", chat | {"model": "my/model"}))
    assert locked.post("/v1/chat/completions", chat | {"model": "tiny-moe"}).status_code == 404


def test_a_full_queue_says_when_to_come_again(locked: Server) -> None:
    """What is in the queue goes on; a batch that does not fit starts no part of itself."""
    body = {"text": "A", "sampling_params": LONG, "rid": "long"}
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(locked.generate, **body) for _ in range(3)]
        until(lambda: locked.metric("dovetail_waiting_sequences") == 1, seconds=20)
        for stream in (False, True):
            for fields in ({"text": ["A", "B"]}, {"text": "A", "sampling_params": {"n": 2}}):
                reply = locked.post("/generate", {**fields, "stream": stream})
                assert reply.status_code == 429
                assert int(reply.headers["retry-after"]) >= 1
                assert reply.json()["error"]["type"] == "rate_limit_error"
        chat = {"messages": [{"role": "user", "content": "Hi"}], "n": 2}
        num_prompt_tokens = locked.metric("dovetail_prompt_tokens_total")
        assert locked.post("/v1/chat/completions", chat).status_code == 429
        assert locked.metric("dovetail_prompt_tokens_total") == num_prompt_tokens
        until(lambda: locked.metric("dovetail_waiting_sequences") == 1, seconds=20)
        assert not any(future.done() for future in futures)
        assert locked.http.get("/health").status_code == 200
        locked.post("/abort_request", {"abort_all": True})
        for future in futures:
            assert future.result(20)["meta_info"]["finish_reason"]["type"] == "abort"
    too_many = locked.post("/generate", {"text": ["A"] * 5})
    assert too_many.status_code == 400 and "at most 4 at once" in too_many.text


# -- what it says of itself --------------------------------------------------------------------


def test_information(server: Server) -> None:
    info = right(server.http.get("/server_info"))
    assert info == right(server.http.get("/get_server_info")) | {
        "internal_states": info["internal_states"]
    }
    for name in ("tp_size", "pp_size", "ep_size", "dp_size"):
        assert info[name] == 1
    assert info["max_total_num_tokens"] == 1024 * 16 and info["context_length"] == 2048
    assert info["engine_config"]["reasons"]["num_pages"] == "given"
    assert "api_key" not in json.dumps(info)
    model = right(server.http.get("/model_info"))
    assert model == right(server.http.get("/get_model_info"))
    assert Path(model["model_path"]).is_dir() and model["is_generation"] is True
    [entry] = right(server.http.get("/v1/models"))["data"]
    assert entry["id"] == "tiny-moe" and entry["max_model_len"] == 2048


def test_probes_may_send_a_body(server: Server) -> None:
    assert server.http.request("GET", "/health", json={}).status_code == 200


def test_metrics_count(server: Server) -> None:
    names = (
        "dovetail_prompt_tokens_total",
        "dovetail_generated_tokens_total",
        'dovetail_generations_total{reason="length"}',
        "dovetail_time_to_first_token_seconds_count",
    )

    def counts() -> list[float]:
        return [server.metric(name) for name in names]

    before = counts()
    server.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 4, "n": 2,
                                                          "ignore_eos": True})  # fmt: skip
    after = counts()
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 8, 2, 1]
    page = server.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    server.http.get("/made-up-by-a-scanner")
    assert "scanner" not in server.http.get("/metrics").text


# -- the end -----------------------------------------------------------------------------------


def ask(server: Server, index: int) -> str:
    """Ask for a long answer in one of the forms; say how it ended."""
    forms: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "A", "sampling_params": LONG, "return_logprob": True}),
        ("/v1/completions", {"prompt": "A", "max_tokens": 2000, "ignore_eos": True}),
    ]
    path, body = forms[index % 2]
    with httpx.Client(base_url=server.url, timeout=60) as http:
        if index % 4 < 2:
            reply = http.post(path, json=body)
            if reply.status_code == 503:
                return "refused"
            last = right(reply)
        else:
            with http.stream("POST", path, json=body | {"stream": True}) as reply:
                if reply.status_code == 503:
                    return "refused"
                assert reply.status_code == 200
                *_, last = read_events(reply)  # each stream has its last event and [DONE]
    if "choices" in last:
        return last["choices"][0]["finish_reason"]
    return last["meta_info"]["finish_reason"]["type"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_with_a_full_queue(number: int, code: int) -> None:
    """Every open request is answered, within seconds; no process stays."""
    with start_server("--max-running", "2", "--num-pages", "512") as server:
        children = server.children()
        with ThreadPoolExecutor(16) as pool:
            futures: list[Future[str]] = [pool.submit(ask, server, index) for index in range(16)]
            until(lambda: server.metric("dovetail_waiting_sequences") == 14, seconds=20)
            started = time.monotonic()
            assert server.end(number) == code
            assert time.monotonic() - started < END_S
            assert [future.result(5) for future in futures] == ["abort"] * 16
        assert not any(map(is_running, children))
        assert server.log.read_text() == ""


def test_a_client_that_does_not_read_cannot_keep_it(server: Server) -> None:
    with start_server("--num-pages", "512") as mine:
        body = {"text": ["A"] * 20, "sampling_params": LONG | {"max_new_tokens": 400},
                "return_logprob": True, "stream": True}  # fmt: skip
        with mine.http.stream("POST", "/generate", json=body) as reply:
            assert reply.status_code == 200  # and not a byte is taken
            time.sleep(2)
            started = time.monotonic()
            assert mine.end() == 0
            assert time.monotonic() - started < END_S


def test_a_client_that_stops_in_its_body_cannot_keep_it() -> None:
    """And it is no failure of the server's: its log has nothing to say."""
    with start_server("--num-pages", "512") as server:
        url = httpx.URL(server.url)
        with socket.create_connection((url.host, url.port or 0)) as sock:
            sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(0.5)
            started = time.monotonic()
            assert server.end() == 0
            assert time.monotonic() - started < END_S
        assert server.log.read_text() == ""


def test_a_second_interrupt_ends_it_at_once() -> None:
    with start_server("--num-pages", "512") as server:
        children = server.children()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(ask, server, 0)
            until(lambda: server.metric("dovetail_running_sequences") == 1, seconds=20)
            server.process.send_signal(signal.SIGSTOP)  # so that both arrive together
            server.process.send_signal(signal.SIGINT)
            server.process.send_signal(signal.SIGTERM)
            server.process.send_signal(signal.SIGCONT)
            started = time.monotonic()
            assert server.process.wait(5) == 130
            assert time.monotonic() - started < 2
        until(lambda: not any(map(is_running, children)), seconds=5)
