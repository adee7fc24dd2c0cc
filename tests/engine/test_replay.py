"""Teacher-forced replay: whatever the traffic was, each logprob is that of an independent forward.

Works for sampled outputs and needs no second generation, so any stress is also a check.
"""

import numpy as np
import pytest
import torch

from tests.support.compare import assert_logprobs
from tests.support.harness import Harness
from tests.support.oracle import Oracle


def _run_traffic(folder, *, dtype: str, num_requests: int = 40, **options: object):
    """Random arrivals, aborts and retractions; returns (prompt, params, output) of each request."""
    rng = np.random.default_rng(11)
    harness = Harness(
        folder, dtype=dtype, context_len=96, num_pages=24, max_running=6, chunk_size=24, **options
    )
    shared = rng.integers(3, 250, 20).tolist()
    requests = []
    while len(requests) < num_requests or harness.is_busy:
        if len(requests) < num_requests and rng.random() < 0.4:
            prompt = rng.integers(3, 250, rng.integers(1, 40)).tolist()
            if rng.random() < 0.5:
                prompt = shared + prompt
            params = {
                "temperature": float(rng.choice([0.0, 0.6, 1.0, 1.5])),
                "top_p": float(rng.choice([1.0, 0.9])),
                "max_new_tokens": int(rng.integers(0, 30)),
                "sampling_seed": int(rng.integers(2**62)),
            }
            requests.append((prompt, params, harness.add(prompt, **params)))
        if requests and rng.random() < 0.02:
            harness.abort(requests[rng.integers(len(requests))][2])
        if rng.random() < 0.05:
            harness.scheduler.retract_last()
        harness.step()
    outputs = harness.run()
    return [(prompt, params, outputs[request_id]) for prompt, params, request_id in requests]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("model", ["qwen3", "fx_moe"])
def test_every_logprob_is_that_of_a_forward(model, depth, request):
    folder = request.getfixturevalue(f"{model}_folder")
    oracle = request.getfixturevalue(f"{model}_oracle")
    outputs = _run_traffic(folder, dtype="float32", depth=depth)
    assert {"stop", "length", "abort"} >= {o.finish.type for _, _, o in outputs}
    assert sum(o.usage.num_retractions for _, _, o in outputs) > 3
    for prompt, params, output in outputs:
        want = oracle.score(prompt, output.token_ids, params["temperature"])
        assert_logprobs(output.logprobs, want, context=f"{prompt} {params}")


def test_bf16_logprobs_are_within_the_noise_of_bf16(tiny_moe_folder, tiny_moe_oracle):
    """The engine in bfloat16 is no further from float32 than transformers in bfloat16 is.

    Rounding moves router choices too, so single tokens jump; quantiles are compared.
    """
    half = Oracle(tiny_moe_folder, dtype=torch.bfloat16)
    ours, theirs = [], []
    for prompt, params, output in _run_traffic(tiny_moe_folder, dtype="bfloat16"):
        temperature = params["temperature"]
        exact = tiny_moe_oracle.score(prompt, output.token_ids, temperature)
        ours += np.abs(output.logprobs - exact).tolist()
        theirs += np.abs(half.score(prompt, output.token_ids, temperature) - exact).tolist()
    assert len(ours) > 300
    for quantile in (0.5, 0.9, 0.99):
        assert np.quantile(ours, quantile) <= 1.5 * np.quantile(theirs, quantile)
    assert np.median(ours) > 0, "these logprobs were not computed in bfloat16"
