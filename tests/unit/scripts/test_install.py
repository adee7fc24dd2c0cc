"""``scripts/install``: whatever ends it, nothing goes on writing into .venv."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import is_running
from tests.support.waiting import until

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_it_ends_pip_and_all_that_pip_started(copy: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "scripts/install"],
        cwd=copy,
        env={**os.environ, "TORCH_SPEC": "torch"},
        stdout=subprocess.PIPE,
        text=True,
    )
    until((copy / "child").exists, seconds=WAIT_S)
    child = int((copy / "child").read_text())
    try:
        assert is_running(child)
        process.send_signal(number)
        process.send_signal(number)
        said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 128 + number
        assert said.endswith("Interrupted; the next run starts afresh.\n") and "failed" not in said
        until(lambda: not is_running(child), seconds=WAIT_S)
        assert not (copy / ".venv" / "installed.json").exists()
    finally:
        for process_id in (process.pid, child):
            if is_running(process_id):
                os.kill(process_id, signal.SIGKILL)
