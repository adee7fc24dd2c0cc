"""Whatever is asked for at once, a step's answers fit its payload block."""

import pytest

from dovetail.config.payload import readout_bytes, sample_score_bytes
from dovetail.wire.request import CaptureParams, LogprobParams
from tests.support.referee import COLUMNS, CONTEXT_LEN, Job, Workload, run_workload
from tests.support.scripted import MAX_TOP

TOP = LogprobParams(top_logprobs_num=MAX_TOP, token_ids_logprob=tuple(range(MAX_TOP)))
PROMPT = tuple(range(3, 13))


def plain(max_new_tokens: int) -> dict:
    return {"max_new_tokens": max_new_tokens, "ignore_eos": True}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_readouts_leave_room_for_the_scores_of_those_that_run(depth):
    """Four end together and are read out, while two others report top logprobs."""
    short = [
        Job(prompt=(i, *PROMPT), sampling=plain(29), capture=CaptureParams(columns=("tokens",)))
        for i in range(4)
    ]
    long = [Job(prompt=(9, 5, i), sampling=plain(36), logprobs=TOP) for i in range(2)]
    referee = run_workload(
        Workload(
            config={"depth": depth, "page_size": 4, "num_pages": 99, "max_running": 6}
            | {"context_len": CONTEXT_LEN, "chunk_size": 60, "prefix_cache": True},
            jobs=(*long, *short),
        )
    )
    # That it fits is looked at for each plan; here, that there was something to look at.
    read_beside = [sampled for num_readouts, _, sampled in referee.asked if num_readouts]
    assert read_beside == [2] * len(read_beside)
    num_readouts = sum(num for num, _, _ in referee.asked)
    assert num_readouts > 2 * len(short), "prompts and the rest would have fitted whole"


@pytest.mark.parametrize("num_prompts", range(1, 6))
def test_prompt_scores_leave_room_for_the_samples_of_their_step(num_prompts):
    """The payload holds so little that prompts are scored in pieces, beside others that sample."""
    scored = LogprobParams(
        logprob_start_len=0, top_logprobs_num=MAX_TOP, token_ids_logprob=tuple(range(MAX_TOP))
    )
    jobs = [
        Job(prompt=(i, *PROMPT), sampling=plain(6), logprobs=scored if i % 2 else TOP)
        for i in range(num_prompts)
    ]
    num_scored, num_parts = sum(job.logprobs is scored for job in jobs), []
    for spare in range(0, 500, 52):
        referee = run_workload(
            Workload(
                config={"depth": 1, "page_size": 4, "num_pages": 100, "max_running": 6}
                | {"context_len": CONTEXT_LEN, "chunk_size": 60, "prefix_cache": True}
                | {
                    "max_payload_bytes": readout_bytes(CONTEXT_LEN, COLUMNS.values())
                    + sample_score_bytes(6)
                    + spare
                },
                jobs=tuple(jobs),
            )
        )
        num_parts.append(sum(of_prompts for _, of_prompts, _ in referee.asked))
        assert sum(sampled for _, _, sampled in referee.asked) == 6 * num_prompts
    # With nothing to spare in the most parts; whoever is not scored has none.
    assert num_parts[0] == max(num_parts) and min(num_parts) >= num_scored
    assert (num_parts[0] > num_scored) == (num_scored > 0)
