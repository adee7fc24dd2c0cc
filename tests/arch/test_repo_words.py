"""The repository speaks of the product alone: no machine's paths, no package index."""

import re
import subprocess
from pathlib import Path

from tests.arch.sources import ROOT

SUFFIXES = {"", ".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".jinja", ".cfg", ".sh"}
SKIPPED_FOLDERS = {".git", ".venv", "build", "dist"}  # of the root

PATTERNS = {
    "absolute path of a machine": re.compile(
        r"(?<![\w./-])/(?:home|root|Users|work|mnt|scratch|workspace)/[\w.]"
    ),
    "address of a package index": re.compile(
        r"https?://[\w.-]*(?:pypi|pythonhosted|pytorch\.org/whl|anaconda\.org|artifactory)"
    ),
}


def text_files() -> list[Path]:
    """Files that git tracks or would track; without git, every file outside builds and caches."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [
            path
            for path in ROOT.rglob("*")
            if path.relative_to(ROOT).parts[0] not in SKIPPED_FOLDERS
        ]
    return [path for path in sorted(paths) if path.is_file() and path.suffix in SUFFIXES]


def faults(text: str) -> list[str]:
    found: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        for what, pattern in PATTERNS.items():
            if pattern.search(line):
                found.append(f"line {number}: {what}")
    return found


def test_files_name_no_machine_and_no_index() -> None:
    own = Path(__file__).resolve()
    found = {
        str(path.relative_to(ROOT)): lines
        for path in text_files()
        if path != own and (lines := faults(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert found == {}


def test_the_patterns_find_what_they_forbid() -> None:
    assert faults("see /home/alice/notes")
    assert faults('cache = "/root/.cache/x"')
    assert faults("pip install --index-url https://pypi.example.org/simple torch")
    assert faults("--index-url https://download.pytorch.org/whl/cpu")
    assert not faults("POST http://127.0.0.1:30000/generate")
    assert not faults("docs/home/page.md and src/work/x")
