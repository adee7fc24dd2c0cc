"""Reported bugs of other engines, classes 7 and 9: rows of parameters, seeds, stops and lengths.

Tests are named by the ids of ``docs/testing.md``, where all of them are listed.
"""

import itertools
import json
import shutil

import numpy as np
import pytest

from dovetail.core.engine import Engine
from dovetail.errors import RequestError
from dovetail.wire.request import LogprobParams, SamplingParams
from tests.support.answers import check_output
from tests.support.checkpoints import random_llama
from tests.support.compare import assert_logprobs
from tests.support.harness import Harness

PROMPT = [7 * i % 250 + 3 for i in range(20)]


def engine_of(folder, **options: object) -> Harness:
    defaults = {"dtype": "float32", "context_len": 128, "num_pages": 400, "max_running": 16}
    return Harness(folder, **(defaults | options))


@pytest.fixture(scope="module")
def counting(fx_count_folder):
    """An engine whose next token is the last one plus 1; ids below 256 are bytes."""
    with Engine(fx_count_folder, context_len=300, max_running=8, num_pages=200) as engine:
        yield engine


# -- class 7 --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_b27_a_penalty_counts_the_token_before(llama_folder, depth):
    """vllm #52461, sglang #8056, #20026: outputs seen one token late; forced tokens came twice."""
    penalised, free = [], []
    for ids, penalty in ((penalised, 100.0), (free, 1.0)):
        harness = engine_of(llama_folder, depth=depth)
        for _ in range(4):
            harness.add(
                PROMPT, max_new_tokens=50, temperature=0.0, ignore_eos=True,
                repetition_penalty=penalty,
            )  # fmt: skip
        ids += [output.token_ids for output in harness.run().values()]
    assert all(len(set(tokens)) == 50 for tokens in penalised)
    assert all(len(set(tokens)) < 50 for tokens in free), "would have repeated none anyway"


@pytest.mark.parametrize("depth", [2])
def test_b87_parameters_stay_with_their_row(fx_count_folder, fx_count_oracle, depth):
    """mlx-lm #1225, vllm #1309: bias or penalties of one request acted on another.

    Half are forced to a token of their own; a third have penalties; others just count.
    """
    rng = np.random.default_rng(depth)
    harness = engine_of(fx_count_folder, depth=depth, num_pages=60, max_running=12)
    requests = []
    while len(requests) < 48 or harness.is_busy:
        if len(requests) < 48 and rng.random() < 0.5:
            i = len(requests)
            params = {
                "max_new_tokens": int(rng.integers(1, 30)),
                "ignore_eos": True,
                "temperature": float(rng.choice([0.0, 1.0])),
                "sampling_seed": i,
            }
            if i % 2:
                params["logit_bias"] = {64 + i: 100.0}
            if i % 3 == 0:
                params |= {"presence_penalty": 2.0, "frequency_penalty": 1.0}
            prompt = [int(rng.integers(3, 200))] * int(rng.integers(1, 9))
            requests.append((prompt, params, harness.add(prompt, **params)))
        if rng.random() < 0.05:
            harness.scheduler.retract_last()
        harness.step()
    outputs = harness.run()
    for i, (prompt, params, request_id) in enumerate(requests):
        got = outputs[request_id].token_ids
        if i % 2 and i % 3:
            assert set(got) == {64 + i}
        elif not i % 2 and i % 3:
            assert got == [(prompt[-1] + 1 + k) % 320 for k in range(len(got))]
        check_output(outputs[request_id], prompt, params, fx_count_oracle)


def test_b89_samples_of_a_prompt_differ_and_repeat_with_their_seed(tiny_moe_folder):
    """UniRL #208: a default seed was copied to siblings: all samples of a group were equal."""
    with Engine(tiny_moe_folder, context_len=64, max_running=16) as engine:
        many = SamplingParams(n=8, max_new_tokens=20, ignore_eos=True)
        outputs = engine.generate(PROMPT, many)
        assert [o.sample_index for o in outputs] == list(range(8))
        assert len({o.token_ids for o in outputs}) >= 7
        assert len({o.seed for o in outputs}) == 1
        single = SamplingParams(max_new_tokens=20, ignore_eos=True)
        outputs = engine.generate([PROMPT] * 8, single)
        assert len({o.token_ids for o in outputs}) >= 7
        assert len({o.seed for o in outputs}) == 8
        seeded = SamplingParams(n=8, max_new_tokens=20, ignore_eos=True, sampling_seed=5)
        first, second = ([o.token_ids for o in engine.generate(PROMPT, seeded)] for _ in range(2))
        assert first == second and len(set(first)) >= 7
        alone = SamplingParams(max_new_tokens=20, ignore_eos=True, sampling_seed=5)
        assert engine.generate(PROMPT, alone)[0].token_ids == first[0]  # sample 0


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_b91_a_request_is_the_same_at_every_batch_size(llama_folder, params):
    """sglang #19431: an operator whose result depended on the batch."""
    params = params | {"max_new_tokens": 20, "sampling_seed": 3, "ignore_eos": True}
    results = []
    for num_others in (0, 2, 7, 8, 9, 33):
        harness = engine_of(llama_folder, max_running=40)
        for i in range(num_others):
            harness.add([3 + i] * (1 + i % 30), max_new_tokens=25, ignore_eos=True)
        results.append(harness.ask(PROMPT, **params))
    for result in results[1:]:
        assert result.token_ids == results[0].token_ids
        assert_logprobs(result.logprobs, results[0].logprobs, 1e-5)


