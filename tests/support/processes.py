"""Processes that a test starts: where they find the package, and whether one still runs."""

import os
from pathlib import Path

import dovetail


def environment() -> dict[str, str]:
    """Variables for a process that is to import the package under test."""
    return {**os.environ, "PYTHONPATH": str(Path(dovetail.__file__).parents[1])}


def is_running(process_id: int) -> bool:
    """Whether there is such a process that is no zombie."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"
