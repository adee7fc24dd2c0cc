"""``dovetail generate``: what goes to which stream, in which order, and with which exit code."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from dovetail.cli import main
from dovetail.cli.bodies import PromptFile
from dovetail.core.engine import Engine
from dovetail.errors import RequestError
from dovetail.wire.request import LogprobParams, SamplingParams

ROOT = Path(__file__).parents[3]


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], fx_count_folder: Path) -> Run:
    """Run ``dovetail generate`` on a model that counts on from the last byte of its prompt."""

    def command(*args: str) -> Done:
        flags = ("--model", str(fx_count_folder), "--temperature", "0", "--max-new-tokens", "5")
        code = main(["generate", *flags, *args])
        return Done(code, *capsys.readouterr())

    return command


def jsonl(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def file_of(tmp_path: Path, *lines: object) -> str:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return str(file)


# -- one prompt -----------------------------------------------------------------------------


def test_text_goes_to_standard_output_and_nothing_else(run):
    assert run("abc") == Done(0, "defgh\n", "")


def test_flags_become_parameters(run):
    assert run("abc", "--stop", "g", "--stop", "zz").out == "def\n"
    assert run("abc", "--stop-token-id", "102").out == "de\n"
    assert run("abc", "--max-new-tokens", "1").out == "d\n"


def test_json_has_ids_logprobs_and_the_seed(run):
    done = run("abc", "--json", "--seed", str(2**64 - 1))
    (reply,) = jsonl(done.out)
    assert (done.code, done.err) == (0, "")
    assert reply["text"] == "defgh"
    assert reply["output_ids"] == [100, 101, 102, 103, 104]
    info = reply["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": 5}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (3, 5)
    assert info["sampling_seed"] == 2**64 - 1
    assert [row[1:] for row in info["output_token_logprobs"]] == [
        [token, None] for token in reply["output_ids"]
    ]
    assert all(row[0] <= 0 for row in info["output_token_logprobs"])


def test_a_dash_reads_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("mno"))
    assert run("-").out == "pqrst\n"


def test_standard_input_that_is_no_text(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    done = run("-")
    assert (done.code, done.out) == (2, "")
    assert done.err == "dovetail: error: standard input: is not valid utf-8: invalid start byte\n"


def test_chat_goes_through_the_template(run):
    """The template ends in a newline, so the answer counts on from byte 10."""
    assert run("--chat", "hi").out == "\x0b\x0c\r\x0e\x0f\n"
    (reply,) = jsonl(run("--chat", "hi", "--json").out)
    assert reply["output_ids"] == [11, 12, 13, 14, 15]
    assert reply["meta_info"]["prompt_tokens"] > 20


def test_talking_keeps_the_conversation(run, monkeypatch):
    turns = []
    stream = Engine.stream

    def watched(self, prompt, *args):
        turns.append([message["role"] for message in prompt])
        return stream(self, prompt, *args)

    monkeypatch.setattr(Engine, "stream", watched)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nand?\n"))
    done = run("--chat")
    assert done.code == 0
    assert turns == [["user"], ["user", "assistant", "user"]]
    assert done.out.count("\n") == 2 and done.err.count("you> ") == 3


# -- a file of prompts ----------------------------------------------------------------------


def test_a_file_is_answered_in_its_order(run, tmp_path):
    """Though the first one takes longest."""
    lines = [
        {"text": "a", "sampling_params": {"max_new_tokens": 40}},
        {"input_ids": [100], "rid": "mine"},
        "",
        {"messages": [{"role": "user", "content": "x"}], "sampling_params": {"max_new_tokens": 1}},
        {"text": "A", "sampling_params": {"stop": ["D"]}},
    ]
    done = run("--prompts", file_of(tmp_path, *lines))
    replies = jsonl(done.out)
    assert (done.code, done.err) == (0, "")
    assert [reply["meta_info"]["id"] for reply in replies] == ["0", "mine", "2", "3"]
    assert [len(reply["output_ids"]) for reply in replies] == [40, 5, 1, 3]
    assert replies[3]["text"] == "BC"


def test_an_output_file(run, tmp_path):
    out = tmp_path / "out.jsonl"
    done = run("--prompts", file_of(tmp_path, {"text": "é1"}), "-o", str(out))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert [reply["text"] for reply in jsonl(out.read_text("utf-8"))] == ["23456"]


def test_an_output_file_is_written_anew(run, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("old\n" * 1000)
    done = run("--prompts", file_of(tmp_path, {"text": "1"}, {"text": "a"}), "-o", str(out))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert [reply["text"] for reply in jsonl(out.read_text("utf-8"))] == ["23456", "bcdef"]


@pytest.mark.parametrize(
    "line", ['{"input_ids": [320]}', '{"text": ""}', '{"heat": 1}', '{"text": "a"']
)
def test_a_run_that_is_refused_leaves_the_output_file_alone(run, tmp_path, line):
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    done = run("--prompts", file_of(tmp_path, {"text": "fine"}, line), "-o", str(out))
    assert done.code == 2 and "line 2" in done.err
    assert out.read_text() == "old\n"


def test_what_a_line_leaves_open_comes_from_the_flags(tmp_path):
    flags = {"temperature": 0.5, "top_k": 7, "stop": ("x",)}
    defaults = SamplingParams(**flags)
    file = file_of(
        tmp_path,
        {"text": "a", "sampling_params": {"temperature": 1.0, "stop": None}},
        {"text": "b"},
        {"text": "c", "sampling_params": None, "top_logprobs_num": 0, "return_logprob": False},
    )
    calls = PromptFile(Path(file), sampling=flags, others={"top_logprobs_num": 2}).calls
    assert list(calls) == [1, 2, 3]
    [first, second, third] = [item for call in calls.values() for item in call.items]
    assert first.logprobs == second.logprobs == LogprobParams(top_logprobs_num=2)
    assert third.logprobs is None
    assert first.sampling == SamplingParams(temperature=1.0, top_k=7)
    assert second.sampling == third.sampling == defaults


def test_what_a_line_leaves_open_holds_for_each_item_of_a_batch(tmp_path):
    params = [{"top_k": 3}, None]
    file = file_of(tmp_path, {"text": ["a", "b"], "sampling_params": params})
    [call] = PromptFile(Path(file), sampling={"temperature": 0.5}, others={}).calls.values()
    assert [(one.sampling.temperature, one.sampling.top_k) for one in call.items] == [
        (0.5, 3), (0.5, -1),
    ]  # fmt: skip


def test_null_is_the_default_of_the_field_whatever_the_flags_say(tmp_path):
    file = file_of(tmp_path, {"text": "a", "capture": None, "logprob_start_len": None})
    others = {"capture": ["experts"], "logprob_start_len": 3}
    [call] = PromptFile(Path(file), sampling={}, others=others).calls.values()
    assert not call.wants_columns and call.items[0].logprobs == LogprobParams()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "truncated"),
        ("[]", "`object`"),
        ("{}", "there is none"),
        ('{"text": "a", "input_ids": [1]}', "text and input_ids"),
        ('{"txt": "a"}', "txt: is no field"),
        ('{"text": 1}', "text: expected"),
        ('{"text": "a", "sampling_params": {"heat": 1}}', "sampling_params.heat: is no sampling"),
        ('{"text": "a", "sampling_params": {"top_k": "x"}}', "sampling_params.top_k: expected"),
        ('{"text": "a", "sampling_params": 0}', "sampling_params: expected"),
        ('{"text": "a", "sampling_params": []}', "sampling_params: is a list"),
        ('{"text": "a", "sampling_params": [5]}', "sampling_params[0]: expected"),
        ("[" * 100_000, "`object`"),
        ('{"x": ' + "[" * 100_000, "recursion"),
        ("\ufeff", "malformed"),
    ],
)
def test_a_wrong_line_is_named_by_number_and_field(tmp_path, line, words):
    file = file_of(tmp_path, {"text": "fine"}, "", line)
    with pytest.raises(RequestError) as caught:
        PromptFile(Path(file), sampling={}, others={})
    assert caught.value.field == f"{file} line 3"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature: is"),
        ({"input_ids": []}, "input_ids: the prompt is empty"),
        ({"input_ids": [320]}, "input_ids: item 0 is 320"),
        ({"input_ids": ["7"]}, "input_ids: item 0 is '7', not an integer"),
        ({"text": ["a", ""]}, "text: in item 1 of the batch: the prompt is empty"),
        ({"text": ""}, "text: the prompt is empty"),
        ({"messages": [{"content": "hi"}]}, "messages: item 0 has no role"),
    ],
)
@pytest.mark.parametrize("before", [[], [{"text": "fine"}, ""]], ids=["alone", "among others"])
def test_a_line_that_the_engine_refuses_is_named_too(run, tmp_path, before, body, words):
    file = file_of(tmp_path, *before, body)
    done = run("--prompts", file)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"dovetail: error: {file} line {len(before) + 1}: {words}")
    assert done.err.count("\n") == 1


def test_a_file_without_requests(run, tmp_path):
    assert "holds no request" in run("--prompts", file_of(tmp_path, "", " ")).err
    assert "cannot read" in run("--prompts", str(tmp_path / "none.jsonl")).err


# -- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "PROMPT: is missing"),
        (("a", "--prompts", "x.jsonl"), "--prompts: goes without PROMPT"),
        (("--chat", "--prompts", "x.jsonl"), "--prompts: goes without PROMPT"),
        (("a", "-o", "x"), "--output: goes with --prompts"),
        (("",), "text: the prompt is empty"),
        (("a", "--temperature", "nan"), "sampling_params.temperature: is nan"),
        (("a", "--top-p", "0"), "sampling_params.top_p: is 0.0"),
        (("a", "--max-new-tokens", "-1"), "sampling_params.max_new_tokens: is -1"),
        (("a", "--stop", ""), "sampling_params.stop: item 0"),
        (("a", "--page-size", "0"), "page_size: is 0"),
        (("a", "--kv-memory", "much"), "kv_memory: 'much'"),
        (("a", "--context-len", "100000000"), "context_len: is 100000000"),
        (("a", "--model", ""), "config.json"),
        (("\udcff",), "text: is not valid Unicode"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, args, words):
    done = run(*args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("dovetail: error: ") and words in done.err
    assert done.err.count("\n") == 1


def test_an_output_that_cannot_be_written(run, tmp_path):
    done = run("--prompts", file_of(tmp_path, {"text": "a"}), "-o", str(tmp_path / "no" / "file"))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("dovetail: error: --output: cannot write")


def test_the_prompts_are_not_written_over(run, tmp_path):
    prompts = Path(file_of(tmp_path, {"text": "a"}))
    before, link = prompts.read_text(), tmp_path / "link"
    link.symlink_to(prompts)
    for output in (prompts, link):
        done = run("--prompts", str(prompts), "-o", str(output))
        assert (done.code, done.out) == (2, "") and "is the file of prompts" in done.err
    assert prompts.read_text() == before


def test_debug_shows_the_traceback(run, fx_count_folder):
    with pytest.raises(RequestError):
        main(["--debug", "generate", "", "--model", str(fx_count_folder)])


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "a", "--heat", "1"],
        ["generate", "a", "--top-k", "many"],
        ["generate", "a", "--dtype", "int8"],
        ["generate", "a", "b"],
        ["conjure"],
        [],
    ],
)
def test_what_the_parser_refuses(args, capsys):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "usage: dovetail" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["--version"]])
def test_help(args, capsys):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    expected = {
        "--help": ["generate", "--debug", "--version"],
        "--version": ["dovetail 0."],
        "generate": ["--prompts", "--chat", "--temperature", "--kv-memory", "examples:"],
    }
    for words in expected[args[0]]:
        assert words in out
    assert "SUPPRESS" not in out


def test_every_flag_has_a_help_text(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for at, line in enumerate(lines):
        if line.startswith("  -") and line.split()[-1] not in ("help", "exit"):
            has_own = "  " in line.strip()
            assert has_own or lines[at + 1].startswith(" " * 10), line


def test_an_interrupt_is_exit_code_130(run, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)
    done = run("abc")
    assert done.code == 130 and "interrupted" in done.err


# -- as a process ---------------------------------------------------------------------------


def process(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "dovetail.cli", *args],
        input=stdin,
        capture_output=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def test_a_process_pipes_text_through(fx_count_folder):
    flags = ("--model", str(fx_count_folder), "--temperature", "0", "--max-new-tokens", "3")
    done = process("generate", "-", *flags, stdin=b"abc")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"def\n", b"")