EFFECTS = [
    {"temperature": 2.5},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_p": 0.05},
    {"min_p": 0.9},
    {"repetition_penalty": 3.0},
    {"repetition_penalty": 0.3},
    {"frequency_penalty": 8.0},
    {"frequency_penalty": -3.0},
    {"presence_penalty": 9.0},
    {"logit_bias": {77: 30.0}},
    {"min_new_tokens": 20, "stop_token_ids": tuple(range(64))},
    {"stop_token_ids": tuple(range(0, 256, 4))},
    {"max_new_tokens": 3},
    {"sampling_seed": 12},
]


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_b93_every_parameter_has_its_effect(llama_folder, llama_oracle, effect):
    """sglang #28179: a parameter was parsed and never applied."""
    base = {"max_new_tokens": 24, "temperature": 1.0, "sampling_seed": 11}
    if "min_new_tokens" in effect:
        base["stop_token_ids"] = effect["stop_token_ids"]
    harness = engine_of(llama_folder)
    plain = harness.add(PROMPT, **base)
    changed = harness.add(PROMPT, **(base | effect))
    outputs = harness.run()
    assert outputs[plain].token_ids != outputs[changed].token_ids
    check_output(outputs[changed], PROMPT, base | effect, llama_oracle)
    check_output(outputs[plain], PROMPT, base, llama_oracle)


# -- class 9 --------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["fg", "fghij", ("jkl", "ghi"), ("hijklm", "hij", "ijk"), "g"])
@pytest.mark.parametrize("start", "abcde")
def test_b101_no_part_of_a_stop_string_is_streamed(counting, stop, start):
    """sglang #11446: the beginning of a stop was shown before the match was complete."""
    params = SamplingParams(max_new_tokens=20, temperature=0.0, stop=stop)
    [whole] = counting.generate(start, params)
    full = "".join(chr(ord(start) + 1 + i) for i in range(20))
    stops = (stop,) if isinstance(stop, str) else stop
    ends = {full.index(s) + len(s): s for s in sorted(stops, key=len) if s in full}
    end = min(ends)
    assert whole.text == full[: end - len(ends[end])]
    assert whole.finish_reason.matched == ends[end]
    assert len(whole.token_ids) == end
    text = ""
    for event in counting.stream(start, params):
        text += event.text
        assert whole.text.startswith(text)
    assert text == whole.text


def test_b103_text_that_was_held_back_comes_out(counting):
    """FastChat #3467: newlines vanished when a stop began with one."""
    for stop in ("\n<x>", "\nX", "\n\x0b\x0cX", ("\t\nX", "\x0c\rX")):
        params = SamplingParams(max_new_tokens=8, temperature=0.0, stop=stop)
        [whole] = counting.generate([8], params)  # tab, newline, ...
        assert whole.text == "".join(chr(9 + i) for i in range(8))
        assert "".join(e.text for e in counting.stream([8], params)) == whole.text


