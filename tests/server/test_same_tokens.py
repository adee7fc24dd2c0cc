"""Over HTTP the same tokens, numbers and texts as from ``Engine.generate``, in every form."""

import threading
from collections.abc import Iterable
from typing import Any

import pytest

from dovetail import Engine, Generation, LogprobParams, SamplingParams
from tests.support.compare import assert_logprobs
from tests.support.server import Server, right

PROMPTS = ["KING HENRY\n", "ROMEO\nWhat is", "class Queue:\n"]
PARAMS = {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.95, "sampling_seed": 11}
ASKED = {
    "return_logprob": True,
    "top_logprobs_num": 3,
    "token_ids_logprob": [10, 20],
    "logprob_start_len": 0,
}
MESSAGES = [{"role": "user", "content": "What is 12 + 30?"}]
OPENAI = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 11}


def wanted(engine: Engine, prompt: Any, **more: Any) -> list[Generation]:
    asked = LogprobParams(top_logprobs_num=3, token_ids_logprob=(10, 20), logprob_start_len=0)
    return engine.generate(prompt, SamplingParams(**(PARAMS | more)), logprobs=asked)


def check_rows(got: list[Any], want: Iterable[Iterable[tuple[int, float]]]) -> None:
    """Rows of triples against rows of (id, logprob)."""
    for row, pairs in zip(got, want, strict=True):
        ids, logprobs = zip(*pairs, strict=True)
        assert [triple[1] for triple in row] == list(ids)
        assert_logprobs([triple[0] for triple in row], logprobs)


def assert_same(got: Any, want: Any) -> None:
    """Equal JSON, where floats of two runs of one request may differ by rounding."""
    if isinstance(want, dict):
        assert set(got) == set(want)
        for name, value in want.items():
            assert_same(got[name], value)
    elif isinstance(want, list):
        for one, value in zip(got, want, strict=True):
            assert_same(one, value)
    elif isinstance(want, float):
        assert got == pytest.approx(want, abs=1e-4)
    else:
        assert got == want


def check(reply: dict[str, Any], want: Generation) -> None:
    """Every number of a native reply."""
    meta = reply["meta_info"]
    assert reply["text"] == want.text
    assert reply["output_ids"] == list(want.token_ids)
    assert meta["finish_reason"]["type"] == want.finish_reason.type
    assert meta["completion_tokens"] == len(want.token_ids) == want.usage.completion_tokens
    assert meta["prompt_tokens"] == len(want.prompt_token_ids)
    assert 0 <= meta["cached_tokens"] < meta["prompt_tokens"]
    assert meta["sampling_seed"] == want.seed
    assert meta["weight_version"] == "0"
    assert meta["e2e_latency"] > 0
    chosen = zip(want.token_ids, want.logprobs, strict=True)
    check_rows([meta["output_token_logprobs"]], [chosen])
    check_rows(meta["output_top_logprobs"], want.top_logprobs)
    by_id = [zip((10, 20), row, strict=True) for row in want.id_logprobs]
    check_rows(meta["output_token_ids_logprobs"], by_id)
    assert meta["input_token_logprobs"][0] == [None, want.prompt_token_ids[0], None]
    scored = list(zip(want.prompt_token_ids, want.prompt_logprobs, strict=True))[1:]
    if scored:
        check_rows([meta["input_token_logprobs"][1:]], [scored])  # type: ignore[list-item]
    assert meta["input_top_logprobs"][0] is None
    check_rows(meta["input_top_logprobs"][1:], want.prompt_top_logprobs)


def test_native_whole(server: Server, engine: Engine) -> None:
    for prompt in PROMPTS:
        [want] = wanted(engine, prompt)
        check(server.generate(text=prompt, sampling_params=PARAMS, **ASKED), want)
        ids = list(want.prompt_token_ids)
        check(server.generate(input_ids=ids, sampling_params=PARAMS, **ASKED), want)


def test_native_put_and_messages(server: Server, engine: Engine) -> None:
    [want] = wanted(engine, MESSAGES)
    body = {"messages": MESSAGES, "sampling_params": PARAMS, **ASKED}
    check(right(server.http.put("/generate", json=body)), want)


