"""From the engine's sampling masks to the trainer's masked logprobs, end to end on the toy."""

import pytest
import torch

import dovetail
import r3_mismatch
from dovetail.replay.layout import pad_right
from dovetail.replay.masks import SamplingMask, masked_logprobs
from dovetail.replay.packing import TokenTable
from r3 import arithmetic
from r3.trainer import load_trainer

CUT = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}


@pytest.mark.parametrize("depth", [0, 1])
def test_masked_logprobs_are_those_of_the_draws(depth):
    """The trainer's, over the engine's masks, against what the engine said among the same ids."""
    prompts = [arithmetic.problem(number)[0] for number in range(2300, 2330)]
    params = dovetail.SamplingParams(max_new_tokens=4, n=2, sampling_seed=5, **CUT)
    with dovetail.Engine(r3_mismatch.FOLDER, dtype="float32", depth=depth) as engine:
        answers = engine.generate(
            prompts, params, logprobs=dovetail.LogprobParams(sampling_mask=True)
        )
    table = TokenTable([[*a.prompt_token_ids, *a.token_ids] for a in answers])
    index = pad_right(table.indices())
    model = load_trainer(r3_mismatch.FOLDER)
    with torch.no_grad():
        logits = model(
            input_ids=table.tokens(index, fill=arithmetic.PAD_ID),
            attention_mask=(index >= 0).long(),
            use_cache=False,
        ).logits
    following = table.next(index)
    is_sampled = table.column(
        [
            torch.tensor([False] * len(a.prompt_token_ids) + [True] * len(a.token_ids))
            for a in answers
        ],
        following,
    )
    mask = SamplingMask.of_rows([ids for a in answers for ids in a.sampling_mask])
    told = torch.tensor([value for a in answers for value in a.mask_logprobs])
    full = torch.tensor([value for a in answers for value in a.logprobs])
    found = masked_logprobs(
        logits[is_sampled], table.tokens(following)[is_sampled], mask, temperature=0.7
    )
    assert len(found) > 200 and int((mask.lengths > 1).sum()) > 50
    torch.testing.assert_close(found, told, atol=1e-4, rtol=0)
    assert (told - full).max() > 0.1, "nothing was cut off, so the mask was not needed"
