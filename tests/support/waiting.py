"""Waits with an end: what does not come true, or does not return, fails a test in a minute."""

import threading
import time
from collections.abc import Callable

WAIT_SECONDS = 60


def until(condition: Callable[[], bool], *, seconds: float = WAIT_SECONDS) -> None:
    """Wait for something that must come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def in_time(*calls: Callable[[], object]) -> list[object]:
    """Call all at once, each in a thread, and return results or errors; a hang is a failure."""
    outcomes: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            outcomes[index] = calls[index]()
        except BaseException as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive(), "hangs"
    return outcomes
