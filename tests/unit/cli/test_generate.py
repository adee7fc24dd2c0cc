"""``dovetail generate``: lines in, lines out, each with its own parameters."""

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli import main
from dovetail.core.prompts import RequestMaker
from dovetail.wire.request import GenerateBody, LogprobParams, SamplingParams
from dovetail.wire.validate import Limits

Capture = pytest.CaptureFixture[str]
CALM = ["--max-new-tokens", "3", "--temperature", "0"]


def run(capsys: Capture, *words: str) -> list[dict[str, Any]]:
    """Run a command that prints JSON lines, strict ones."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert main(["generate", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def error_of(capsys: Capture, *words: str) -> str:
    assert main(["generate", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_each_line_has_its_own_parameters(tmp_path: Path, capsys: Capture) -> None:
    bodies: list[dict[str, Any]] = [
        {"text": "KING HENRY\n", "top_logprobs_num": 2, "logprob_start_len": 0},
        {"input_ids": [1037, 492], "return_logprob": False, "rid": "mine"},
        {"messages": [{"role": "user", "content": "Hi"}], "sampling_params": {"n": 2}},
        {
            "text": "KING",
            "logprob_kind": "truncated",
            "token_ids_logprob": [5, 6],
            "sampling_params": {"temperature": 1, "top_k": 1, "logit_bias": {"7": 50}},
            "group": "g",
            "priority": 3,
        },
    ]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps(body) for body in bodies))
    replies = run(capsys, "--prompts", str(file), "--top-logprobs-num", "1", *CALM)
    metas = [reply["meta_info"] for reply in replies]
    assert [meta["id"] for meta in metas] == ["0", "mine", "2", "2", "3"]
    assert all(len(reply["output_ids"]) == 3 for reply in replies)

    assert [len(row) for row in metas[0]["output_top_logprobs"]] == [2, 2, 2]
    assert metas[0]["input_token_logprobs"][0] == [None, 1037, None]
    assert metas[0]["input_top_logprobs"][0] is None
    assert len(metas[0]["input_token_logprobs"]) == metas[0]["prompt_tokens"]
    assert not [name for name in metas[1] if "logprobs" in name]
    assert [len(row) for row in metas[2]["output_top_logprobs"]] == [1, 1, 1]
    assert replies[4]["output_ids"] == [7, 7, 7]  # the bias of this line alone
    assert [triple[0] for triple in metas[4]["output_token_logprobs"]] == [0.0, 0.0, 0.0]
    assert metas[4]["output_token_ids_logprobs"] == [[[None, 5, None], [None, 6, None]]] * 3


def test_one_prompt_as_json(capsys: Capture) -> None:
    flags = ["--logprob-start-len", "1", "--token-id-logprob", "9", "--logprob-kind", "raw"]
    first, second = run(capsys, "--json", "--n", "2", "KING HENRY\n", *flags, *CALM)
    assert first["output_ids"] == second["output_ids"]
    meta = first["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"] - 1
    assert all(row[0][1] == 9 for row in meta["output_token_ids_logprobs"])
    assert len(meta["input_token_ids_logprobs"]) == meta["prompt_tokens"] - 1


def test_text_and_ids_agree_with_the_stream(capsys: Capture) -> None:
    [reply] = run(capsys, "--json", "ROMEO\n", *CALM)
    assert main(["generate", "ROMEO\n", *CALM]) == 0
    assert capsys.readouterr().out == reply["text"] + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["KING", "--n", "2"], "--n: goes with --json or --prompts"),
        (["KING", "--top-logprobs-num", "2"], "--top-logprobs-num: goes with --json"),
        (["--chat", "--json"], "PROMPT: is missing"),
        (["KING", "--model", "/no/folder"], "model: /no/folder/config.json does not exist"),
        (["KING", "--json", "--top-logprobs-num", "999"], "top_logprobs_num: is 999"),
    ],
)
def test_what_is_refused(words: list[str], message: str, capsys: Capture) -> None:
    assert message in error_of(capsys, *words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "input_ids": [1]}', "line 2: prompt: give one of text"),
        ('{"text": "a", "top_logprob_num": 1}', "line 2: Object contains unknown field"),
        (
            '{"text": "a", "priority": "high"}',
            "line 2: Expected `int`, got `str` - at `$.priority`",
        ),
        ('{"text": ', "line 2: Input data was truncated"),
        ("[]", "line 2: Expected `object`"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "a"}\n' + line)
    assert message in error_of(capsys, "--prompts", str(file))


def test_a_wrong_value_names_its_line(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": "a"}\n{"text": "a", "sampling_params": {"top_p": 2}}')
    words = f"{file} line 2: sampling_params.top_p: is 2"
    assert words in error_of(capsys, "--prompts", str(file))


def test_a_body_becomes_a_request_with_all_it_says() -> None:
    maker = RequestMaker(
        None,  # type: ignore[arg-type]  # ids need no tokenizer
        None,
        Limits(vocab_size=100, context_len=50),
    )
    body = GenerateBody(
        input_ids=(1, 2, 3),
        sampling_params=SamplingParams(max_new_tokens=4, sampling_seed=5),
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        token_ids_logprob=(7,),
        logprob_kind="raw",
        group="g",
        priority=-3,
        rid="r",
    )
    [request] = maker.make_bodies([body])
    assert request.logprobs == LogprobParams(
        kind="raw", logprob_start_len=1, top_logprobs_num=2, token_ids_logprob=(7,)
    )
    assert (request.group, request.priority, request.label) == ("g", -3, "r")
    assert (request.prompt_token_ids, request.seed, request.max_new_tokens) == ((1, 2, 3), 5, 4)
