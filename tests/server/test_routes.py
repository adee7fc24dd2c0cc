"""Expert rows over HTTP: SGLang's form to the letter, and our own, whole and streamed.

The model has a dense layer, so that zeros stand where they must and nowhere else.
"""

import base64
import json

import httpx
import msgspec
import numpy as np
import pytest

from dovetail.replay.records import RouteHeader, RouteTrace, from_sglang
from tests.support.compare import assert_same_routes
from tests.support.oracle import Routing
from tests.support.server import Server, right, start_server

MODEL = {"num_hidden_layers": 4, "layer_ids": (1, 2, 3), "num_experts": 8, "num_experts_per_tok": 2}
PROMPT = [5, 17, 40, 8, 9, 33, 7, 100, 3, 21, 6]
PLAIN = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def moe_server(fx_moe_folder):
    flags = ("--enable-return-routed-experts", "--capture", "expert_weights", "--page-size", "4")
    with start_server(*flags, model=fx_moe_folder) as server:
        yield server


def ask(server: Server, *, max_new_tokens: int = 9, **fields):
    body = {"input_ids": PROMPT} | fields
    sampling = PLAIN | {"max_new_tokens": max_new_tokens} | body.pop("sampling_params", {})
    return server.generate(**body, sampling_params=sampling)


def check(trace: RouteTrace, ids: list[int], oracle, *, start: int = 0) -> None:
    """The rows are those of the oracle for these very tokens."""
    trace.validate(ids, layer_ids=(1, 2, 3), num_experts=8, num_experts_per_tok=2)
    assert (trace.start, trace.end) == (start, len(ids) - 1)
    want = oracle.router_ids(ids[:-1])
    assert_same_routes(trace.ids, Routing(*(part[start:] for part in want)))


def dialect(reply: dict, prompt: list[int] = PROMPT, start: int = 0) -> RouteTrace:
    return from_sglang(
        reply["meta_info"]["routed_experts"], prompt + reply["output_ids"], start=start, **MODEL
    )


def own(meta: dict, data: bytes) -> RouteTrace:
    header = msgspec.convert(meta["routes"], RouteHeader)
    return RouteTrace.from_header(header, data)


# -- SGLang's form ---------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 4, len(PROMPT) - 1, len(PROMPT)])
def test_the_dialect_to_the_letter(moe_server, fx_moe_oracle, start):
    reply = ask(moe_server, return_routed_experts=True, routed_experts_start_len=start)
    raw = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), dtype="<i4")
    rows = raw.reshape(len(PROMPT) + 9 - 1 - start, 4, 2)
    assert not rows[:, 0].any() and rows[:, 1:].any()
    check(dialect(reply, start=start), PROMPT + reply["output_ids"], fx_moe_oracle, start=start)
    assert "captured" not in reply["meta_info"] and "routes" not in reply["meta_info"]


def test_a_reply_has_rows_only_if_they_were_asked_for(moe_server):
    reply = ask(moe_server)
    assert not {"routed_experts", "captured", "routes"} & set(reply["meta_info"])


@pytest.mark.parametrize(("max_new_tokens", "rows", "own_rows"), [(0, 10, 11), (1, 11, 11)])
def test_prefill_alone(moe_server, max_new_tokens, rows, own_rows):
    """The dialect leaves out the last token's row even where it was an input; ours does not."""
    reply = ask(
        moe_server,
        max_new_tokens=max_new_tokens,
        return_routed_experts=True,
        capture=["experts"],
    )
    meta = reply["meta_info"]
    assert len(base64.b64decode(meta["routed_experts"])) == rows * 4 * 2 * 4
    assert meta["routes"]["shape"] == [own_rows, 3, 2]


def test_turns_join_to_the_whole(moe_server, fx_moe_oracle):
    """Each turn asks from the last token of the one before, as multi-turn clients do."""
    ids, parts, known = list(PROMPT), [], 0
    for turn in range(3):
        start = max(known - 1, 0)
        reply = ask(
            moe_server,
            input_ids=ids,
            return_routed_experts=True,
            routed_experts_start_len=start,
            max_new_tokens=4 + turn,
        )
        parts.append(dialect(reply, ids, start))
        known = len(ids) + len(reply["output_ids"])
        ids = ids + reply["output_ids"] + [50 + turn, 60]
    whole = ids[:known]
    check(RouteTrace.concat(parts, whole), whole, fx_moe_oracle)


