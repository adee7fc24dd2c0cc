"""In which order a stream hears of tokens and of captured rows."""

import pytest

from dovetail.core.cursor import joined
from dovetail.wire.request import CaptureParams, LogprobParams
from tests.support.scripted import PagedFake, plain_config
from tests.support.stepper import Stepper


def events_of_steps(depth: int, prompt_len: int) -> list[list]:
    """The events of each delivery to a stream that wants rows at an interval, and its prompt's
    logprobs; the prompt takes chunks of 8."""
    config = plain_config(
        context_len=64, num_pages=40, chunk_size=8, depth=depth, max_payload_bytes=2**20
    )
    stepper = Stepper(config, PagedFake(num_slots=4, page_size=4), token_bytes=lambda _: b"")
    steps, put = [], stepper.outbox.put

    def note(events: list) -> None:
        if events:
            steps.append(events)
        put(events)

    stepper.outbox.put = note  # type: ignore[method-assign]
    stepper.add(
        [3 + i % 20 for i in range(prompt_len)],
        capture=CaptureParams(columns=("tokens",), interval=4),
        logprobs=LogprobParams(logprob_start_len=0),
        max_new_tokens=9,
        ignore_eos=True,
    )
    stepper.run()
    return steps


@pytest.mark.parametrize("prompt_len", [8, 24, 48])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stream_that_goes_on_hears_of_a_step_once_and_of_tokens_first(depth, prompt_len):
    steps = events_of_steps(depth, prompt_len)
    assert sum(len(event.token_ids) for events in steps for event in events) == 9
    for events in steps[:-1]:  # behind the last comes its end, by itself
        assert all(not event.token_ids for event in events[1:])
        assert sum(event.captured is not None for event in events) <= 1
    told = [event for events in steps for event in events]
    with_tokens = sum(bool(event.token_ids) for event in told)
    assert with_tokens == 9 and len(steps) <= 9 + prompt_len // 8 + 1


@pytest.mark.parametrize("prompt_len", [8, 24, 48])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prompt_scores_come_with_the_first_token_and_outlast_a_join(depth, prompt_len):
    told = [event for events in events_of_steps(depth, prompt_len) for event in events]
    [scored] = [event for event in told if event.prompt_scores is not None]
    assert scored is next(event for event in told if event.token_ids)
    assert len(scored.prompt_scores.logprobs) == prompt_len - 1
    [whole] = joined(told)
    assert whole.prompt_scores == scored.prompt_scores
