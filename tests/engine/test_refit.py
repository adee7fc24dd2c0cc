"""New weights while the engine serves: each token is of one version, and it says which.

What is right under each version is asked of an oracle of its own; nothing here trusts the engine
with its own past.
"""

import gc
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dovetail import Engine
from dovetail.core.control import Refit
from dovetail.core.process import RemoteEngine
from dovetail.dist.comm import LocalComm
from dovetail.errors import EngineClosed, InvariantError, RequestError
from dovetail.exec.device import CpuDevice
from dovetail.exec.executor import Executor
from dovetail.exec.runner import StepRunner
from dovetail.weights.refit import StagedWeights
from dovetail.wire.request import CaptureParams, LogprobParams, SamplingParams
from tests.support.answers import check_prompt_scores
from tests.support.compare import assert_logprobs
from tests.support.harness import Harness, load_model
from tests.support.oracle import Oracle
from tests.support.refit import GATE, PROMPTS, ask, open_engine, same

# -- the same as an engine that has never known other weights ----------------------------------


@pytest.mark.parametrize(
    ("depth", "lanes"), [(0, "inline"), (1, "inline"), (1, "threaded"), (2, "threaded")]
)
@pytest.mark.parametrize("names", ["single experts", "fused experts"])
def test_after_a_refit_it_is_an_engine_of_the_new_weights(
    depth, lanes, names, qwen3_moe_folder, new_folder, new_tensors
):
    if names == "fused experts":
        trainer = AutoModelForCausalLM.from_pretrained(new_folder, dtype=torch.float32)
        named = list(trainer.named_parameters())
        assert any(name.endswith("mlp.experts.gate_up_proj") for name, _ in named)
    else:
        named = new_tensors
        assert GATE in named
    with open_engine(new_folder, depth=depth) as fresh:
        want = ask(fresh)
    with open_engine(qwen3_moe_folder, depth=depth, lanes=lanes) as engine:
        before = ask(engine)
        assert engine.refit(named) == 1
        after = ask(engine)
    assert same(after, want) and not same(before, want)
    assert {v for g in before for v in g.weight_versions} == {0}
    assert {v for g in after for v in g.weight_versions} == {1}
    # The prompts were cached, under the old weights.
    assert [g.usage.cached_tokens for g in after] == [0, 0, 0]


def test_pages_of_old_weights_are_never_hit(qwen3_moe_folder, new_tensors, new_oracle):
    prompt = PROMPTS[1]
    with open_engine(qwen3_moe_folder) as engine:
        greedy = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        engine.generate(prompt, greedy)
        assert engine.generate(prompt, greedy)[0].usage.cached_tokens == 36
        assert engine.stats().num_cached_pages > 0
        engine.refit(new_tensors)
        assert engine.stats().num_cached_pages == 0
        after = engine.generate(prompt, greedy)[0]
        again = engine.generate(prompt, greedy)[0]
    assert (after.usage.cached_tokens, again.usage.cached_tokens) == (0, 36)
    want = new_oracle.generate(prompt, max_new_tokens=8, temperature=0.0)
    assert after.token_ids == again.token_ids == tuple(want.token_ids)


# -- requests that run through it --------------------------------------------------------------


class Updated(Harness):
    """A stepped engine whose weights may be written: it has a model of its own."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.model = load_model.__wrapped__(folder, "float32")  # not the one of all tests

        def executor(config) -> Executor:
            device = CpuDevice()
            return Executor(config, StepRunner(config, self.model, device), device)

        super().__init__(folder, dtype="float32", make_executor=executor, **options)
        self.versions: dict[int, list[int]] = {}

    def refit(self, tensors: dict, version: int | None = None) -> Refit:
        staged = StagedWeights(self.model, tensors, comm=LocalComm())
        message = Refit(staged.install, version)
        self.inbox.put(message)
        return message


def sequences(harness: Harness) -> list:
    return harness.scheduler._open.sequences()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("refit_at", [1, 2, 3, 5, 9, 12])
def test_each_token_is_of_the_version_it_says(
    depth, refit_at, qwen3_moe_folder, new_tensors, qwen3_moe_oracle, new_oracle
):
    """Refits meet prefills in chunks, decodes, and sequences that wait for memory."""
    harness = Updated(
        qwen3_moe_folder,
        depth=depth,
        page_size=4,
        chunk_size=16,
        context_len=80,
        num_pages=34,
        max_running=3,
        capture=("experts",),
    )
    records, requests = {}, {}
    for i, prompt in enumerate([*PROMPTS, [*PROMPTS[1][:20], 9], [5]]):
        params = {"max_new_tokens": 9 + i, "sampling_seed": i, "ignore_eos": True}
        capture = CaptureParams(columns=("experts",), interval=4 if i == 2 else 0)
        requests[harness.add(prompt, capture=capture, **params)] = prompt, params
    done = None
    while harness.is_busy:
        if harness.num_steps == refit_at:
            done = harness.refit(new_tensors).done
        harness.step()
        assert done is None or done.result(timeout=0) == 1
        records |= {s.request.request_id: s.record for s in sequences(harness)}
    harness.check_idle()
    assert harness.scheduler.epoch == 1
    num_mixed = 0
    for request_id, (prompt, params) in requests.items():
        output, record = harness.outputs[request_id], records[request_id]
        epochs = record.epochs
        assert len(epochs) == len(output.token_ids) == params["max_new_tokens"]
        assert epochs == sorted(epochs), "an older version came back"
        num_old = epochs.count(0)
        num_mixed += 0 < num_old < len(epochs)
        for oracle, part in (
            (qwen3_moe_oracle, slice(0, num_old)),
            (new_oracle, slice(num_old, None)),
        ):
            want = oracle.follow(prompt, output.token_ids, seed=params["sampling_seed"])
            assert output.token_ids[part] == list(want.token_ids[part])
            assert_logprobs(output.logprobs[part], want.logprobs[part])
        check_rows(output, prompt, (qwen3_moe_oracle, new_oracle), num_old)
    assert num_mixed > 0 or refit_at == 1


def check_rows(output, prompt: list[int], oracles: tuple[Oracle, Oracle], num_old: int) -> None:
    """Each span's rows are those of the version that it names."""
    ids = [*prompt, *output.token_ids]
    rows, spans = output.captured["experts"], output.spans["experts"]
    assert len(rows) == spans[-1].end == len(ids) - 1
    for span in spans:
        part = slice(span.start, span.end)
        want = oracles[span.epoch].router_ids(ids[: span.end]).expert_ids[part]
        assert np.array_equal(rows[part], want), span
    # A row is that of the forward from which the token after it was sampled.
    for i in range(1, len(output.token_ids)):
        position = len(prompt) + i - 1
        [epoch] = [s.epoch for s in spans if s.start <= position < s.end]
        assert epoch == (0 if i < num_old else 1)


