"""The public surface: every way of asking gives the same answer, and nothing is left behind."""

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import dovetail
from dovetail import Engine, Generation, SamplingParams
from tests.support.waiting import WAIT_SECONDS

GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
SEEDED = SamplingParams(temperature=1.0, max_new_tokens=12, sampling_seed=2**63 + 5)
PROMPT = [5, 6, 7, 8, 9]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine(qwen3_moe_folder: Path) -> Iterator[Engine]:
    with Engine(qwen3_moe_folder, page_size=4, max_running=16) as made:
        yield made


@pytest.fixture(scope="module")
def counter(fx_count_folder: Path) -> Iterator[Engine]:
    """Counts on from the last token; ids below 256 are bytes, 256 ends a text."""
    with Engine(fx_count_folder, page_size=4, context_len=400) as made:
        yield made


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the shared engines serve on and have all their pages."""
    yield
    for name in ("engine", "counter"):
        if name in request.fixturenames:
            check_alive(request.getfixturevalue(name))


def check_alive(engine: Engine) -> None:
    """A short request is answered, and then nothing runs, waits or holds a page.

    An endless request that somebody forgot to abort would still be running.
    """
    (generation,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_new_tokens=2))
    assert len(generation.token_ids) == 2
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


def ids(generations: list[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


# -- whole answers --------------------------------------------------------------------------


def test_a_mix_of_prompts_gives_a_flat_list_in_order(engine):
    prompts = ["text", PROMPT, CHAT, "more", [1]]
    together = engine.generate(prompts, GREEDY)
    assert ids(together) == [engine.generate([p], GREEDY)[0].token_ids for p in prompts]
    assert together[1].prompt_token_ids == tuple(PROMPT)
    assert together[0].prompt_token_ids == tuple(engine.tokenizer.encode("text"))
    for generation in together:
        usage = generation.usage
        assert usage.completion_tokens == len(generation.token_ids) == len(generation.logprobs)
        assert len(generation.weight_versions) == usage.completion_tokens
        assert usage.prompt_tokens == len(generation.prompt_token_ids) > usage.cached_tokens


def test_a_single_prompt_is_a_list_of_one(engine):
    for prompt in ("text", PROMPT, CHAT):
        assert len(engine.generate(prompt, GREEDY)) == 1


def test_parameters_may_differ_by_prompt(engine):
    lengths = [3, 0, 7]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]
    assert [len(t) for t in ids(engine.generate(["a", "b", "c"], params))] == lengths


def test_on_finish_sees_each_generation_as_it_ends(counter):
    seen: dict[int, list[Generation]] = {}
    lengths = [30, 1, 10]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]
    out = counter.generate([[1], [2], [3]], params, on_finish=seen.__setitem__)
    assert list(seen) == [1, 2, 0], "the shortest ends first"
    assert [generation for i in range(3) for generation in seen[i]] == out
    assert [len(generations) for generations in seen.values()] == [1, 1, 1]


def test_the_reported_seed_draws_the_same_tokens_again(engine):
    first = engine.generate([PROMPT] * 3, SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert len(set(ids(first))) == 3, "each had a seed of its own"
    params = [
        SamplingParams(max_new_tokens=12, ignore_eos=True, sampling_seed=generation.seed)
        for generation in first
    ]
    again = engine.generate([PROMPT] * 3, params)
    assert ids(again) == ids(first)
    for one, other in zip(again, first, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_partial_output_sent_again_goes_on_with_the_same_tokens(qwen3_moe_folder, depth, params):
    with Engine(qwen3_moe_folder, page_size=4, depth=depth) as engine:
        (whole,) = engine.generate(PROMPT, params)
        num_tokens = len(whole.token_ids)
        cuts = range(1, num_tokens)
        resumed = engine.generate(
            [[*PROMPT, *whole.token_ids[:k]] for k in cuts],
            [
                SamplingParams(
                    temperature=params.temperature,
                    sampling_seed=params.sampling_seed,
                    max_new_tokens=num_tokens - k,
                )
                for k in cuts
            ],
        )
    assert num_tokens > 5
    assert ids(resumed) == [whole.token_ids[k:] for k in cuts]


def test_captured_tokens_are_the_inputs_of_the_forwards(engine):
    for num in (0, 1, 9):
        params = SamplingParams(max_new_tokens=num, ignore_eos=True)
        (generation,) = engine.generate(PROMPT, params, capture=("tokens",))
        forwarded = [*PROMPT, *generation.token_ids][: len(PROMPT) + max(num - 1, 0)]
        assert generation.captured["tokens"].tolist() == forwarded
    assert engine.generate(PROMPT, GREEDY)[0].captured == {}


# -- how a generation ends ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "num_ids", "text", "finish"),
    [
        ({"stop": "f"}, 5, "bcde", ("stop", "f")),
        ({"stop": ["xyz", "ef"]}, 5, "bcd", ("stop", "ef")),
        ({"stop": "ef", "no_stop_trim": True}, 5, "bcdef", ("stop", "ef")),
        ({"stop": "nope"}, 8, "bcdefghi", ("length", None)),
        ({"stop": "ix"}, 8, "bcdefghi", ("length", None)),
        ({"stop_token_ids": [101]}, 4, "bcd", ("stop", 101)),
        ({"stop_token_ids": [101], "no_stop_trim": True}, 4, "bcde", ("stop", 101)),
        ({"max_new_tokens": 0}, 0, "", ("length", None)),
        ({"max_new_tokens": 1}, 1, "b", ("length", None)),
    ],
)
def test_a_stop_cuts_the_text_and_keeps_the_ids(counter, params, num_ids, text, finish):
    sampling = SamplingParams(**{"temperature": 0, "max_new_tokens": 8} | params)
    (generation,) = counter.generate("a", sampling)
    assert generation.token_ids == tuple(range(98, 98 + num_ids))
    assert len(generation.logprobs) == num_ids
    assert generation.text == text
    assert (generation.finish_reason.type, generation.finish_reason.matched) == finish


def test_end_of_sequence(counter):
    (ended,) = counter.generate([253], SamplingParams(temperature=0, max_new_tokens=6))
    assert ended.token_ids == (254, 255, 256)
    assert (ended.finish_reason.type, ended.finish_reason.matched) == ("stop", 256)
    (ignored,) = counter.generate(
        [253], SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    )
    assert ignored.token_ids == (254, 255, 256, 257, 258, 259)
    assert ignored.finish_reason.type == "length"


def test_without_a_length_the_context_is_the_end(fx_count_folder):
    with Engine(fx_count_folder, context_len=64) as engine:
        for prompt_len in (60, 63):
            (generation,) = engine.generate([1] * prompt_len)
            assert len(generation.token_ids) == 64 - prompt_len
            assert generation.finish_reason.type == "length"


# -- streams --------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("prompt", ["text", PROMPT, CHAT], ids=["text", "ids", "chat"])
def test_a_stream_adds_up_to_the_whole_answer(engine, prompt, params):
    (whole,) = engine.generate(prompt, params, capture=("tokens",))
    events = list(engine.stream(prompt, params, capture=("tokens",)))
    assert len({event.request_id for event in events}) == 1
    assert "".join(event.text for event in events) == whole.text
    assert tuple(t for event in events for t in event.token_ids) == whole.token_ids
    assert all(len(event.logprobs) == len(event.token_ids) for event in events)
    logprobs = [value for event in events for value in event.logprobs]
    assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert all(event.finish_reason is None and event.usage is None for event in events[:-1])
    last = events[-1]
    assert last.finish_reason == whole.finish_reason
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.captured["tokens"].tolist() == whole.captured["tokens"].tolist()
    assert len(events) >= len(whole.token_ids), "news comes token by token"


def test_streams_may_be_read_in_turn(engine):
    streams = [engine.stream(p, GREEDY) for p in ("a", "b", "c")]
    got = [[t for event in stream for t in event.token_ids] for stream in reversed(streams)]
    want = ids(engine.generate(["c", "b", "a"], GREEDY))
    assert list(map(tuple, got)) == want


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_a_stream_that_is_dropped_is_aborted(counter, num_read):
    stream = counter.stream([1], SamplingParams(max_new_tokens=390, ignore_eos=True))
    for _ in range(num_read):
        next(stream)
    del stream
    gc.collect()  # and ``clean`` sees that it does not run on


def test_a_stream_that_is_closed_is_aborted(counter):
    stream = counter.stream([1], SamplingParams(max_new_tokens=390, ignore_eos=True))
    next(stream)
    stream.close()
    assert list(stream) == []


# -- asyncio --------------------------------------------------------------------------------


def test_async_answers_are_the_same(engine):
    prompts = ["text", PROMPT, CHAT, "more"]
    want = engine.generate(prompts, SEEDED)

    async def ask() -> list[list[Generation]]:
        return await asyncio.gather(*(engine.agenerate(p, SEEDED) for p in prompts))

    async def read(prompt) -> tuple[str, tuple[int, ...]]:
        events = [event async for event in engine.astream(prompt, SEEDED)]
        text = "".join(event.text for event in events)
        return text, tuple(t for event in events for t in event.token_ids)

    async def read_all() -> list[tuple[str, tuple[int, ...]]]:
        return await asyncio.gather(*map(read, prompts))

    answers = asyncio.run(ask())
    assert [len(generations) for generations in answers] == [1] * len(prompts)
    assert ids([generation for (generation,) in answers]) == ids(want)
    assert asyncio.run(read_all()) == [(g.text, g.token_ids) for g in want]


def test_cancelling_a_task_aborts_its_request_alone(counter):
    params = SamplingParams(max_new_tokens=390, ignore_eos=True)

    async def main() -> Generation:
        has_begun = asyncio.Event()

        async def endless() -> None:
            async for _ in counter.astream([1], params):
                has_begun.set()

        tasks = [asyncio.create_task(endless()) for _ in range(3)]
        await asyncio.wait_for(has_begun.wait(), WAIT_SECONDS)
        waiting = asyncio.create_task(counter.agenerate([9], params))
        bystander = asyncio.create_task(counter.agenerate([7], GREEDY))
        await asyncio.sleep(0)  # let both send their requests
        for task in (*tasks, waiting):
            task.cancel()
        cancelled = await asyncio.gather(*tasks, waiting, return_exceptions=True)
        assert all(isinstance(c, asyncio.CancelledError) for c in cancelled)
        (generation,) = await bystander
        return generation

    assert asyncio.run(main()).token_ids == tuple(range(8, 20))


def test_leaving_an_async_loop_aborts(counter):
    async def main() -> None:
        params = SamplingParams(max_new_tokens=390, ignore_eos=True)
        async for _ in counter.astream([1], params):
            break

    asyncio.run(main())  # and ``clean`` sees that it does not run on


def test_a_request_is_aborted_if_its_event_loop_is_gone(counter):
    """Its client cannot be told any more; the engine goes on for the others."""
    event_loop = asyncio.new_event_loop()
    stream = counter.astream([1], SamplingParams(max_new_tokens=390, ignore_eos=True))
    event_loop.run_until_complete(anext(stream))
    event_loop.close()
    counter.generate([1], GREEDY)  # by now the loop has met the closed door
    check_alive(counter)
    with pytest.raises(StopIteration):
        stream.aclose().send(None)


# -- abort ----------------------------------------------------------------------------------


def test_abort_gives_what_there_is(counter):
    stream = counter.stream([1], SamplingParams(max_new_tokens=390, ignore_eos=True))
    events = [next(stream)]
    counter.abort(events[0].request_id)
    events += stream
    last = events[-1]
    token_ids = [t for event in events for t in event.token_ids]
    assert last.finish_reason.type == "abort"
    assert token_ids == [(2 + i) % 320 for i in range(len(token_ids))]
    assert 1 <= len(token_ids) == last.usage.completion_tokens < 390


def test_abort_of_what_is_not_there_is_no_news(engine):
    (event, *_) = list(engine.stream(PROMPT, GREEDY))
    for request_id in (event.request_id, event.request_id, -1, 10**30):
        engine.abort(request_id)
    for wrong in ("5", [5], None, 1.5):
        with pytest.raises(TypeError):
            engine.abort(wrong)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_within_generate_aborts_what_is_open(counter, error):
    def interrupt(index: int, generations: list[Generation]) -> None:
        raise error

    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (1, 390, 390)]
    with pytest.raises(error):
        counter.generate([[1], [2], [3]], params, on_finish=interrupt)


# -- cache ----------------------------------------------------------------------------------


def test_a_second_turn_finds_the_first_in_the_cache(fx_count_folder):
    params = SamplingParams(temperature=0, max_new_tokens=10)
    with Engine(fx_count_folder, page_size=4) as engine:
        (first,) = engine.generate(CHAT, params)
        messages = [
            *CHAT,
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "and?"},
        ]
        (second,) = engine.generate(messages, params)
        seen = len(first.prompt_token_ids) + len(first.token_ids) - 1
        assert second.prompt_token_ids[: seen + 1] == first.prompt_token_ids + first.token_ids
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens == seen // 4 * 4
        assert engine.stats().num_cached_tokens == second.usage.cached_tokens


def test_without_a_prefix_cache_nothing_is_cached(fx_count_folder):
    with Engine(fx_count_folder, prefix_cache=False, page_size=1) as engine:
        for _ in range(2):
            (generation,) = engine.generate(CHAT, GREEDY)
            assert generation.usage.cached_tokens == 0
        stats = engine.stats()
        assert stats.num_cached_pages == 0 and stats.num_free_pages == stats.num_pages


def test_generate_queues_whatever_it_is_given(fx_count_folder):
    """The limit on who may wait is for engines that are served."""
    with Engine(fx_count_folder, max_running=2, max_queued=1) as engine:
        got = engine.generate([[i] for i in range(200)], SamplingParams(max_new_tokens=0))
    assert [generation.prompt_token_ids for generation in got] == [(i,) for i in range(200)]


# -- threads, lanes, several engines --------------------------------------------------------


def test_many_client_threads(engine):
    prompts = [[i, i + 1, i + 2] for i in range(24)]
    want = ids(engine.generate(prompts, SEEDED))
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda p: engine.generate(p, SEEDED)[0].token_ids, prompts))
    assert got == want


def test_threaded_lanes_give_the_same(engine, qwen3_moe_folder):
    prompts = [[i, i + 1, i + 2] for i in range(6)]
    with Engine(qwen3_moe_folder, page_size=4, lanes="threaded") as threaded:
        got = threaded.generate(prompts, SEEDED, capture=("tokens",))
        check_alive(threaded)
    want = engine.generate(prompts, SEEDED, capture=("tokens",))
    assert ids(got) == ids(want)
    for one, other in zip(got, want, strict=True):
        assert one.captured["tokens"].tolist() == other.captured["tokens"].tolist()


def test_two_engines_in_one_process(engine, counter, qwen3_moe_folder):
    want = ids(engine.generate([PROMPT], SEEDED))
    with (
        Engine(qwen3_moe_folder, page_size=16, depth=0) as other,
        ThreadPoolExecutor(3) as pool,
    ):
        jobs = [pool.submit(made.generate, [PROMPT], SEEDED) for made in (engine, other) * 3]
        counted = pool.submit(counter.generate, [[7]], GREEDY)
        assert [ids(job.result(WAIT_SECONDS)) for job in jobs] == [want] * 6
        assert ids(counted.result(WAIT_SECONDS)) == [tuple(range(8, 20))]


def test_all_public_names_are_there():
    for name in dovetail.__all__:
        assert getattr(dovetail, name) is not None
    assert set(dovetail.__all__) <= set(dir(dovetail))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        dovetail.nothing  # noqa: B018
