"""How an engine ends: closed, failed, or with its process. Nobody is left waiting."""

import asyncio
import subprocess
import sys

import pytest

from dovetail import Engine, EngineClosed, SamplingParams
from tests.support.processes import environment
from tests.support.waiting import in_time

GREEDY = SamplingParams(temperature=0, max_new_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_new_tokens=1000, ignore_eos=True)


def test_a_closed_engine_says_so(fx_count_folder):
    with Engine(fx_count_folder) as engine:
        engine.generate([1], GREEDY)
    engine.close()
    for ask in (
        lambda: engine.generate([1], GREEDY),
        lambda: engine.stream([1], GREEDY),
        lambda: asyncio.run(engine.agenerate([1], GREEDY)),
    ):
        with pytest.raises(EngineClosed, match="has been closed"):
            ask()
    engine.abort(1)
    assert engine.stats().num_running == 0


def test_close_answers_who_waits(fx_count_folder):
    engine = Engine(fx_count_folder, max_running=1)
    streams = [engine.stream([i], ENDLESS) for i in (1, 2)]
    next(streams[0])
    in_time(engine.close)
    first, second = (list(stream) for stream in streams)
    assert first[-1].finish_reason.type == second[-1].finish_reason.type == "abort"
    assert second[-1].usage.completion_tokens == 0
    stats = engine.stats()
    assert stats.num_free_pages + stats.num_cached_pages == stats.num_pages


@pytest.mark.parametrize("lanes", ["inline", "threaded"])
def test_a_failing_loop_leaves_nobody_waiting(fx_count_folder, lanes, monkeypatch):
    engine = Engine(fx_count_folder, max_running=2, lanes=lanes)
    submit, num_steps = engine.port.loop.executor.submit, 0

    def fail_in_step_5(plan):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise ZeroDivisionError("injected")
        return submit(plan)

    monkeypatch.setattr(engine.port.loop.executor, "submit", fail_in_step_5)
    stream = engine.stream([1], ENDLESS)  # two run at once, the others wait or come too late
    errors = in_time(
        lambda: engine.generate([[2], [3]], ENDLESS),
        lambda: asyncio.run(engine.agenerate([4], ENDLESS)),
        lambda: list(stream),
        lambda: engine.generate([5], ENDLESS),
    )
    for error in errors:
        assert isinstance(error, EngineClosed) and "injected" in str(error)
    with pytest.raises(EngineClosed, match="injected"):
        engine.generate([1], GREEDY)
    in_time(engine.close)


def test_a_failure_on_a_lane_is_a_device_error(fx_count_folder, monkeypatch):
    engine = Engine(fx_count_folder, lanes="threaded")
    monkeypatch.setattr(engine.port.loop.executor._runner._model, "hidden", lambda context: 1 / 0)
    (error,) = in_time(lambda: engine.generate([1], GREEDY))
    assert isinstance(error, EngineClosed) and "DeviceError" in str(error)
    in_time(engine.close)


LEAVE = """
import sys, dovetail
params = dovetail.SamplingParams(max_new_tokens=1000, ignore_eos=True)
engine = dovetail.Engine(sys.argv[1])
stream = engine.stream([1], params)
print(next(stream).token_ids)
"""


def test_python_may_exit_while_an_engine_runs(fx_count_folder):
    """A loop thread that is killed within torch would abort the process."""
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, str(fx_count_folder)],
        env=environment(),
        capture_output=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"(2,)\n", b"")


FORK = """
import asyncio, os, sys, threading, dovetail
folder, process_id = sys.argv[1], os.getpid()
engine = dovetail.Engine(folder)
params = dovetail.SamplingParams(max_new_tokens=2)
endless = dovetail.SamplingParams(max_new_tokens=1000, ignore_eos=True)
stream, read_out = (engine.stream([1], endless) for _ in range(2))
loop = asyncio.new_event_loop()
astream = engine.astream([1], endless)
next(stream), loop.run_until_complete(anext(astream))

def fork_and_go_on(index, generations):
    if os.getpid() == process_id and index == 0 and os.fork() == 0:
        threading.Timer(30, os._exit, [1]).start()
        asked.set()

asked = threading.Event()  # in the child: the calls below that wait for what the parent began
try:
    engine.generate([[1]] * 2, [params, endless], on_finish=fork_and_go_on)
except dovetail.EngineClosed as error:
    assert asked.is_set()
    print(error)
if os.getpid() != process_id:
    calls = (
        lambda: engine.generate([1], params),
        lambda: engine.stream([1], params),
        lambda: engine.refit({}),
        lambda: next(stream),
        lambda: list(read_out),
        lambda: loop.run_until_complete(anext(astream)),
    )
    for call in calls:
        try:
            call()
        except dovetail.EngineClosed as error:
            print(error)
    print(engine.health().state, flush=True)
    engine.close()
    os._exit(0)
os.wait()
print(process_id, engine.generate([1], params)[0].token_ids, next(stream).token_ids != ())
"""


def test_a_fork_is_told_that_the_engine_is_not_its_own(fx_count_folder):
    """The loop's thread is not forked: a child that waited, or asked, would wait for ever."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, str(fx_count_folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    *errors, state, answer = done.stdout.splitlines()
    process_id, rest = answer.split(maxsplit=1)
    assert rest == "(2, 3) True", "the parent goes on"
    assert len(errors) == 7 and state == "dead"
    for error in errors:
        assert error.startswith(f"the engine is process {process_id}'s, and this is a fork of it;")
