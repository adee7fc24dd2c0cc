"""What a waiting user sees: bars on standard error, and an engine that shows how it starts.

Owns the bars. They are gone when they are done, and there are none without a terminal, so standard
output holds results alone.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

import dovetail
from dovetail.cli.loading import load
from dovetail.core.client import EngineClient
from dovetail.core.process import RemoteEngine

LONG_SECONDS = 5.0
"""What took longer is worth a line where there is no terminal."""


def progress_bar() -> Progress:
    """Return a progress bar; enter it to show it."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,  # else results would go where the bar is
    )


@contextmanager
def starting_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show how an engine starts: yields what it takes as ``on_progress``.

    A bar for each thing that is done; without a terminal, a line for what took long.
    """
    progress = progress_bar()
    bars: dict[str, TaskID] = {}
    started: dict[str, float] = {}

    def on_progress(what: str, num_done: int, num_total: int) -> None:
        progress.start()  # not earlier: a download before it shows bars of its own
        if what not in bars:
            bars[what] = progress.add_task(what)
            started[what] = time.monotonic()
        progress.update(bars[what], completed=num_done, total=num_total)
        if num_done == num_total:
            taken = time.monotonic() - started[what]
            if progress.disable and taken > LONG_SECONDS:
                print(f"dovetail: {what}: {num_total} in {taken:.1f} s", file=sys.stderr)

    try:
        yield on_progress
    finally:
        progress.stop()


@contextmanager
def open_engine(options: dict[str, Any]) -> Iterator["dovetail.Engine"]:
    """Make an engine, show how it starts, and close it in the end."""
    with starting_bars() as on_progress:
        engine = load("dovetail.core.engine").Engine(on_progress=on_progress, **options)
    with engine:
        yield engine


def open_client(options: dict[str, Any]) -> EngineClient:
    """Start an engine in a process of its own, and show how it starts."""
    with starting_bars() as on_progress:
        return EngineClient(RemoteEngine(on_progress=on_progress, **options))
