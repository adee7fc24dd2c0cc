"""What cannot be captured is refused: before weights load, by the self-test, or by request."""

import dataclasses

import numpy as np
import pytest

import dovetail
from dovetail.capture.rows import StepRows
from dovetail.capture.sidecar import Sidecar
from dovetail.cli import main
from dovetail.core import local
from dovetail.errors import ConfigError, RequestError
from dovetail.models import registry
from dovetail.replay.records import RouteTrace
from dovetail.wire.request import CaptureParams, SamplingParams


@pytest.fixture
def no_weights(monkeypatch):
    """Loading weights is an error."""

    def load(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(local, "load_weights", load)


def test_a_dense_model_is_refused_before_its_weights_load(llama_folder, no_weights):
    with pytest.raises(ConfigError, match=r"capture: LlamaForCausalLM is dense.*leave out"):
        dovetail.Engine(llama_folder, capture=("experts",))


def test_a_family_that_does_not_record_is_refused_before_its_weights_load(
    tiny_moe_folder, no_weights, monkeypatch
):
    name = "Qwen3MoeForCausalLM"
    silent = dataclasses.replace(registry._FAMILIES[name], columns=frozenset({"experts"}))
    monkeypatch.setitem(registry._FAMILIES, name, silent)
    with pytest.raises(ConfigError, match=r"capture: the layers of Qwen3Moe.*expert_weights yet"):
        dovetail.Engine(tiny_moe_folder, capture=("expert_weights",))
    with pytest.raises(AssertionError, match="weights were loaded"):
        dovetail.Engine(tiny_moe_folder, capture=("experts",))


@pytest.mark.parametrize("flags", [["--capture", "experts"], ["--enable-return-routed-experts"]])
def test_the_command_line_names_the_flag(llama_folder, flags, capsys):
    assert main(["generate", "--json", "--model", str(llama_folder), *flags, "x"]) == 2
    said = capsys.readouterr().err
    assert "capture" in said and "--enable-return-routed-experts" in said


def lose_every_layer(monkeypatch):
    monkeypatch.setattr(StepRows, "record", lambda *args: None)


def lose_one_layer_of_one_token_steps(monkeypatch):
    original = StepRows.record

    def record(self, moe_layer, ids_TK, weights_TK):
        if len(ids_TK) > 1 or moe_layer != 1:
            original(self, moe_layer, ids_TK, weights_TK)

    monkeypatch.setattr(StepRows, "record", record)


def store_something_else(monkeypatch):
    original = Sidecar.write

    def write(self, slots_T, rows_T):
        original(self, slots_T, rows_T * 0 if self.spec.shape else rows_T)

    monkeypatch.setattr(Sidecar, "write", write)


def record_one_expert_twice(monkeypatch):
    original = StepRows.record

    def record(self, moe_layer, ids_TK, weights_TK):
        original(self, moe_layer, ids_TK * 0, weights_TK)

    monkeypatch.setattr(StepRows, "record", record)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lose_every_layer, "column experts has no row for position 0"),
        (lose_one_layer_of_one_token_steps, "column experts has no row for position 19"),
        (store_something_else, "column experts does not come back as it was written"),
        (record_one_expert_twice, "a row names one expert twice"),
    ],
)
def test_the_self_test_refuses_to_serve(fault, message, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(ConfigError, match=f"capture: the self-test failed: {message}"):
        dovetail.Engine(capture=("experts",))


def test_the_self_test_leaves_nothing_behind():
    with dovetail.Engine(capture="experts") as engine:
        assert engine.config.capture == ("experts",)
        stats = engine.stats()
        assert stats.num_free_pages == stats.num_pages and stats.num_cached_tokens == 0
        params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
        [with_capture] = engine.generate("KING", params, capture="experts")
    with dovetail.Engine() as engine:
        [without] = engine.generate("KING", params)
    assert with_capture.token_ids == without.token_ids
    assert with_capture.logprobs == without.logprobs


def test_a_request_for_what_is_not_captured_is_refused():
    with (
        dovetail.Engine() as engine,
        pytest.raises(RequestError, match=r"capture: 'experts' is not .*--capture experts"),
    ):
        engine.generate("KING", capture=("experts",))


def test_a_generation_has_its_routes(tiny_moe_oracle):
    """Whole, streamed in pieces, and several samples: each is a trace of its own tokens."""
    params = SamplingParams(max_new_tokens=12, sampling_seed=5, n=2, ignore_eos=True)
    with dovetail.Engine(capture=("experts", "expert_weights")) as engine:
        moe = engine.config.model.moe
        generations = engine.generate("KING HENRY\n", params, capture=("experts", "expert_weights"))
        for generation in generations:
            trace = generation.routes
            ids = [*generation.prompt_token_ids, *generation.token_ids]
            trace.validate(
                ids,
                layer_ids=moe.layer_ids,
                num_experts=moe.num_experts,
                num_experts_per_tok=moe.num_experts_per_tok,
            )
            assert (trace.start, trace.end) == (0, len(ids) - 1)
            assert [span.epoch for span in trace.spans] == [0]
            want = tiny_moe_oracle.router_ids(ids[:-1])
            is_sure = want.gaps > 3e-5
            np.testing.assert_array_equal(trace.ids[is_sure], want.expert_ids[is_sure])
            assert generation.captured["expert_weights"].shape == trace.ids.shape
        one = SamplingParams(max_new_tokens=12, sampling_seed=5, ignore_eos=True)
        capture = CaptureParams(columns=("experts",), interval=4)
        events = list(engine.stream("KING HENRY\n", one, capture=capture))
        assert sum(bool(event.captured) for event in events) > 2
        assert all(event.routes is None for event in events[:-1])
        assert events[-1].routes.to_bytes() == generations[0].routes.to_bytes()
        known = [*generations[0].prompt_token_ids, *generations[0].token_ids]
        later = CaptureParams(columns=("experts",), start_len=len(known) - 1)
        [turn] = engine.generate([*known, 9, 8], one, capture=later)
        ids = [*turn.prompt_token_ids, *turn.token_ids]
        both = RouteTrace.concat([generations[0].routes, turn.routes], ids)
        [whole] = engine.generate(ids[:-1], SamplingParams(max_new_tokens=0), capture=("experts",))
        np.testing.assert_array_equal(both.ids, whole.routes.ids)
        assert whole.routes.num_rows == len(ids) - 1  # nothing was sampled: every token has a row
