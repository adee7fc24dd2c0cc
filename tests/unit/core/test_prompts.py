"""What a user may call a prompt, and what becomes of it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.core.prompts import RequestMaker
from dovetail.errors import RequestError
from dovetail.text.chat import ChatTemplate
from dovetail.text.tokenizer import Tokenizer
from dovetail.wire.request import CaptureParams, SamplingParams
from dovetail.wire.validate import Limits, validated_capture

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(fx_count_folder: Path) -> Path:
    """A byte-level tokenizer: the ids of a text are its bytes."""
    return fx_count_folder


@pytest.fixture(scope="module")
def maker(folder) -> RequestMaker:
    tokenizer = Tokenizer.from_folder(folder)
    return RequestMaker(
        tokenizer,
        ChatTemplate.from_folder(folder, tokenizer),
        Limits(vocab_size=320, context_len=64),
    )


def ids_of(maker: RequestMaker, prompts: object) -> list[tuple[int, ...]]:
    return [request.prompt_token_ids for request in maker.make_all(prompts, None)]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([1, 2], [(1, 2)]),
        ((1, 2), [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        (["a", [1, 2], (3,)], [(97,), (1, 2), (3,)]),
        (np.array([1, 2]), [(1, 2)]),
        ([np.array([1, 2]), np.array([3])], [(1, 2), (3,)]),
        (np.array([[1, 2], [3, 4]]), [(1, 2), (3, 4)]),
        (torch.tensor([[1, 2], [3, 4]]), [(1, 2), (3, 4)]),
        (torch.tensor([1, 2]), [(1, 2)]),
        ([np.int64(1), 2], [(1, 2)]),
        ((i for i in (1, 2)), [(1, 2)]),
        (["7"], [(55,)]),  # a list of texts
    ],
)
def test_one_or_many(maker, prompts, expected):
    assert ids_of(maker, prompts) == expected


@pytest.mark.parametrize("prompt", [{"role": "user"}, 5, None, b"ab", np.array([[1, 2]])])
def test_a_single_prompt_is_checked_as_well(maker, prompt):
    """``stream`` takes one prompt, of whatever type."""
    with pytest.raises(RequestError, match="input_ids"):
        maker.make(prompt, None)
    assert maker.make(np.array([1, 2]), None).prompt_token_ids == (1, 2)


def test_a_chat_is_rendered_and_one_chat_is_one_prompt(maker):
    (alone,) = ids_of(maker, CHAT)
    text = b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert maker.encode(CHAT) == list(alone)
    assert bytes(i for i in alone if i < 256) == (
        text.replace(b"<|im_start|>", b"").replace(b"<|im_end|>", b"")
    )
    assert ids_of(maker, [CHAT, "a", CHAT]) == [alone, (97,), alone]


def test_text_parts_of_a_message_are_one_text(maker):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert maker.encode([CHAT[0] | {"content": parts}]) == maker.encode(
        [CHAT[0] | {"content": "h\ni"}]
    )
    image = [*parts, {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    with pytest.raises(RequestError, match="no text part") as caught:
        maker.encode([*CHAT, CHAT[0] | {"content": image}])
    assert caught.value.field == "messages[1].content[2]"


@pytest.mark.parametrize(
    ("prompts", "field", "words"),
    [
        ([], "prompts", "empty"),
        ("", "text", "empty"),
        (["a", ""], "prompts[1].text", "empty"),
        (["a", []], "prompts[1].input_ids", "empty"),
        ([[]], "input_ids", "empty"),
        ([[1], [2, 320]], "prompts[1].input_ids", "item 1 is 320"),
        ([1, "a"], "prompts[0].input_ids", "must be a list"),
        ([torch.tensor(1), "a"], "prompts[0].input_ids", "must be a list"),
        ([1.5], "input_ids", "item 0 is 1.5"),
        ([None], "input_ids", "item 0 is None"),
        ("\ud800", "text", "surrogate"),
        (None, "prompts", "must be text"),
        (5, "prompts", "must be text"),
        (b"ab", "prompts", "must be text"),
        (bytearray(b"ab"), "prompts", "must be text"),
        (CHAT[0], "prompts", "a list of chat messages"),
        ([{"content": "hi"}], "messages", "role"),
        ([CHAT, [{}]], "prompts[1].messages", "role"),
        ([*CHAT, "hi"], "prompts[0].input_ids", "not an integer"),
        ("a" * 64, "sampling_params.max_new_tokens", "fills the context length of 64"),
        ("a" * 65, "input_ids", "context length of 64"),
    ],
)
def test_a_wrong_prompt_is_named(maker, prompts, field, words):
    with pytest.raises(RequestError) as caught:
        maker.make_all(prompts, None)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        ([SamplingParams()], "sampling_params", "1 entries for 2 prompts"),
        (5, "sampling_params", "must be a SamplingParams, or a list"),
        ({"temperature": 0}, "sampling_params", "make one by SamplingParams(**fields)"),
        ([SamplingParams(), {}], "prompts[1].sampling_params", "must be a dovetail"),
        ([SamplingParams(), SamplingParams(top_k=0)], "prompts[1].sampling_params.top_k", "is 0"),
        (SamplingParams(top_p=2), "prompts[0].sampling_params.top_p", "is 2"),
    ],
)
def test_wrong_parameters_are_named(maker, params, field, words):
    with pytest.raises(RequestError) as caught:
        maker.make_all(["a", "b"], params)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.mark.parametrize("params", [{}, 0, "", []])
def test_an_empty_value_is_not_taken_for_the_default(maker, params):
    with pytest.raises(RequestError, match="must be a dovetail"):
        maker.make("a", params)


def test_parameters_may_differ_by_prompt(maker):
    wanted = [SamplingParams(top_k=3), None, SamplingParams(max_new_tokens=2)]
    got = [request.sampling for request in maker.make_all(["a", "b", "c"], wanted)]
    assert [params.top_k for params in got] == [3, -1, -1]
    assert [params.max_new_tokens for params in got] == [63, 63, 2]


def test_an_unknown_column_is_refused_and_a_doubled_one_is_one(maker):
    with pytest.raises(
        RequestError, match=r"capture: 'experts' is not captured .*--capture experts$"
    ):
        maker.make("a", None, capture=("tokens", "experts"))
    limits = Limits(vocab_size=320, context_len=64, columns=("tokens", "experts"))
    with pytest.raises(RequestError, match=r"--capture experts,expert_weights$"):
        validated_capture(CaptureParams(columns=("expert_weights",)), prompt_len=1, limits=limits)
    for asked in ("tokens", ("tokens", "tokens")):
        assert maker.make("a", None, capture=asked).capture.columns == ("tokens",)


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ("nope", r"capture: 'nope' is no column; the columns are tokens, experts, expert_weights"),
        (3, r"capture: is 3; give names"),
        ((3,), r"capture.columns\[0\]: expected `str`, got `int`"),
        (CaptureParams(columns=("tokens",), start_len=5), r"capture.start_len: is 5; .* 0 to .* 4"),
        (CaptureParams(columns=("tokens",), start_len=-1), r"capture.start_len: is -1"),
        (CaptureParams(columns=("tokens",), start_len=1.5), r"capture.start_len: expected `int`"),
        (CaptureParams(columns=("tokens",), interval=-2), r"capture.interval: is -2"),
    ],
)
def test_wrong_capture_parameters_are_refused_by_name(maker, capture, message):
    with pytest.raises(RequestError, match=message):
        maker.make([3, 4, 5, 6], None, capture=capture)


def test_each_request_has_an_id_and_a_seed_of_its_own(maker):
    requests = maker.make_all(["a"] * 20, None)
    assert len({request.request_id for request in requests}) == 20
    assert len({request.seed for request in requests}) == 20
    assert maker.make("a", SamplingParams(sampling_seed=0)).seed == 0


def test_without_a_template_there_is_no_chat(maker, folder):
    plain = RequestMaker(
        Tokenizer.from_folder(folder),
        None,
        Limits(vocab_size=320, context_len=64),
    )
    with pytest.raises(RequestError, match="no chat template"):
        plain.make(CHAT, None)


@pytest.mark.parametrize("wrong", [5, b"a", ["a"], "\ud800"])
def test_what_is_no_text_is_no_label(maker, wrong):
    for name, field in (("group", "group"), ("label", "rid")):
        with pytest.raises(RequestError) as caught:
            maker.make([1], None, **{name: wrong})
        assert caught.value.field == field


def test_any_text_is_a_label(maker):
    for text in ("", "a" * 1000, "\U0001f600"):
        request = maker.make([1], None, group=text, label=text)
        assert (request.group, request.label) == (text, text)
