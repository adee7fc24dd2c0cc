"""A sampling mask is what the very draw could have drawn; its logprob is within that."""

import json

import numpy as np
import pytest

import dovetail
from dovetail.core.generation import Generation
from dovetail.core.reply import generate_reply
from dovetail.kernels.ref import sampling as ref
from dovetail.wire.request import LogprobParams, SamplingParams
from dovetail.wire.validate import MAX_MASK_IDS
from tests.support.compare import SCORE_NOISE
from tests.support.harness import Harness
from tests.support.oracle import Oracle
from tests.support.sampling import Rules, log_softmax, processed, support_of
from tests.support.stepper import Output

MASK = LogprobParams(sampling_mask=True)
RULES = [
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 30, "repetition_penalty": 1.3, "logit_bias": {7: 4.0, 9: -50.0}},
    {"temperature": 1.0, "top_p": 0.9, "min_new_tokens": 12, "stop_token_ids": tuple(range(60))},
    {"temperature": 1.0},
    {"temperature": 0.0, "top_k": 5},
]


def masks_of(output: Output) -> list[tuple[int, ...]]:
    return [ids for part in output.scores for ids in part.masks]


def logprobs_of(output: Output) -> list[float]:
    return [value for part in output.scores for value in part.mask_logprobs]


def check_masks(output: Output, prompt: list[int], params: dict, oracle: Oracle) -> int:
    """Compare with a second truncation, where no border is a tie; return how many were sure."""
    masks, logprobs = masks_of(output), logprobs_of(output)
    assert len(masks) == len(logprobs) == len(output.token_ids)
    fields = {k: v for k, v in params.items() if k in Rules.__dataclass_fields__}
    held = frozenset(params.get("stop_token_ids", ()))
    rules, num_sure = Rules(held_ids=held, **fields), 0
    for i, (token, ids, logprob) in enumerate(zip(output.token_ids, masks, logprobs, strict=True)):
        before = output.token_ids[:i]
        final = processed(oracle.last_logits([*prompt, *before]), rules, prompt, before)
        if rules.temperature == 0:
            assert ids == (token,) and logprob == 0.0
            num_sure += 1
            continue
        scaled = final / np.float32(rules.temperature)
        support = support_of(scaled, top_k=rules.top_k, top_p=rules.top_p, min_p=rules.min_p)
        want = np.sort(support.order[: support.size])
        is_cut = support.size < len(scaled)
        want = want[np.isfinite(scaled[want])]
        assert not ids or token in ids, "the drawn token is outside"
        assert list(ids) == sorted(set(ids))
        margin = np.abs(support.margin[np.isfinite(scaled[support.order])]).min()
        if margin < SCORE_NOISE * rules.noise_scale:
            continue
        num_sure += 1
        assert ids == (tuple(want.tolist()) if is_cut else ())
        inside = log_softmax(scaled[want])[np.searchsorted(want, token)]
        assert logprob == pytest.approx(inside, abs=1e-4 * rules.noise_scale)
    return num_sure


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", ["scaled", "truncated"])
def test_masks_are_those_of_the_draws(qwen3_folder, qwen3_oracle, depth, kind):
    """Rows of one batch differ in every parameter; some ask for masks, some do not."""
    harness = Harness(
        qwen3_folder, dtype="float32", depth=depth, context_len=64, num_pages=20, page_size=4
    )
    rng, asked = np.random.default_rng(1), []
    for i, params in enumerate(RULES):
        prompt = rng.integers(3, 250, 4 + i).tolist()
        params = params | {"max_new_tokens": 12, "sampling_seed": i, "ignore_eos": True}
        wanted = LogprobParams(kind=kind, sampling_mask=True, top_logprobs_num=i % 3)
        asked.append((prompt, params, harness.add(prompt, logprobs=wanted, **params)))
        plain = harness.add(prompt, **params)
        asked.append((prompt, params, plain))
    harness.on_step = lambda n: n in (5, 9) and harness.scheduler.retract_last()
    harness.run()
    num_sure = 0
    for index, (prompt, params, request_id) in enumerate(asked):
        output = harness.outputs[request_id]
        if index % 2:
            assert not output.scores
            assert output.token_ids == harness.outputs[request_id - 1].token_ids
        else:
            num_sure += check_masks(output, prompt, params, qwen3_oracle)
            if kind == "truncated" and params["temperature"]:
                np.testing.assert_allclose(logprobs_of(output), output.logprobs, atol=1e-6)
    assert num_sure > 0.8 * 12 * len(RULES)


def test_a_mask_that_is_too_large_ends_its_request_alone(fx_count_folder, tmp_path):
    """What does not fit is an error that names the fix, never a shorter mask."""
    from tests.support.handmade import fx_count

    folder = fx_count(tmp_path / "wide", vocab_size=MAX_MASK_IDS + 200)
    harness = Harness(folder, dtype="float32", context_len=64)
    params = {"max_new_tokens": 4, "temperature": 1.0, "ignore_eos": True}
    exact, large, plain = (
        harness.add([5], logprobs=logprobs, top_k=top_k, **params)
        for logprobs, top_k in (
            (MASK, MAX_MASK_IDS), (MASK, MAX_MASK_IDS + 1), (None, MAX_MASK_IDS + 1),
        )
    )  # fmt: skip
    outputs = harness.run()
    assert outputs[large].finish.type == "error" and not outputs[large].token_ids
    assert f"more than {MAX_MASK_IDS} ids; give top_k of" in outputs[large].finish.message
    assert outputs[large].finish.field == "return_sampling_mask"
    assert outputs[exact].finish.type == outputs[plain].finish.type == "length"
    assert {len(ids) for ids in masks_of(outputs[exact])} == {MAX_MASK_IDS}


def test_a_generation_and_its_reply_have_the_masks():
    params = SamplingParams(max_new_tokens=6, top_k=4, sampling_seed=3, ignore_eos=True)
    with dovetail.Engine() as engine:
        [generation] = engine.generate("KING", params, logprobs=MASK)
        [plain] = engine.generate("KING", params)
        events = list(engine.stream("KING", params, logprobs=MASK))
    assert isinstance(generation, Generation) and plain.sampling_mask == ()
    assert all(len(ids) == 4 for ids in generation.sampling_mask)
    assert [len(event.scores.masks) for event in events if event.scores] == [1] * 6
    meta = json.loads(json.dumps(generate_reply(generation, label="a", logprobs=MASK)))["meta_info"]
    assert meta["output_token_sampling_mask"] == [list(ids) for ids in generation.sampling_mask]
    assert meta["output_token_sampling_logprobs"] == list(generation.mask_logprobs)
    assert len(meta["output_token_logprobs"]) == 6


def test_a_mask_worked_out_again_would_be_noticed(qwen3_folder, qwen3_oracle, monkeypatch):
    """Broken on purpose: the mask of a looser cut, with the drawn token in it."""
    original = ref.support_mask

    def looser(scaled_NV, *, top_k_N, top_p_N, min_p_N):
        return original(
            scaled_NV, top_k_N=top_k_N + (top_k_N > 0), top_p_N=top_p_N, min_p_N=min_p_N
        )

    monkeypatch.setattr(ref, "support_mask", looser)
    with pytest.raises(AssertionError):
        test_masks_are_those_of_the_draws(qwen3_folder, qwen3_oracle, 1, "scaled")
