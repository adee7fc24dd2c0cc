"""Frames arrive in order, sending never waits, and a peer that is gone is noticed."""

import os
import threading
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

from dovetail.core.link import Link

WAIT_SECONDS = 60


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    ours, theirs = (Link(connection, lambda: True) for connection in Pipe())
    yield ours, theirs
    for link in (ours, theirs):
        link.close(WAIT_SECONDS)


def test_frames_arrive_whole_and_in_order(ends):
    ours, theirs = ends
    frames = [bytes([i % 256]) * i for i in range(1, 400)] + [os.urandom(2_000_000)]
    for frame in frames:
        ours.send(frame)
        theirs.send(frame)
    assert [theirs.receive() for _ in frames] == frames
    assert [ours.receive() for _ in frames] == frames


def test_to_send_never_waits_for_a_peer_that_does_not_read(ends):
    """A socket buffers some hundred kilobytes; a sender that wrote by itself would hang here."""
    ours, theirs = ends
    frame = os.urandom(1_000_000)
    for _ in range(50):
        ours.send(frame)
    ours.finish(0.0)  # it is not done, and does not wait either
    assert [theirs.receive() for _ in range(50)] == [frame] * 50


def test_what_is_queued_is_sent_before_the_end(ends):
    ours, theirs = ends
    for i in range(10):
        ours.send(bytes([i]))
    ours.close(WAIT_SECONDS)
    assert [theirs.receive() for _ in range(10)] == [bytes([i]) for i in range(10)]
    with pytest.raises(EOFError):
        theirs.receive()


def test_to_send_to_a_peer_that_is_gone_is_no_error(ends):
    ours, theirs = ends
    theirs.close(WAIT_SECONDS)
    for _ in range(3):
        ours.send(b"hello")
    with pytest.raises(EOFError):
        ours.receive()


def test_a_peer_that_is_gone_is_noticed_though_its_end_is_held_open(monkeypatch):
    """As by a process that it has forked. What it sent before is received first."""
    monkeypatch.setattr("dovetail.core.link.LOOK_SECONDS", 0.01)
    our_end, their_end = Pipe()
    is_alive = threading.Event()
    is_alive.set()
    ours = Link(our_end, is_alive.is_set)
    their_end.send_bytes(b"last words")
    is_alive.clear()
    assert ours.receive() == b"last words"
    with pytest.raises(EOFError, match="has ended"):
        ours.receive()
    ours.close(WAIT_SECONDS)
    their_end.close()
