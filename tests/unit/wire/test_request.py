"""Whatever comes in becomes typed, bounded values, or an error that names its field."""

import math

import msgspec
import numpy as np
import pytest

from dovetail.errors import RequestError
from dovetail.wire.request import CaptureParams, LogprobParams, SamplingParams
from dovetail.wire.validate import (
    DEFAULT_MAX_NEW_TOKENS,
    Limits,
    validated_prompt,
    validated_sampling,
)

LIMITS = Limits(vocab_size=100, context_len=300)
NAN, INF = math.nan, math.inf


def checked(prompt_len: int = 10, **fields: object) -> SamplingParams:
    return validated_sampling(SamplingParams(**fields), prompt_len=prompt_len, limits=LIMITS)


@pytest.mark.parametrize(
    ("kind", "name", "legal"),
    [
        (SamplingParams, "max_tokens", "max_new_tokens, temperature, top_k"),
        (LogprobParams, "top_logprobs", "kind, logprob_start_len, top_logprobs_num"),
        (CaptureParams, "column", "columns, start_len, interval"),
    ],
)
def test_a_name_that_is_no_field_lists_those_that_are(kind, name, legal):
    with pytest.raises(RequestError, match=f"^{name}: is no field of {kind.__name__}; .* {legal}"):
        kind(**{name: 5})
    assert kind() == msgspec.convert({}, kind)


# -- prompts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        [0, 99],
        (0, 99),
        np.array([0, 99], dtype=np.uint8),
        [np.int64(0), np.uint16(99)],
        (i for i in (0, 99)),
        range(0, 100, 99),
    ],
)
def test_a_prompt_becomes_plain_ints(prompt):
    ids = validated_prompt(prompt, LIMITS)
    assert ids == (0, 99)
    assert all(type(token_id) is int for token_id in ids)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ((), "empty"),
        ([1, -1], "item 1 is -1; legal ids are 0 to 99"),
        ([100], "item 0 is 100; legal ids are 0 to 99"),
        ([2**31], "item 0 is 2147483648"),
        ([2**63], "item 0 is 9223372036854775808"),
        ([1, 1.5], "item 1 is 1.5, not an integer"),
        ([1.0], "item 0 is 1.0, not an integer"),
        ([NAN], "item 0 is nan, not an integer"),
        (["7"], "item 0 is '7', not an integer"),
        ([True], "item 0 is True, not an integer"),
        ([None], "item 0 is None, not an integer"),
        ([[1, 2]], "item 0 is [1, 2], not an integer"),
        (np.array([[1, 2]]), "item 0 is array([1, 2]), not an integer"),
        (np.array([1.0]), "not an integer"),
        (np.array([True]), "not an integer"),
        ("text", "must be a list"),
        (b"bytes", "must be a list"),
        (None, "must be a list"),
        (5, "must be a list"),
        ([1] * 301, "301 tokens, more than the context length of 300"),
    ],
)
def test_a_wrong_prompt_is_refused_and_says_where(prompt, words):
    with pytest.raises(RequestError) as caught:
        validated_prompt(prompt, LIMITS)
    assert caught.value.field == "input_ids"
    assert words in str(caught.value)


def test_the_longest_prompt_to_go_on_from_leaves_room_for_one_token():
    assert len(validated_prompt([1] * 299, LIMITS)) == 299
    assert checked(299).max_new_tokens == 1


def test_a_prompt_as_long_as_the_context_can_be_scored_and_nothing_else():
    assert len(validated_prompt([1] * 300, LIMITS)) == 300
    assert checked(300, max_new_tokens=0).max_new_tokens == 0
    for asked in (None, 1):
        with pytest.raises(RequestError, match="context length") as caught:
            checked(300, max_new_tokens=asked)
        assert caught.value.field == "sampling_params.max_new_tokens"


