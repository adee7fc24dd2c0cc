"""What a result was measured on, and whether plots can be drawn there."""

import importlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any


def describe() -> dict[str, Any]:
    """Return machine, versions, commit and command."""
    return {
        "device": _cpu_name(),
        "versions": {name: _version(name) for name in ("dovetail", "torch", "transformers")}
        | {"python": platform.python_version()},
        "commit": _commit(),
        "command": " ".join(["python", *sys.argv]),
    }


def load_plots(*, wanted: bool) -> ModuleType | None:
    """Return the module that draws, or None if it is not wanted; ends if it is and cannot be."""
    if not wanted:
        return None
    try:
        return importlib.import_module("r3.plots")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"plots need {error.name}: pip install 'dovetail[examples]', or leave out --plots"
        ) from None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
