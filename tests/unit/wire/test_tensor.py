"""An array crosses in the pieces that it came in, uncopied, and is whole where it is read."""

import numpy as np
import pytest

from dovetail.wire.capture import CapturedRows
from dovetail.wire.codec import FROM_ENGINE
from dovetail.wire.process import Events
from dovetail.wire.result import TokenEvent
from dovetail.wire.tensor import TensorEnvelope

ROWS = np.arange(24, dtype=np.uint16).reshape(6, 2, 2)


def sent(envelope: TensorEnvelope) -> TensorEnvelope:
    """The envelope as the front end gets it from an engine in another process."""
    captured = {"experts": CapturedRows(start=0, rows=envelope)}
    event = TokenEvent(request_id=0, token_ids=(), logprobs=(), epochs=(), captured=captured)
    message = FROM_ENGINE.decode(FROM_ENGINE.encode(Events((event,))))
    assert isinstance(message, Events) and message.events[0].captured is not None
    return message.events[0].captured["experts"].rows


@pytest.mark.parametrize("cuts", [[], [2], [1, 1, 5], [0, 6]])
@pytest.mark.parametrize("travel", [lambda envelope: envelope, sent])
def test_pieces_are_one_array_to_the_reader(cuts, travel):
    pieces = np.split(ROWS, cuts)
    envelope = travel(TensorEnvelope.pack(*pieces))
    assert envelope.shape == ROWS.shape and len(envelope.pieces) == len(pieces)
    got = envelope.unpack()
    assert got.dtype == ROWS.dtype and not got.flags.writeable
    np.testing.assert_array_equal(got, ROWS)


@pytest.mark.parametrize("travel", [lambda envelope: envelope, sent])
def test_no_rows_have_a_shape_nevertheless(travel):
    got = travel(TensorEnvelope.pack(ROWS[:0])).unpack()
    assert got.shape == (0, 2, 2) and got.dtype == ROWS.dtype


def test_nothing_is_copied_before_it_is_read():
    pieces = np.split(ROWS, [2])
    envelope = TensorEnvelope.join([TensorEnvelope.pack(piece) for piece in pieces])
    held = [np.frombuffer(piece, dtype=np.uint8) for piece in envelope.pieces]
    assert [np.shares_memory(*pair) for pair in zip(held, pieces, strict=True)] == [True, True]
    np.testing.assert_array_equal(envelope.unpack(), ROWS)


def test_of_several_axes_the_first_is_joined():
    envelope = TensorEnvelope.join([TensorEnvelope.pack(ROWS), TensorEnvelope.pack(ROWS[1:2])])
    np.testing.assert_array_equal(envelope.unpack(), np.concatenate([ROWS, ROWS[1:2]]))