def test_native_batch_is_a_list_in_order(server: Server, engine: Engine) -> None:
    want = wanted(engine, PROMPTS)
    replies = server.generate(text=PROMPTS, sampling_params=PARAMS, rid="batch", **ASKED)
    assert [reply["meta_info"]["id"] for reply in replies] == ["batch_0", "batch_1", "batch_2"]
    for reply, one in zip(replies, want, strict=True):
        check(reply, one)
    ids = [list(one.prompt_token_ids) for one in want]
    for reply, one in zip(
        server.generate(input_ids=ids, sampling_params=PARAMS, **ASKED), want, strict=True
    ):
        check(reply, one)
    assert len(server.generate(text=PROMPTS[:1], sampling_params=PARAMS)) == 1


def test_native_batch_with_an_entry_an_item(server: Server, engine: Engine) -> None:
    params = [PARAMS, PARAMS | {"temperature": 0, "max_new_tokens": 5}, {"max_new_tokens": 0}]
    replies = server.generate(
        text=PROMPTS,
        sampling_params=params,
        rid=["a", "b", None],
        return_logprob=[True, False, True],
        top_logprobs_num=[1, 0, None],
        logprob_start_len=[-1, -1, 0],
    )
    *given_ids, made = (reply["meta_info"]["id"] for reply in replies)
    assert given_ids == ["a", "b"] and made
    for reply, prompt, given in zip(replies[:2], PROMPTS, params, strict=False):
        [want] = engine.generate(prompt, SamplingParams(**given))
        assert reply["output_ids"] == list(want.token_ids)
    first, second, third = (reply["meta_info"] for reply in replies)
    assert len(first["output_top_logprobs"][0]) == 1
    assert "output_token_logprobs" not in second
    assert third["output_token_logprobs"] == [] and third["completion_tokens"] == 0
    assert len(third["input_token_logprobs"]) == third["prompt_tokens"]


def test_native_samples_are_a_list(server: Server, engine: Engine) -> None:
    want = wanted(engine, PROMPTS[:2], n=3)
    replies = server.generate(text=PROMPTS[:2], sampling_params=PARAMS | {"n": 3}, **ASKED)
    assert len({reply["text"] for reply in replies}) > 1
    for reply, one in zip(replies, want, strict=True):
        check(reply, one)
    assert len(server.generate(text="A", sampling_params={"n": 2, "max_new_tokens": 1})) == 2


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompts", [PROMPTS[0], PROMPTS])
def test_native_stream_is_cumulative_and_ends_as_the_whole(
    server: Server, engine: Engine, prompts: Any, n: int
) -> None:
    """[SAME], B53: each event has all so far, every column cut at one length."""
    body = {"text": prompts, "sampling_params": PARAMS | {"n": n}, **ASKED}
    want = wanted(engine, prompts, n=n)
    last: dict[int, dict[str, Any]] = {}
    for event in server.events("/generate", body):
        assert ("index" in event) == (len(want) > 1)
        meta, before = event["meta_info"], last.get(event.get("index", 0))
        num = len(event["output_ids"])
        assert num == meta["completion_tokens"] == len(meta["output_token_logprobs"])
        assert num == len(meta["output_top_logprobs"]) == len(meta["output_token_ids_logprobs"])
        if before is not None:
            assert before["meta_info"]["finish_reason"] is None
            assert event["text"].startswith(before["text"])
            assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last[event.get("index", 0)] = event
    assert sorted(last) == list(range(len(want)))
    for index, one in enumerate(want):
        check(last[index], one)