@pytest.mark.parametrize("interval", [0, 4])
@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_logprobs_are_of_one_version(
    depth, interval, qwen3_moe_folder, new_tensors, new_oracle, qwen3_moe_oracle
):
    """Half of the prompt is scored under the old weights, and forgotten: no token came of it."""
    harness = Updated(qwen3_moe_folder, depth=depth, page_size=4, chunk_size=8, context_len=80)
    scored = LogprobParams(logprob_start_len=0)
    prompt = PROMPTS[1]
    params = {"max_new_tokens": 3, "sampling_seed": 1, "ignore_eos": True}
    capture = CaptureParams(columns=("tokens",), interval=interval)
    request_id = harness.add(prompt, logprobs=scored, capture=capture, **params)
    output = harness.outputs[request_id]
    harness.step()
    while sequences(harness)[0].scored < 9 or (interval and not output.captured):
        harness.step()
    assert 9 <= sequences(harness)[0].scored < len(prompt)
    harness.refit(new_tensors)
    harness.run()
    check_prompt_scores(output, prompt, params, scored, new_oracle)
    with pytest.raises(AssertionError):
        check_prompt_scores(output, prompt, params, scored, qwen3_moe_oracle)
    epochs = [span.epoch for span in output.spans["tokens"]]
    assert epochs[-1] == 1 and (epochs == [1]) == (interval == 0)


def test_rows_that_have_left_are_not_sent_twice(qwen3_moe_folder, new_tensors):
    """They stay, under the version that they are of: ``Output`` refuses a gap or a repetition."""
    harness = Updated(
        qwen3_moe_folder, page_size=4, chunk_size=8, context_len=80, capture=("experts",)
    )
    capture = CaptureParams(columns=("experts",), interval=4)
    request_id = harness.add(PROMPTS[1], capture=capture, max_new_tokens=3, ignore_eos=True)
    while not harness.outputs[request_id].captured:
        harness.step()
    assert not harness.outputs[request_id].token_ids
    harness.refit(new_tensors)
    output = harness.run()[request_id]
    assert {span.epoch for span in output.spans["experts"]} == {0, 1}
    first = output.spans["experts"][0]
    assert (first.epoch, first.num_recomputed) == (0, 1)


def test_rows_that_were_not_read_again_are_not_said_to_be_the_same(
    qwen3_moe_folder, new_tensors, qwen3_moe_oracle, new_oracle
):
    """An abort while the text is computed again under the new weights."""
    harness = Updated(
        qwen3_moe_folder, depth=0, page_size=4, chunk_size=8, context_len=80, capture=("experts",)
    )
    request_id = harness.add(PROMPTS[1], capture=("experts",), max_new_tokens=20, ignore_eos=True)
    while len(harness.outputs[request_id].token_ids) < 4:
        harness.step()
    harness.refit(new_tensors)
    for _ in range(3):
        harness.step()
    harness.abort(request_id)
    output = harness.run()[request_id]
    ids = [*PROMPTS[1], *output.token_ids]
    old, new = (oracle.router_ids(ids).expert_ids for oracle in (qwen3_moe_oracle, new_oracle))
    differs = (old != new).any((1, 2))
    for span in output.spans["experts"]:
        want = int(differs[span.start : span.end].sum()) if span.num_recomputed else 0
        assert span.num_differing == want, span


