"""Whatever crosses the border between two processes arrives as it was."""

import math

import msgspec
import numpy as np
import pytest

from dovetail.config.resolve import options_from, resolve
from dovetail.config.schema import EngineConfig, EngineOptions
from dovetail.errors import InvariantError
from dovetail.wire.capture import CapturedRows, CaptureSpan
from dovetail.wire.codec import FROM_ENGINE, TO_ENGINE
from dovetail.wire.control import Abort, AbortGroup, Admit, Close
from dovetail.wire.process import Ended, Events, Heartbeat, Loading, Ready, Refused, Start
from dovetail.wire.request import CaptureParams, LogprobParams, Request, SamplingParams
from dovetail.wire.result import FinishReason, Scores, TokenEvent, Usage
from dovetail.wire.status import EngineStats
from dovetail.wire.tensor import TensorEnvelope

REQUEST = Request(
    request_id=2**40,
    prompt_token_ids=(1, 2, 3),
    sampling=SamplingParams(
        max_new_tokens=7,
        temperature=0.7,
        top_p=0.1 + 0.2,
        logit_bias={5: -1e4, 0: 0.5},
        n=3,
        stop=("end", "\U0001f600"),
        stop_token_ids=(9,),
    ),
    seed=2**64 - 1,
    namespace=b"\x00\xff",
    logprobs=LogprobParams(kind="raw", logprob_start_len=0, token_ids_logprob=(4, 5)),
    group="a group",
    priority=-(2**31),
    capture=CaptureParams(columns=("tokens", "experts"), start_len=2, interval=5),
    label="mine",
)
STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    num_pages=3,
    num_free_pages=4,
    num_cached_pages=5,
    num_cached_tokens=2**40,
)
EVENT = TokenEvent(
    request_id=7,
    sample_index=2,
    token_ids=(1, 2),
    logprobs=(-0.1, -math.inf),
    epochs=(0, 1),
    scores=Scores(top_ids=((1, 2),), top_logprobs=((-0.5, -1.5),), id_logprobs=((-math.inf,),)),
    prompt_scores=Scores(logprobs=(-1 / 3,)),
    finish=FinishReason(type="stop", matched="end"),
    usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1, num_retractions=4),
    captured={
        "tokens": CapturedRows(
            start=2,
            rows=TensorEnvelope.pack(np.arange(6, dtype=np.int32).reshape(3, 2)),
            spans=(CaptureSpan(start=2, end=5, epoch=1, num_differing=1),),
        )
    },
)


@pytest.mark.parametrize(
    "message",
    [
        Start(b"\x00options"),
        Admit(REQUEST),
        Admit(msgspec.structs.replace(REQUEST, sampling=SamplingParams(stop="one"))),
        Abort(2**40),
        AbortGroup("\U0001f600"),
        Close(),
    ],
)
def test_messages_to_the_engine(message):
    assert TO_ENGINE.decode(TO_ENGINE.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Loading("loading weights", 1, 2**40),
        Ready(b"config", Heartbeat(0.25, STATS)),
        Refused("max_running", "is 0"),
        Refused(None, "MemoryError()"),
        Events(()),
        Events((EVENT, msgspec.structs.replace(EVENT, finish=FinishReason(type="length")))),
        Heartbeat(1e-9, STATS),
        Ended("because"),
    ],
)
def test_messages_from_the_engine(message):
    assert FROM_ENGINE.decode(FROM_ENGINE.encode(message)) == message


def test_a_matched_id_stays_a_number_and_an_array_an_array():
    event = msgspec.structs.replace(EVENT, finish=FinishReason(type="stop", matched=5))
    (got,) = FROM_ENGINE.decode(FROM_ENGINE.encode(Events((event,)))).events
    assert got.finish.matched == 5
    assert got.captured["tokens"].rows.unpack().tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    "frame",
    [b"", b"\xc1", msgspec.msgpack.encode({"type": "Nonsense"}), TO_ENGINE.encode(Close())[:-1]],
)
def test_what_is_no_message_is_a_bug(frame):
    for codec in (TO_ENGINE, FROM_ENGINE):
        with pytest.raises(InvariantError, match="no message"):
            codec.decode(frame)


def test_a_wrong_type_is_found_when_it_is_read():
    frame = TO_ENGINE.encode(Abort("7"))  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match="request_id"):
        TO_ENGINE.decode(frame)


def test_options_and_configuration_cross_too():
    options = options_from({"max_running": 3, "kv_memory": "64MiB"})
    config = resolve(options)
    for value, kind in ((options, EngineOptions), (config, EngineConfig)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value
