"""Labels of groups through the public surface."""

import threading

import pytest

from dovetail import Engine, RequestError, SamplingParams

PROMPT = [5, 6, 7, 8]
LONG = SamplingParams(max_new_tokens=900, ignore_eos=True, sampling_seed=1)


@pytest.fixture(scope="module")
def engine(fx_count_folder):
    with Engine(fx_count_folder, context_len=1000, max_running=8, num_pages=600) as engine:
        yield engine


@pytest.mark.parametrize("group", [["a"], 5, b"a", ("a",), True])
def test_a_label_that_is_no_text_is_refused_and_the_engine_lives(engine, group):
    """An unhashable one once ended the loop, and every request with it."""
    with pytest.raises(RequestError, match="group"):
        engine.generate(PROMPT, SamplingParams(max_new_tokens=1), group=group)
    with pytest.raises(RequestError, match="group"):
        engine.abort_group(group)
    [alive] = engine.generate(PROMPT, SamplingParams(max_new_tokens=3, temperature=0.0))
    assert alive.token_ids == (9, 10, 11)


def test_a_group_is_aborted_with_what_it_has(engine):
    """Partial outputs come back whole, with reason abort; a stranger goes on."""
    results: dict[str, list] = {}

    def ask(label: str | None) -> None:
        several = SamplingParams(max_new_tokens=300, ignore_eos=True, n=2)
        results[str(label)] = engine.generate([PROMPT, PROMPT], several, group=label)

    threads = [threading.Thread(target=ask, args=(label,)) for label in ("g", None)]
    events = engine.stream(PROMPT, LONG, group="g")
    next(events)  # it runs
    for thread in threads:
        thread.start()
    for _ in events:
        if engine.stats().num_running + engine.stats().num_waiting >= 9:
            break
    engine.abort_group("g")
    rest = list(events)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert rest[-1].finish_reason.type == "abort"
    assert {g.finish_reason.type for g in results["None"]} == {"length"}
    aborted = [g for g in results["g"] if g.finish_reason.type == "abort"]
    assert aborted
    for generation in results["g"]:
        count = len(generation.token_ids)
        assert count == len(generation.logprobs) == generation.usage.completion_tokens
        assert list(generation.token_ids) == [(9 + i) % 320 for i in range(count)]