# -- the trainer keeps its tensors, the engine its addresses --------------------------------------


def test_live_parameters_are_copied_and_let_go(qwen3_moe_folder, new_folder):
    trainer = AutoModelForCausalLM.from_pretrained(new_folder, dtype=torch.float32)
    with open_engine(qwen3_moe_folder) as engine:
        model = engine.port._model
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        engine.refit(trainer.named_parameters())
        want = ask(engine)
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.zero_()
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        assert same(ask(engine), want)
        kept = [weakref.ref(parameter) for parameter in trainer.parameters()]
        del trainer, parameter
        gc.collect()
        assert not any(reference() is not None for reference in kept)


def test_bfloat16_weights_are_those_of_the_rounded_checkpoint(qwen3_moe_folder, new_folder):
    trainer = AutoModelForCausalLM.from_pretrained(new_folder, dtype=torch.float32)
    with open_engine(new_folder, dtype="bfloat16") as fresh:
        want = ask(fresh)
    with open_engine(qwen3_moe_folder, dtype="bfloat16") as engine:
        engine.refit(trainer.named_parameters())
        assert same(ask(engine), want)


# -- traffic --------------------------------------------------------------------------------------


def test_b33_updates_are_answered_while_streams_run(qwen3_moe_folder, new_tensors):
    """sglang #22211, #22290, #22754, #29670: an update waited for readers that waited for it."""
    old_tensors = load_file(qwen3_moe_folder / "model.safetensors")
    versions: list[list[int]] = [[] for _ in range(8)]

    def read(engine: Engine, i: int) -> None:
        sampling = SamplingParams(max_new_tokens=100, sampling_seed=i, ignore_eos=True)
        for event in engine.stream([7, i + 3], sampling):
            versions[i] += event.weight_versions

    with open_engine(qwen3_moe_folder) as engine:
        readers = [threading.Thread(target=read, args=(engine, i)) for i in range(8)]
        for reader in readers:
            reader.start()
        answers = []
        for i in range(4):
            while engine.stats().num_running < 8 and not any(map(len, versions)):
                time.sleep(0.001)
            answers.append(engine.refit(old_tensors if i % 2 else new_tensors))
        for reader in readers:
            reader.join(timeout=60)
        assert not any(reader.is_alive() for reader in readers)
    assert answers == [1, 2, 3, 4]
    for seen in versions:
        assert len(seen) == 100 and seen == sorted(seen)
    assert len({version for seen in versions for version in seen}) > 1


def test_b35_updates_under_open_traffic(qwen3_moe_folder, new_tensors, new_oracle):
    """sglang #12099: requests came between an update's abort and its flush, and it failed."""
    oracles = Oracle(qwen3_moe_folder), new_oracle
    old_tensors = load_file(qwen3_moe_folder / "model.safetensors")
    outputs: list[tuple[list[int], object]] = []
    stop = threading.Event()

    def traffic(engine: Engine, first: int) -> None:
        i = first
        while not stop.is_set():
            prompt = [first + 3, *range(20, 30), i % 200 + 3]
            sampling = SamplingParams(max_new_tokens=6, sampling_seed=i, ignore_eos=True)
            outputs.append((prompt, engine.generate(prompt, sampling)[0]))
            i += 1

    with open_engine(qwen3_moe_folder) as engine:
        askers = [threading.Thread(target=traffic, args=(engine, 40 * i)) for i in range(3)]
        for asker in askers:
            asker.start()
        for i in range(10):
            assert engine.refit(old_tensors if i % 2 else new_tensors) == i + 1
        stop.set()
        for asker in askers:
            asker.join(timeout=60)
    assert len(outputs) >= 3
    for prompt, generation in outputs:
        versions = generation.weight_versions
        assert list(versions) == sorted(versions)
        for parity, oracle in enumerate(oracles):
            part = [i for i, version in enumerate(versions) if version % 2 == parity]
            want = oracle.follow(prompt, generation.token_ids, seed=generation.seed)
            for i in part:
                assert generation.token_ids[i] == want.token_ids[i]


# -- ends ---------------------------------------------------------------------------------------


def test_a_closed_engine_says_so(qwen3_moe_folder, new_tensors):
    engine = open_engine(qwen3_moe_folder)
    engine.close()
    with pytest.raises(EngineClosed, match="has been closed"):
        engine.refit(new_tensors)


def test_an_engine_in_another_process_refuses_by_name():
    remote = object.__new__(RemoteEngine)
    with pytest.raises(RequestError, match="refit: an engine in a process of its own"):
        remote.refit({})


def test_the_loops_own_thread_may_not_wait_for_itself(qwen3_moe_folder, new_tensors):
    caught = []
    with open_engine(qwen3_moe_folder) as engine:
        request = engine.requests.make([5], SamplingParams(max_new_tokens=1))

        def deliver(news: object) -> None:
            try:
                engine.refit(new_tensors)
            except InvariantError as error:
                caught.append(error)

        engine.port.start(request, deliver)
        while not caught:
            time.sleep(0.001)
    assert "wait for itself" in str(caught[0])
