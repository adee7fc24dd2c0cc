"""What becomes of an engine's process when its front end dies or exits, and of a front end's fork.

Here each front end is a script in a process of its own.
"""

import signal
import subprocess
import sys

import pytest

from tests.support.processes import environment, is_running
from tests.support.waiting import until

LOSE_PARENT = """
import os, signal
from dovetail.core.client import EngineClient
from dovetail.core.process import RemoteEngine
from dovetail.wire.request import SamplingParams

engine = RemoteEngine()
client = EngineClient(engine)
params = SamplingParams(max_new_tokens=1000, ignore_eos=True)
engine.start(client.requests.make([1], params), lambda news: None)
print(engine.process_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

LEAVE = """
from dovetail.core.process import RemoteEngine

print(RemoteEngine().process_id)
"""

FORK = """
import asyncio, os, sys, threading, time
from dovetail.core.client import EngineClient
from dovetail.core.process import RemoteEngine
from dovetail.errors import EngineClosed
from dovetail.wire.request import SamplingParams

engine = RemoteEngine()
client = EngineClient(engine)
endless = client.requests.make([1], SamplingParams(max_new_tokens=1000, ignore_eos=True))
short = [client.requests.make([1], SamplingParams(max_new_tokens=2)) for _ in range(2)]
loop = asyncio.new_event_loop()
begun = client.events(endless)
loop.run_until_complete(anext(begun))
stand = client._newsstands[loop]
# Other threads may have them at that moment.
with engine._process._waitpid_lock, engine._outbox._lock, stand._lock:
    child = os.fork()
if child == 0:
    threading.Timer(30, os._exit, [1]).start()
    for events in (begun, client.events(short[0])):
        try:
            loop.run_until_complete(anext(events))
        except EngineClosed as error:
            print(error)
    print(client.health().state, flush=True)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 1
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
print(os.getpid(), loop.run_until_complete(anext(client.events(short[1]))).token_ids != ())
"""


def test_a_fork_is_told_that_the_engine_is_not_its_own():
    """Nobody reads the connection there; and what a fork closes is nobody else's engine."""
    words = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    *errors, state, answer = done.stdout.splitlines()
    process_id, rest = answer.split()
    assert rest == "True" and state == "dead" and len(errors) == 2
    for error in errors:
        assert error.startswith(f"the engine is process {process_id}'s, and this is a fork of it;")


@pytest.mark.parametrize(
    ("script", "code"), [(LOSE_PARENT, -signal.SIGKILL), (LEAVE, 0)], ids=["killed", "exits"]
)
def test_a_process_does_not_outlive_its_front_end(script, code):
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (code, b"")
    process_id = int(done.stdout)
    until(lambda: not is_running(process_id), seconds=2)