def test_batches_and_samples_have_rows_each(moe_server, fx_moe_oracle):
    sampling = {"n": 2, "temperature": 1.0, "sampling_seed": 5}
    prompts = [PROMPT, PROMPT[:4]]
    replies = ask(
        moe_server, input_ids=prompts, return_routed_experts=True, sampling_params=sampling
    )
    assert len(replies) == 4
    for index, reply in enumerate(replies):
        prompt = prompts[index // 2]
        check(dialect(reply, prompt), prompt + reply["output_ids"], fx_moe_oracle)
    assert replies[0]["output_ids"] != replies[1]["output_ids"]


def test_a_stream_has_them_in_its_last_event_alone(moe_server, fx_moe_oracle):
    body = {
        "input_ids": PROMPT,
        "sampling_params": PLAIN | {"max_new_tokens": 9},
        "return_routed_experts": True,
    }
    events = moe_server.events("/generate", body)
    assert len(events) > 1
    assert not any("routed_experts" in event["meta_info"] for event in events[:-1])
    check(dialect(events[-1]), PROMPT + events[-1]["output_ids"], fx_moe_oracle)


def test_an_aborted_request_has_the_rows_of_its_tokens(moe_server, fx_moe_oracle):
    body = {
        "input_ids": PROMPT,
        "rid": "to-abort",
        "sampling_params": PLAIN | {"max_new_tokens": 900},  # far from done when the abort arrives
        "return_routed_experts": True,
        "stream": True,
    }
    last = None
    with moe_server.http.stream("POST", "/generate", json=body) as reply:
        for line in reply.iter_lines():
            if not line or line.endswith("[DONE]"):
                continue
            last = json.loads(line.removeprefix("data: "))
            if len(last["output_ids"]) == 5:
                moe_server.post("/abort_request", {"rid": "to-abort"})
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert 5 <= len(last["output_ids"]) < 900
    check(dialect(last), PROMPT + last["output_ids"], fx_moe_oracle)


# -- our own form ----------------------------------------------------------------------------


def test_columns_in_json_and_as_raw_bytes(moe_server, fx_moe_oracle):
    body = {
        "input_ids": PROMPT,
        "capture": ["experts", "expert_weights"],
        "sampling_params": PLAIN | {"max_new_tokens": 9},
    }
    as_json = moe_server.generate(**body)
    reply = moe_server.post("/generate", body, headers={"Accept": "application/msgpack"})
    assert reply.headers["content-type"] == "application/msgpack"
    raw = msgspec.msgpack.decode(reply.content)
    ids = PROMPT + as_json["output_ids"]
    assert raw["output_ids"] == as_json["output_ids"]
    column = as_json["meta_info"]["captured"]["experts"]
    assert (column["dtype"], column["start"], column["shape"]) == ("uint8", 0, [19, 3, 2])
    data = raw["meta_info"]["captured"]["experts"]["data"]
    assert isinstance(data, bytes) and base64.b64decode(column["data"]) == data
    for meta in (as_json["meta_info"], raw["meta_info"]):
        check(own(meta, data), ids, fx_moe_oracle)
        assert "routed_experts" not in meta
    weights = raw["meta_info"]["captured"]["expert_weights"]
    values = np.frombuffer(weights["data"], dtype=weights["dtype"]).reshape(weights["shape"])
    np.testing.assert_allclose(values.sum(axis=-1), 1, atol=1e-6)
    assert len(reply.content) < 0.8 * len(json.dumps(as_json))


@pytest.mark.parametrize("interval", [0, 3])
def test_a_stream_brings_each_row_once(moe_server, fx_moe_oracle, interval):
    body = {
        "input_ids": PROMPT,
        "capture": ["experts"],
        "capture_interval": interval,
        "routed_experts_start_len": 2,
        "sampling_params": PLAIN | {"max_new_tokens": 30},
    }
    events = moe_server.events("/generate", body)
    parts = [e["meta_info"]["captured"]["experts"] for e in events if "captured" in e["meta_info"]]
    assert len(parts) == 1 if interval == 0 else len(parts) > 3
    position = 2
    for part in parts:
        assert part["start"] == position
        position += part["shape"][0]
    data = b"".join(base64.b64decode(part["data"]) for part in parts)
    assert not any("routes" in event["meta_info"] for event in events[:-1])
    ids = PROMPT + events[-1]["output_ids"]
    check(own(events[-1]["meta_info"], data), ids, fx_moe_oracle, start=2)


# -- OpenAI's routes -------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_replies_have_the_dialect_in_both_places(moe_server, path, stream):
    chat = path.endswith("chat/completions")
    body = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": PROMPT}
    body |= {"max_tokens": 6, "n": 2, "seed": 4, "ignore_eos": True}
    plain = right(moe_server.post(path, body))
    assert "sglext" not in plain and "meta_info" not in plain["choices"][0]
    body["return_routed_experts"] = True
    if stream:
        events = moe_server.events(path, body)
        choices = {
            choice["index"]: choice["meta_info"]["routed_experts"]
            for event in events
            for choice in event["choices"]
            if "meta_info" in choice
        }
        [first] = [e["sglext"]["routed_experts"] for e in events if "sglext" in e]
    else:
        reply = right(moe_server.post(path, body))
        choices = {c["index"]: c["meta_info"]["routed_experts"] for c in reply["choices"]}
        first = reply["sglext"]["routed_experts"]
    assert set(choices) == {0, 1} and first == choices[0] != choices[1]
    num_rows = plain["usage"]["prompt_tokens"] + 6 - 1
    assert {len(base64.b64decode(rows)) for rows in choices.values()} == {num_rows * 4 * 2 * 4}


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"routed_experts_start_len": 12}, "routed_experts_start_len", "0 to the length"),
        ({"routed_experts_start_len": -1}, "routed_experts_start_len", "is -1"),
        ({"return_routed_experts": "maybe"}, "return_routed_experts", "bool"),
        ({"capture": 5}, "capture", "array"),
        ({"capture": "hidden"}, "capture", "the columns are tokens, experts, expert_weights"),
        ({"capture": ["hidden"]}, "capture", "the columns are tokens, experts, expert_weights"),
        ({"logprob_kind": "best"}, "logprob_kind", "is 'best'; legal are scaled, raw, truncated"),
    ],
)
def test_what_is_wrong_is_named(moe_server, fields, param, message):
    body = {"input_ids": PROMPT, "return_routed_experts": True} | fields
    reply = moe_server.post("/generate", body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param and message in error["message"], error
    assert isinstance(reply, httpx.Response)


def test_the_server_says_that_it_captures(moe_server, server):
    for made, captures in ((moe_server, True), (server, False)):
        info = made.http.get("/server_info").json()
        assert info["enable_return_routed_experts"] is captures
    for path in ("/v1/completions", "/v1/chat/completions"):
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        body = {"prompt": "A"} if path.endswith("v1/completions") else chat
        reply = server.post(path, body | {"return_routed_experts": True})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "return_routed_experts"


def test_a_stream_of_rows_has_its_prompts_logprobs_too() -> None:
    """A prompt of many chunks: rows of it leave before the first token, its logprobs with that."""
    prompt = [(7 * i) % 200 + 5 for i in range(48)]
    asked = {"return_logprob": True, "logprob_start_len": 0, "capture": ["tokens"]}
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, **asked}
    with start_server("--chunk-size", "8") as server:
        events = server.events("/generate", body | {"capture_interval": 4})
        whole = server.generate(**body)
    metas = [event["meta_info"] for event in events]
    first = next(i for i, event in enumerate(events) if event["output_ids"])
    assert first > 1 and any("captured" in meta for meta in metas[:first])
    assert all("input_token_logprobs" not in meta for meta in metas[:first])
    wanted, found = (meta["input_token_logprobs"] for meta in (whole["meta_info"], metas[-1]))
    assert [row[1] for row in found] == [row[1] for row in wanted] == prompt
    values = [[row[0] for row in rows[1:]] for rows in (found, wanted)]
    np.testing.assert_allclose(*values, atol=1e-4)
    assert all(meta["input_token_logprobs"] == found for meta in metas[first:])