# -- sampling parameters --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -0.1, "is 0.0001 to 10000, or 0 for greedy decoding"),
        ("temperature", NAN, "is nan"),
        ("temperature", INF, "is inf"),
        ("temperature", 1e5, "is 0.0001 to 10000, or 0 for greedy decoding"),
        ("temperature", 1e-5, "is 0.0001 to 10000, or 0 for greedy decoding"),
        ("temperature", "1", "got `str`"),
        ("temperature", None, "got `null`"),
        ("temperature", True, "got `bool`"),
        ("temperature", 10**400, "out of range"),
        ("temperature", np.float32(1), "got `numpy.float32`"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", -0.5, "(0, 1]"),
        ("top_p", 1.1, "(0, 1]"),
        ("top_p", NAN, "is nan"),
        ("min_p", -1e-9, "[0, 1]"),
        ("min_p", 1.5, "[0, 1]"),
        ("min_p", NAN, "is nan"),
        ("top_k", 0, "give -1 (all) or at least 1"),
        ("top_k", -2, "give -1"),
        ("top_k", 2**31, "give -1"),
        ("top_k", 2**70, "give -1"),
        ("top_k", 1.5, "got `float`"),
        ("top_k", "1", "got `str`"),
        ("max_new_tokens", -1, "cannot be negative"),
        ("max_new_tokens", 291, "the prompt has 10 tokens and the context length is 300"),
        ("max_new_tokens", 2**31 - 1, "give at most 290"),
        ("max_new_tokens", 2**31, "give at most 290"),
        ("max_new_tokens", 2**63, "give at most 290"),
        ("max_new_tokens", 10**18, "give at most 290"),
        ("max_new_tokens", 1e18, "got `float`"),
        ("max_new_tokens", 3.0, "got `float`"),
        ("max_new_tokens", True, "got `bool`"),
        ("max_new_tokens", "256", "got `str`"),
        ("sampling_seed", -1, "0 to 2**64-1"),
        ("sampling_seed", 2**64, "0 to 2**64-1"),
        ("sampling_seed", 0.5, "got `float`"),
        ("stop", "", "0 bytes"),
        ("stop", ("ok", ""), "item 1 has 0 bytes"),
        ("stop", "x" * 1025, "1025 bytes"),
        ("stop", ("x",) * 65, "65 strings"),
        ("stop", "\ud800", "not valid Unicode"),
        ("stop", 5, "got `int`"),
        ("stop", ("a", None), "got `null`"),
        ("stop_token_ids", (1, 100), "item 1 is 100; legal ids are 0 to 99"),
        ("stop_token_ids", (-1,), "item 0 is -1"),
        ("stop_token_ids", (None,), "got `null`"),
        ("stop_token_ids", (1,) * 65, "has 65 ids; at most 64"),
        ("stop_token_ids", (2**70,), "legal ids are"),
        ("stop_token_ids", 5, "got `int`"),
        ("ignore_eos", 1, "got `int`"),
        ("ignore_eos", "yes", "got `str`"),
        ("skip_special_tokens", None, "got `null`"),
        ("no_stop_trim", 0, "got `int`"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(field, value, words):
    with pytest.raises(RequestError) as caught:
        checked(**{field: value})
    message = str(caught.value)
    assert words in message
    assert field in message
    assert caught.value.field.startswith("sampling_params")


@pytest.mark.parametrize("value", [{"temperature": 0}, {}, None, 0, "greedy", SamplingParams])
def test_only_sampling_params_will_do(value):
    with pytest.raises(RequestError, match=r"must be a dovetail\.SamplingParams"):
        validated_sampling(value, prompt_len=1, limits=LIMITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-4),
        ("temperature", 1e4),
        ("top_p", 1e-300),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1.0),
        ("top_k", 1),
        ("top_k", 2**31 - 1),
        ("sampling_seed", 0),
        ("sampling_seed", 2**64 - 1),
        ("max_new_tokens", 0),
        ("max_new_tokens", 290),
        ("stop", "é" * 512),
        ("stop", ()),
        ("stop_token_ids", ()),
        ("stop_token_ids", (0, 99)),
        ("stop_token_ids", tuple(range(64))),
    ],
)
def test_the_ends_of_the_ranges_are_legal(field, value):
    assert getattr(checked(**{field: value}), field) == value


def test_lists_become_tuples():
    params = checked(stop=["a", "b"], stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3, 4))


def test_the_default_length_ends_at_the_context():
    assert checked(10).max_new_tokens == DEFAULT_MAX_NEW_TOKENS
    assert checked(250).max_new_tokens == 50
