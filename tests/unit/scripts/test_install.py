"""``scripts/install``: whatever ends it, nothing goes on writing into .venv."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WAIT_S = 30
PIP = """\
#!/bin/sh
sleep 300 &
echo $! > child.draft
mv child.draft child
wait
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A repository whose environment is there, and whose pip only sleeps."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "install", tmp_path / "scripts")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP)
    python.chmod(0o755)
    (tmp_path / ".venv" / "installed.json").write_text(json.dumps({"python": sys.version}))
    return tmp_path


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lives(process_id: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_it_ends_pip_and_all_that_pip_started(copy: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "scripts/install"],
        cwd=copy,
        env={**os.environ, "TORCH_SPEC": "torch"},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until((copy / "child").exists)
    child = int((copy / "child").read_text())
    try:
        assert lives(child)
        process.send_signal(number)
        process.send_signal(number)
        said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 128 + number
        assert said.endswith("Interrupted; the next run starts afresh.\n") and "failed" not in said
        wait_until(lambda: not lives(child))
        assert not (copy / ".venv" / "installed.json").exists()
    finally:
        for process_id in (process.pid, child):
            if lives(process_id):
                os.kill(process_id, signal.SIGKILL)
