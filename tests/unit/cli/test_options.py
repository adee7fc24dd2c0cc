"""What was typed becomes options, parameters and fields; what was not leaves no trace."""

import argparse

import pytest

from dovetail.cli.options import (
    add_engine_flags,
    add_logprob_flags,
    add_sampling_flags,
    engine_options,
    logprob_fields,
    positive_list,
    sampling_fields,
)
from dovetail.wire.request import SamplingParams


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for add in (add_engine_flags, add_sampling_flags, add_logprob_flags):
        add(parser)
    return parser.parse_args(words)


def test_nothing_typed_is_nothing_given() -> None:
    args = parse()
    assert engine_options(args) == sampling_fields(args) == logprob_fields(args) == {}


def test_engine_flags() -> None:
    args = parse(
        "--policy", "longest-prefix", "--no-prefix-cache", "--kv-memory", "1GB", "--depth", "0"
    )
    assert engine_options(args) == {
        "policy": "longest-prefix",
        "prefix_cache": False,
        "kv_memory": "1GB",
        "depth": 0,
    }


@pytest.mark.parametrize("policy", ["fcfs", "priority", "longest-prefix"])
def test_every_policy_can_be_typed(policy: str) -> None:
    assert engine_options(parse("--policy", policy)) == {"policy": policy}


def test_sampling_flags() -> None:
    args = parse(
        "--repetition-penalty", "1.1", "--frequency-penalty", "0.5", "--presence-penalty", "-0.25",
        "--logit-bias", "3=1.5", "--logit-bias", "7=-100", "--min-new-tokens", "2", "--n", "4",
        "--stop", "a", "--stop", "b", "--stop-token-id", "9", "--seed", "5",
    )  # fmt: skip
    assert SamplingParams(**sampling_fields(args)) == SamplingParams(
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=-0.25,
        logit_bias={3: 1.5, 7: -100.0},
        min_new_tokens=2,
        n=4,
        stop=("a", "b"),
        stop_token_ids=(9,),
        sampling_seed=5,
    )


def test_logprob_flags() -> None:
    args = parse(
        "--top-logprobs-num", "3", "--logprob-start-len", "0", "--logprob-kind", "raw",
        "--token-id-logprob", "5", "--token-id-logprob", "6",
    )  # fmt: skip
    assert logprob_fields(args) == {
        "top_logprobs_num": 3,
        "logprob_start_len": 0,
        "logprob_kind": "raw",
        "token_ids_logprob": [5, 6],
    }


@pytest.mark.parametrize("text", ["3", "x=1", "3=", "=1", "3=y", "1.5=2"])
def test_a_bias_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--logit-bias", text)
    assert "is not ID=VALUE, such as" in capsys.readouterr().err


def test_lists_of_numbers() -> None:
    assert positive_list("1,8,32") == [1, 8, 32]
    with pytest.raises(argparse.ArgumentTypeError, match="0 is below 1"):
        positive_list("1,0")