def test_chat(server: Server, engine: Engine) -> None:
    [want] = wanted(engine, MESSAGES)
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, **OPENAI}
    reply = right(server.post("/v1/chat/completions", body))
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": want.text}
    assert choice["finish_reason"] == want.finish_reason.type
    assert choice["matched_stop"] == want.finish_reason.matched
    entries = choice["logprobs"]["content"]
    assert_logprobs([entry["logprob"] for entry in entries], want.logprobs)
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data == b"".join(map(engine.tokenizer.token_bytes, want.token_ids))
    assert [len(entry["top_logprobs"]) for entry in entries] == [3] * len(entries)
    usage = reply["usage"]
    assert usage["prompt_tokens"] == len(want.prompt_token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(want.token_ids)


@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_joins_to_the_whole(server: Server, n: int) -> None:
    """[SAME], B129: text, logprobs, finish and usage; the prompt counts once."""
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": n, **OPENAI}
    whole = right(server.post("/v1/chat/completions", body))
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": None}}
    *events, last = server.events("/v1/chat/completions", body | options)
    assert last["choices"] == [] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(event["usage"] is None for event in events)
    assert {event["id"] for event in events} == {last["id"]}
    for want in whole["choices"]:
        parts = [c for event in events for c in event["choices"] if c["index"] == want["index"]]
        assert parts[0]["delta"]["role"] == "assistant"
        assert not any("role" in part["delta"] for part in parts[1:])
        text = "".join(part["delta"].get("content") or "" for part in parts)
        assert text == want["message"]["content"]
        entries = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert_same(entries, want["logprobs"]["content"])
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == want["finish_reason"]
    again = server.events(
        "/v1/chat/completions", body | {"stream_options": {"continuous_usage_stats": True}}
    )
    counts = [event["usage"]["completion_tokens"] for event in again]
    assert counts == sorted(counts) and counts[-1] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("echo", [False, True])
def test_completions(server: Server, engine: Engine, echo: bool) -> None:
    wants = wanted(engine, PROMPTS, n=2)
    body = {"prompt": PROMPTS, "n": 2, "logprobs": 2, "echo": echo, **OPENAI}
    reply = right(server.post("/v1/completions", body))
    events = server.events("/v1/completions", body)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    for choice, want, prompt in zip(reply["choices"], wants, [p for p in PROMPTS for _ in "ab"],
                                    strict=True):  # fmt: skip
        assert choice["text"] == (prompt if echo else "") + want.text
        logprobs = choice["logprobs"]
        scored = (want.prompt_logprobs if echo else ()) + want.logprobs
        ids = (want.prompt_token_ids if echo else ()) + want.token_ids
        assert (logprobs["token_logprobs"][0] is None) == echo
        start = 1 if echo else 0
        assert_logprobs(logprobs["token_logprobs"][start:], scored[start:])  # type: ignore[arg-type]
        assert logprobs["tokens"] == [engine.tokenizer.decode([i]) for i in ids]
        assert len(logprobs["text_offset"]) == len(logprobs["top_logprobs"]) == len(ids)
        assert all(2 <= len(row) <= 3 for row in logprobs["top_logprobs"][start:])
        parts = [c for event in events for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, column in logprobs.items():
            joined = [x for part in parts for x in part["logprobs"][name]]
            assert_same(joined, column)
    num_generated = sum(len(want.token_ids) for want in wants)
    assert reply["usage"]["completion_tokens"] == num_generated
    num_prompt = sum(len(want.prompt_token_ids) for want in wants) // 2
    assert reply["usage"]["prompt_tokens"] == num_prompt


def test_completions_of_ids(server: Server, engine: Engine) -> None:
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    want = [one.text for one in wanted(engine, ids)]
    many = right(server.post("/v1/completions", {"prompt": ids, **OPENAI}))
    assert [choice["text"] for choice in many["choices"]] == want
    one = right(server.post("/v1/completions", {"prompt": ids[0], **OPENAI}))
    assert [choice["text"] for choice in one["choices"]] == want[:1]


def test_without_max_tokens_a_completion_ends_with_the_context(server: Server) -> None:
    context_len = right(server.http.get("/v1/models"))["data"][0]["max_model_len"]
    for room in (20, 16, 3, 1):
        body = {"prompt": [7] * (context_len - room), "logit_bias": {"2": -100, "1": -100}}
        usage = right(server.post("/v1/completions", body))["usage"]
        assert usage["completion_tokens"] == min(room, 16)
    full = server.post("/v1/completions", {"prompt": [7] * context_len})
    assert full.status_code == 400 and "context length" in full.text


def test_scoring_with_echo_and_no_token(server: Server) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 0}
    [choice] = right(server.post("/v1/completions", body))["choices"]
    assert choice["text"] == PROMPTS[0] and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) > 1


def test_many_clients_at_once_get_their_own_answers(server: Server, engine: Engine) -> None:
    seeds = range(24)
    want = [engine.generate(PROMPTS[0], SamplingParams(**(PARAMS | {"sampling_seed": seed})))[0]
            for seed in seeds]  # fmt: skip
    got: dict[int, Any] = {}

    def ask(seed: int) -> None:
        body = {"text": PROMPTS[0], "sampling_params": PARAMS | {"sampling_seed": seed}}
        got[seed] = server.events("/generate", body)[-1] if seed % 2 else server.generate(**body)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for seed in seeds:
        assert got[seed]["output_ids"] == list(want[seed].token_ids)
