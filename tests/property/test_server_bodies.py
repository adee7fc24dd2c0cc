"""Whatever JSON a client sends becomes a call or a ``RequestError``; nothing else escapes."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.prompts import RequestMaker
from dovetail.errors import RequestError
from dovetail.server.body import parse_object
from dovetail.server.native import AbortBody
from dovetail.server.native_body import (
    IGNORED_SAMPLING,
    UNSUPPORTED,
    UNSUPPORTED_SAMPLING,
    GenerateFields,
    read_call,
)
from dovetail.server.openai.body import (
    CallFields,
    ChatFields,
    CompletionFields,
    SamplingFields,
    StreamOptions,
    read_chat,
    read_completion,
)
from dovetail.server.openai.completions import _prompts
from dovetail.text.chat import ChatTemplate
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import SamplingParams
from dovetail.wire.typed import typed
from dovetail.wire.validate import Limits
from tests.support.fixtures import TINY_MOE

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["1", "0.5", "nan", "true", "null", 10**400, 2**63, -0.0, "\ud800", 1e308])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                 max_size=3),
    max_leaves=8,
)  # fmt: skip


def fields(*names: str, **known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects of a few fields, some of them with values near the right ones."""
    keys = st.sampled_from([*names, "unknown"])
    wild = st.dictionaries(keys, values, max_size=3)
    return st.builds(dict.__or__, st.fixed_dictionaries({}, optional=known), wild)


sampling = fields(
    *SamplingParams.__struct_fields__, *UNSUPPORTED_SAMPLING, *IGNORED_SAMPLING,
    n=st.integers(0, 3), max_new_tokens=st.integers(0, 9), temperature=st.floats(0, 2),
)  # fmt: skip
natives = fields(
    *GenerateFields.__struct_fields__, *UNSUPPORTED,
    text=st.sampled_from(["A", ["A", "B"], ""]),
    input_ids=st.lists(st.integers(-1, 9) | values, max_size=3),
    sampling_params=sampling | st.lists(sampling, max_size=2),
    return_logprob=st.booleans() | st.lists(st.booleans(), max_size=2),
    token_ids_logprob=st.lists(st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=2),
                               max_size=2),
)  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries({"role": st.just("user") | values, "content": st.text() | values}),
    max_size=2,
)
names = (*CallFields.__struct_fields__, *SamplingFields.__struct_fields__)
chats = fields(
    *names, *ChatFields.__struct_fields__, messages=messages | values,
    stream_options=fields(*StreamOptions.__struct_fields__),
    chat_template_kwargs=st.dictionaries(st.sampled_from(["messages", "tools", "x"]), values),
)  # fmt: skip
completions = fields(
    *names, *CompletionFields.__struct_fields__,
    prompt=st.text() | st.lists(st.integers(0, 9) | values, max_size=3),
)  # fmt: skip


@pytest.fixture(scope="module")
def maker() -> RequestMaker:
    tokenizer = Tokenizer.from_folder(TINY_MOE)
    template = ChatTemplate.from_folder(TINY_MOE, tokenizer)
    limits = Limits(vocab_size=2048, context_len=64)
    return RequestMaker(tokenizer, template, limits)


def raw_of(value: Any) -> dict[str, Any]:
    """What ``read_object`` makes of the value as a Python client writes it: NaN and all."""
    data = json.dumps(value).encode()
    return {key: item for key, item in parse_object(data).items() if item is not None}


@settings(max_examples=400, deadline=None)
@given(body=natives)
def test_native(body: dict[str, Any], maker: RequestMaker) -> None:
    try:
        call = read_call(raw_of(body), max_prompts=8)
        for item in call.items:
            maker.make(
                item.prompt, item.sampling, logprobs=item.logprobs, group=call.group,
                priority=call.priority, label=item.rid, namespace=call.namespace,
            )  # fmt: skip
    except RequestError as error:
        assert error.field and len(str(error)) < 1500
        json.dumps(str(error)).encode()


@settings(max_examples=400, deadline=None)
@given(body=chats)
def test_chat(body: dict[str, Any], maker: RequestMaker) -> None:
    try:
        call, params, chat = read_chat(raw_of(body))
        ids = maker.encode_chat(chat.messages, chat.chat_template_kwargs)
        maker.make(ids, params.params(5), logprobs=chat.asked(), label=call.rid,
                   priority=call.priority)  # fmt: skip
    except RequestError as error:
        assert error.field and len(str(error)) < 1500


@settings(max_examples=400, deadline=None)
@given(body=completions)
def test_completion(body: dict[str, Any], maker: RequestMaker) -> None:
    try:
        call, params, completion = read_completion(raw_of(body))
        for one in _prompts(completion.prompt):
            maker.make(one, params.params(5), logprobs=completion.asked(), label=call.rid,
                       priority=call.priority)  # fmt: skip
    except RequestError as error:
        assert error.field and len(str(error)) < 1500


@given(body=fields(*AbortBody.__struct_fields__))
def test_abort(body: dict[str, Any]) -> None:
    try:
        typed(raw_of(body), AbortBody)
    except RequestError as error:
        assert error.field


@given(data=st.binary(max_size=30) | st.text(max_size=30).map(str.encode))
def test_bytes(data: bytes) -> None:
    try:
        assert isinstance(parse_object(data), dict)
    except RequestError as error:
        assert error.field
