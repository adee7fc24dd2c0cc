"""Slow imports of the command line: an interrupt meanwhile is quiet, later ones are as before."""

import os
import signal
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[3] / "src"

SLOW = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


def run(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "slow.py").write_text(SLOW)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_an_interrupt_of_an_import_ends_the_process_without_a_word(tmp_path: Path) -> None:
    done = run(tmp_path, "from dovetail.cli.loading import load; load('slow'); print('went on')")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    done = run(tmp_path, "import slow")
    assert "Traceback" in done.stderr, "this is what users would see otherwise"


def test_after_it_an_interrupt_is_an_exception_again(tmp_path: Path) -> None:
    code = "from dovetail.cli.loading import load; load('json'); import slow"
    assert "KeyboardInterrupt" in run(tmp_path, code).stderr


def test_an_interrupt_while_python_ends_is_quiet_too(tmp_path: Path) -> None:
    """Libraries have much to take down then, and their destructors print what interrupts them."""
    late = "import atexit; atexit.register(lambda: __import__('slow')); "
    done = run(tmp_path, late + "from dovetail.cli import main; main(['--version'])")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
    assert done.stdout.startswith("dovetail ")
    assert "Traceback" in run(tmp_path, late).stderr, "this is what users would see otherwise"
