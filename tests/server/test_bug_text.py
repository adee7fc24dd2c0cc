"""Text, stops and counts over HTTP: classes 9 and 11 of the bugs of other engines.

The rules are tested on the engine; here, that streams and dialects keep them.
"""

import itertools
from typing import Any

import pytest

from dovetail import Engine, SamplingParams
from tests.support.server import Server, right

GREEDY = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
PROMPT = "ROMEO\n"


def streamed_text(server: Server, path: str, body: dict[str, Any]) -> str:
    events = server.events(path, body)
    if path == "/v1/completions":
        return "".join(event["choices"][0]["text"] for event in events)
    texts = [event["text"] for event in events]
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before), "text that was sent is taken back"
    return texts[-1]


def test_b101_b103_no_part_of_a_stop_is_streamed(server: Server, engine: Engine) -> None:
    """Short and long stops, at tokens' borders and inside, beside near misses."""
    [plain] = engine.generate(PROMPT, SamplingParams(**GREEDY))
    for start in range(1, 40, 5):
        for length in (1, 5):
            stop = [plain.text[start : start + length], plain.text[start : start + 2] + "\x00"]
            [want] = engine.generate(PROMPT, SamplingParams(**GREEDY, stop=stop))  # type: ignore[arg-type]
            params = GREEDY | {"stop": stop}
            body = {"text": PROMPT, "sampling_params": params}
            assert streamed_text(server, "/generate", body) == want.text
            asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
            got = streamed_text(server, "/v1/completions", asked | {"stop": stop})
            assert got == want.text


@pytest.mark.parametrize("no_stop_trim", [False, True])
def test_b109_the_ids_keep_what_the_text_may_lose(server: Server, no_stop_trim: bool) -> None:
    plain = server.generate(text=PROMPT, sampling_params=GREEDY)
    stop_id = plain["output_ids"][3]
    first = plain["output_ids"].index(stop_id)
    params = GREEDY | {"stop_token_ids": [stop_id], "no_stop_trim": no_stop_trim}
    reply = server.generate(text=PROMPT, sampling_params=params, return_logprob=True)
    assert reply["output_ids"] == plain["output_ids"][: first + 1]
    assert len(reply["meta_info"]["output_token_logprobs"]) == first + 1
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_id}
    longer = server.generate(text=PROMPT, sampling_params=GREEDY | {"max_new_tokens": first + 1})
    assert (reply["text"] == longer["text"]) == no_stop_trim
    assert longer["text"].startswith(reply["text"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_b107_no_new_token(server: Server, n: int, stream: bool) -> None:
    body = {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": 0, "n": n},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if stream:
        replies = [e for e in server.events("/generate", body) if e["meta_info"]["finish_reason"]]
    else:
        replies = server.generate(**body)
        replies = replies if n > 1 else [replies]
    assert len(replies) == n
    for reply in replies:
        meta = reply["meta_info"]
        assert reply["output_ids"] == [] and reply["text"] == ""
        assert meta["finish_reason"] == {"type": "length", "length": 0}
        assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_b121_b123_characters_that_tokens_split(server: Server, engine: Engine, path: str) -> None:
    """Half characters and lone bytes: the joined stream is the whole text, in every form."""
    pieces = engine.tokenizer.encode("é 日本 👩‍🚀 ค")
    lone = next(i for i in pieces if engine.tokenizer.decode([i]).startswith("\ufffd"))
    for token_id in (lone, pieces[-1]):
        bias = {str(token_id): 100}
        if path == "/generate":
            params = GREEDY | {"logit_bias": bias}
            body: dict[str, Any] = {"text": "A", "sampling_params": params}
            whole = server.generate(**body)["text"]
            assert streamed_text(server, path, body) == whole
        else:
            body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "logit_bias": bias}
            if path == "/v1/completions":
                body["prompt"] = "A"
                whole = right(server.post(path, body))["choices"][0]["text"]
                assert streamed_text(server, path, body) == whole
            else:
                body["messages"] = [{"role": "user", "content": "A"}]
                whole = right(server.post(path, body))["choices"][0]["message"]["content"]
                events = server.events(path, body)
                got = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
                assert got == whole
        assert whole == engine.tokenizer.decode([token_id] * 20)


def test_b127_one_prompt_whichever_way_it_comes(server: Server, engine: Engine) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "What?"}]
    ask = {"sampling_params": {"max_new_tokens": 1}, "return_prompt_token_ids": True}
    ids = server.generate(messages=messages, **ask)["prompt_token_ids"]
    [generation] = engine.generate(messages, SamplingParams(max_new_tokens=1))
    assert ids == list(generation.prompt_token_ids)
    text = engine.tokenizer.decode(ids, skip_special_tokens=False)
    assert server.generate(text=text, **ask)["prompt_token_ids"] == ids
    [event] = server.events("/generate", {"input_ids": ids, **ask})
    assert event["prompt_token_ids"] == ids
    chat = {"messages": messages, "max_tokens": 1}
    assert right(server.post("/v1/chat/completions", chat))["usage"]["prompt_tokens"] == len(ids)


def test_b55_what_cannot_be_drawn_is_legal_json(server: Server) -> None:
    """Truncation makes logprobs of minus infinity: null, or OpenAI's lowest number."""
    params = {"top_k": 1, "max_new_tokens": 3, "ignore_eos": True}
    meta = server.generate(
        text=PROMPT, sampling_params=params, return_logprob=True, top_logprobs_num=3,
        logprob_kind="truncated", token_ids_logprob=[5],
    )["meta_info"]  # fmt: skip
    assert [row[0][0] for row in meta["output_token_ids_logprobs"]].count(None) >= 2
    body = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 5, "logit_bias": {"5": -10000}}
    right(server.post("/v1/completions", body))
