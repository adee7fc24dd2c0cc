"""``dovetail generate``: lines in, lines out, each with its own parameters."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dovetail.cli import main
from dovetail.cli.bodies import OF_HTTP, read_line
from dovetail.core.prompts import RequestMaker
from dovetail.replay.records import RouteHeader, RouteTrace, from_sglang
from dovetail.server.native_body import GenerateFields, requests_of
from dovetail.wire.request import CaptureParams, LogprobParams
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
        (["KING", "--capture", "experts"], "--capture: goes with --json or --prompts"),
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
        ('{"text": "a", "input_ids": [1]}', "line 2: text: give one of text"),
        (
            '{"text": "a", "top_logprob_num": 1}',
            "line 2: top_logprob_num: is no field",
        ),
        (
            '{"text": "a", "priority": "high"}',
            "line 2: priority: expected `int`, got `str`",
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
        Limits(vocab_size=100, context_len=50, columns=("tokens", "experts")),
    )
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 4, "sampling_seed": 5},
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
        "token_ids_logprob": [7],
        "logprob_kind": "raw",
        "return_sampling_mask": True,
        "capture": ["experts"],
        "routed_experts_start_len": 2,
        "group": "g",
        "priority": -3,
        "rid": "r",
        "extra_key": "k",
    }
    [request] = requests_of(read_line(body, sampling={}, others={}), maker)
    assert request.logprobs == LogprobParams(
        kind="raw",
        logprob_start_len=1,
        top_logprobs_num=2,
        token_ids_logprob=(7,),
        sampling_mask=True,
    )
    assert request.capture == CaptureParams(columns=("experts",), start_len=2)
    assert (request.group, request.priority, request.label) == ("g", -3, "r")
    assert (request.prompt_token_ids, request.seed, request.max_new_tokens) == ((1, 2, 3), 5, 4)
    assert request.namespace


def test_rows_come_with_the_lines_that_ask(
    tmp_path: Path, capsys: Capture, fx_moe_folder: Path
) -> None:
    """Every form that the server has, and the same rows in each."""
    file = tmp_path / "in.jsonl"
    ids = [5, 17, 40, 8]
    bodies = [
        {"input_ids": ids},
        {"input_ids": ids, "return_routed_experts": True},
        {"input_ids": [ids, ids[:2]], "capture": ["expert_weights", "experts"], "rid": "b"},
        {"input_ids": ids, "capture": [], "return_prompt_token_ids": True},
    ]
    file.write_text("\n".join(json.dumps(body) for body in bodies))
    flags = ["--model", str(fx_moe_folder), "--capture", "experts,expert_weights", *CALM]
    own, theirs, *batch, none = run(capsys, "--prompts", str(file), *flags)
    token_ids = ids + own["output_ids"]
    [trace, other] = [
        RouteTrace.from_header(
            msgspec.convert(reply["meta_info"]["routes"], RouteHeader),
            base64.b64decode(reply["meta_info"]["captured"]["experts"]["data"]),
        )
        for reply in (own, batch[0])
    ]
    trace.validate(token_ids, layer_ids=(1, 2, 3), num_experts=8)
    assert (trace.ids == other.ids).all() and trace.num_rows == 6
    sglang = from_sglang(
        theirs["meta_info"]["routed_experts"],
        token_ids,
        num_hidden_layers=4,
        layer_ids=(1, 2, 3),
        num_experts=8,
        num_experts_per_tok=2,
    )
    assert (sglang.ids == trace.ids).all() and "captured" not in theirs["meta_info"]
    assert [reply["meta_info"]["id"] for reply in batch] == ["b_0", "b_1"]
    assert list(batch[1]["meta_info"]["captured"]) == ["expert_weights", "experts"]
    assert none["prompt_token_ids"] == ids
    assert not {"captured", "routed_experts", "routes"} & set(none["meta_info"])
    [alone] = run(capsys, "--json", "AB", *flags)
    assert alone["meta_info"]["captured"]["experts"]["shape"] == [4, 3, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"stream": True}, "stream: a reply is one line; leave it out"),
        ({"capture": ["experts"], "capture_file": "x"}, "capture_file: rows come in the reply's"),
        ({"capture": ["experts"]}, "capture: 'experts' is not captured by this engine"),
        ({"return_routed_experts": True}, "return_routed_experts: 'experts' is not captured"),
        ({"lora_path": "x"}, "lora_path: is not supported"),
        ({"temperature": 0}, "temperature: is no field of a /generate body"),
    ],
)
def test_what_a_line_cannot_have_is_refused_by_name(
    line: dict[str, Any], message: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"text": "A"} | line))
    assert f"{file} line 1: {message}" in error_of(capsys, "--prompts", str(file))


def test_http_alone_has_its_fields() -> None:
    """What a line leaves out must still be a field of the server's."""
    assert set(OF_HTTP) < set(GenerateFields.__struct_fields__)