def _with_eos(folder, *, config: object, generation: object):
    """Rewrite where a checkpoint says which ids end a text."""
    for name, value in (("config", config), ("generation_config", generation)):
        path = folder / f"{name}.json"
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | {"eos_token_id": value}))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (None, None, ()),
        (105, None, (105,)),
        ([104, 106], None, (104, 106)),
        (None, [104, 103], (103, 104)),
        (103, 103, (103,)),
    ],
    ids=str,
)
def test_b105_no_end_before_min_new_tokens(
    tmp_path, fx_count_folder, fx_count_oracle, config, generation, ends
):
    """sglang #9039, #22144: min_new_tokens and tokenizers or configs with or without EOS."""
    folder = tmp_path / "model"
    shutil.copytree(fx_count_folder, folder)
    _with_eos(folder, config=config, generation=generation)
    harness = engine_of(folder)
    assert set(harness.config.model.eos_token_ids) == set(ends)
    asked = {}
    for least, stops, temperature in itertools.product((0, 1, 10, 20), ((), (109,)), (0.0, 1.0)):
        params = {"min_new_tokens": least, "stop_token_ids": stops, "temperature": temperature}
        asked[harness.add([100], max_new_tokens=20, **params)] = params
    for request_id, output in harness.run().items():
        params, held = asked[request_id], {*ends, *asked[request_id]["stop_token_ids"]}
        assert not held & set(output.token_ids[: params["min_new_tokens"]])
        assert not held & set(output.token_ids[:-1])
        assert output.finish.type == ("stop" if output.token_ids[-1] in held else "length")
        want = fx_count_oracle.follow(
            [100], output.token_ids, **(params | {"stop_token_ids": tuple(held)})
        )
        assert list(want.token_ids) == output.token_ids
    for wrong in ({"min_new_tokens": 21}, {"stop_token_ids": (None,)}, {"min_new_tokens": -1}):
        with pytest.raises(RequestError):
            harness.add([100], max_new_tokens=20, **wrong)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("start", [-1, 0, 5, 20])
def test_b107_no_tokens_asked_none_given(llama_folder, llama_oracle, n, start):
    """sglang #772, #4892, #4998: prefill always sampled; a fix then leaked memory."""
    harness = engine_of(llama_folder, page_size=4, num_pages=32)
    asked = LogprobParams(logprob_start_len=start, top_logprobs_num=2)
    params = {"max_new_tokens": 0, "n": n}
    for _ in range(3):
        request_id = harness.add(PROMPT, logprobs=asked, capture=("tokens",), **params)
        harness.run()
        for output in harness.samples[request_id]:
            assert (output.token_ids, output.logprobs) == ([], [])
            assert output.finish.type == "length" and output.num_events == 1
            assert output.captured["tokens"].tolist() == PROMPT
            check_output(output, PROMPT, params, llama_oracle, logprobs=asked)
        harness.ledger.flush()
        assert harness.ledger.stats().free == 32
        large = harness.ask([5] * 120, max_new_tokens=8, ignore_eos=True)
        assert large.finish.type == "length"


def test_b107_an_empty_stream(counting):
    events = list(counting.stream("abc", SamplingParams(max_new_tokens=0, stop="x")))
    assert [e.finish_reason.type for e in events if e.finish_reason] == ["length"]
    assert not any(e.text or e.token_ids for e in events)


EOS = 256


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("no_stop_trim", [True, False])
@pytest.mark.parametrize(
    ("prompt", "how", "matched", "before", "tail"),
    [
        ([96], {"stop_token_ids": (100,)}, 100, "abc", "d"),
        ([96], {"stop": "cd"}, "cd", "ab", "cd"),
        ([251], {}, EOS, None, "<|endoftext|>"),
    ],
)
def test_b109_a_stop_is_trimmed_from_the_text_and_never_from_the_ids(
    counting, prompt, how, matched, before, tail, no_stop_trim, skip_special_tokens
):
    """dynamo #12562, #14317: the matched stop showed up in the text, or ids were trimmed too."""
    params = SamplingParams(
        max_new_tokens=10,
        temperature=0.0,
        no_stop_trim=no_stop_trim,
        skip_special_tokens=skip_special_tokens,
        **how,
    )
    [whole] = counting.generate(prompt, params)
    assert whole.finish_reason.type == "stop" and whole.finish_reason.matched == matched
    ids = list(whole.token_ids)
    assert ids == list(range(prompt[0] + 1, prompt[0] + 1 + len(ids)))
    assert ids[-1] == (100 if matched == "cd" else matched)
    assert len(whole.logprobs) == len(ids) == whole.usage.completion_tokens
    if before is not None:
        assert whole.text == before + (tail if no_stop_trim else "")
    else:
        assert whole.text.endswith(tail) == (no_stop_trim and not skip_special_tokens)
    assert "".join(e.text for e in counting.stream(prompt, params)) == whole.text


def test_b105_a_model_of_stops_alone_ends_with_an_error(tmp_path):
    """Whoever holds back every token there is gets an error of its own; the others go on."""
    folder = random_llama(tmp_path / "small", vocab_size=40, eos_id=None)
    harness = engine_of(folder)
    params = {"max_new_tokens": 9, "min_new_tokens": 4, "stop_token_ids": tuple(range(40))}
    bad = harness.add([5, 6, 7], **params)
    good = harness.add([5, 6, 7], max_new_tokens=9)
    outputs = harness.run()
    assert outputs[bad].finish.type == "error" and "no token" in outputs[bad].finish.message
    assert outputs[bad].token_ids == [] and outputs[good].finish.type == "length"
