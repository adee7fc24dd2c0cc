"""What a waiting user sees: bars on standard error, and an engine that shows its loading.

Owns the bars. They are gone when they are done, and there are none without a terminal, so standard
output and logs hold results alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import dovetail
from dovetail.cli.loading import load
from dovetail.core.client import EngineClient
from dovetail.core.process import RemoteEngine


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
def loading_bar() -> Iterator[Callable[[int, int], None]]:
    """Show how weights load: yields what an engine takes as ``on_progress``."""
    progress = progress_bar()
    task = progress.add_task("loading weights", total=None)

    def on_progress(done: int, total: int) -> None:
        progress.start()  # not earlier: a download before it shows bars of its own
        progress.update(task, completed=done, total=total)

    try:
        yield on_progress
    finally:
        progress.stop()


@contextmanager
def open_engine(options: dict[str, Any]) -> Iterator["dovetail.Engine"]:
    """Make an engine, show how its weights load, and close it in the end."""
    with loading_bar() as on_progress:
        engine = load("dovetail.core.engine").Engine(on_progress=on_progress, **options)
    with engine:
        yield engine


def open_client(options: dict[str, Any]) -> EngineClient:
    """Start an engine in a process of its own, and show how its weights load."""
    with loading_bar() as on_progress:
        return EngineClient(RemoteEngine(on_progress=on_progress, **options))
