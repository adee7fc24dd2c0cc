"""The official ``openai`` package against the server, as people use it."""

from collections.abc import Iterator

import openai
import pytest

from dovetail import Engine
from tests.support.server import Server

MODEL = "tiny-moe"
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2
    )
    [choice] = reply.choices
    assert choice.message.content == "42" and choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert reply.usage is not None and reply.usage.completion_tokens == 3
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content][:2] == ["4", "2"]
    assert choice.model_extra is not None and "matched_stop" in choice.model_extra


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "42"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens > 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_the_stream_helper_of_the_package(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == "42"


def test_several_samples_with_one_seed(client: openai.OpenAI) -> None:
    def texts() -> list[str | None]:
        reply = client.chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, seed=5, temperature=2, max_completion_tokens=12
        )
        return [choice.message.content for choice in reply.choices]

    first = texts()
    assert len(set(first)) > 1 and first == texts()


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["ROMEO\n", "KING"], max_tokens=6, temperature=0, logprobs=1, echo=True
    )
    first, second = reply.choices
    assert first.text.startswith("ROMEO\n") and second.text.startswith("KING")
    assert first.logprobs is not None and first.logprobs.token_logprobs is not None
    assert first.logprobs.token_logprobs[0] is None
    parts = client.completions.create(
        model=MODEL, prompt="ROMEO\n", max_tokens=6, temperature=0, stream=True
    )
    assert "ROMEO\n" + "".join(part.choices[0].text for part in parts) == first.text


def test_stops_penalties_and_biases(client: openai.OpenAI, engine: Engine) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        stop=["2"],
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"5": -100},
    )
    assert reply.choices[0].message.content == "4"
    assert reply.choices[0].finish_reason == "stop"
    forced = client.completions.create(
        model=MODEL, prompt="A", max_tokens=4, logit_bias={"100": 100}, extra_body={"top_k": 1}
    )
    assert forced.usage is not None and forced.usage.completion_tokens == 4
    assert forced.choices[0].text == 4 * engine.tokenizer.decode([100])


def test_extras_in_the_body(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True, "min_p": 0.01, "skip_special_tokens": False, "rid": "mine"}
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=5, temperature=0, extra_body=extra
    )
    assert reply.usage is not None and reply.usage.completion_tokens == 5
    assert "<|im_end|>" in (reply.choices[0].message.content or "")


def test_errors_have_their_types(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="context length") as long:
        client.completions.create(model=MODEL, prompt="A", max_tokens=10_000)
    assert long.value.code == "context_length_exceeded" and long.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
