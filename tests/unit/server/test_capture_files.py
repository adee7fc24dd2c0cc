"""Slots of capture files: nobody's rows are written over, and nothing is left behind."""

import os
import re
import resource
import secrets
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dovetail.errors import CapacityError, ConfigError, RequestError
from dovetail.server.capture_files import (
    ALIGNMENT,
    MAX_FILES,
    MAX_SLOTS,
    CaptureFile,
    CaptureFolder,
    Handover,
)
from dovetail.wire.capture import FileSlot, RowTransport

ROW_BYTES = {"experts": 5000, "tokens": 40}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CaptureFolder]:
    num_open = len(os.listdir("/proc/self/fd"))
    made = CaptureFolder(tmp_path / "files")
    yield made
    made.close()
    assert not (tmp_path / "files").exists()
    assert len(os.listdir("/proc/self/fd")) == num_open, "a file is still open"


@pytest.fixture
def file(folder: CaptureFolder) -> CaptureFile:
    return folder.register(2, ROW_BYTES)


def rows(seed: int, num: int = 100) -> dict[str, NDArray[np.generic]]:
    """Columns of a generation; no two seeds have equal ones."""
    rng = np.random.default_rng(seed)
    return {
        "experts": rng.integers(0, 255, (num, 5, 2), dtype=np.uint8),
        "tokens": rng.integers(0, 2000, 10, dtype=np.int32),
    }


def placed(file: CaptureFile, seed: int) -> tuple[Handover, RowTransport, dict[str, int]]:
    handover = Handover(file)
    placement = handover.place(rows(seed))
    return handover, placement.transport, placement.offsets


def slot_of(transport: RowTransport) -> FileSlot:
    assert transport.slot is not None and transport.generation is not None
    return FileSlot(slot=transport.slot, generation=transport.generation)


def check_rows(file: CaptureFile, seed: int, offsets: dict[str, int]) -> None:
    data = np.memmap(file.info.path, dtype=np.uint8, mode="r")
    for name, want in rows(seed).items():
        begin = offsets[name]
        assert begin % ALIGNMENT == 0
        np.testing.assert_array_equal(
            data[begin : begin + want.nbytes].view(want.dtype).reshape(want.shape), want
        )


# -- slots ---------------------------------------------------------------------------------


def test_rows_are_where_they_are_said_to_be(file: CaptureFile) -> None:
    found = [placed(file, seed) for seed in range(2)]
    for seed, (_, transport, offsets) in enumerate(found):
        check_rows(file, seed, offsets)
        assert offsets["experts"] == slot_of(transport).slot * file.info.slot_bytes
    assert file.info.slot_bytes == 3 * ALIGNMENT
    assert os.path.getsize(file.info.path) == 2 * file.info.slot_bytes


def test_a_slot_is_taken_again_only_when_it_has_been_acknowledged(file: CaptureFile) -> None:
    found = [placed(file, seed) for seed in range(2)]
    for handover, _, _ in found:
        handover.sent()
        handover.close()
    _, transport, offsets = placed(file, 2)
    assert (transport.type, transport.reason) == ("inline", "no slot of the file is free")
    assert offsets == {}
    file.free([slot_of(found[1][1])])
    _, transport, offsets = placed(file, 3)
    assert slot_of(transport) == FileSlot(slot=slot_of(found[1][1]).slot, generation=2)
    check_rows(file, 3, offsets)
    check_rows(file, 0, found[0][2])


@pytest.mark.parametrize(
    ("slots", "field", "words"),
    [
        ([(0, 1)], "slots[0].generation", "is 1 of slot 0, whose generation is 2"),
        ([(1, 1), (0, 3)], "slots[1].generation", "is 3 of slot 0, whose generation is 2"),
        ([(0, 2), (2, 1)], "slots[1].slot", "is 2; the file has 2 slots"),
        ([(-1, 1)], "slots[0].slot", "is -1"),
        ([(1, 1), (1, 1)], "slots", "twice"),
    ],
)
def test_a_wrong_acknowledgement_frees_nothing(
    file: CaptureFile, slots: list[tuple[int, int]], field: str, words: str
) -> None:
    placed(file, 0)[0].close()  # slot 0 is given up, and is then of the second generation
    for seed in (1, 2):
        placed(file, seed)[0].sent()
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        file.free([FileSlot(slot=slot, generation=generation) for slot, generation in slots])
    assert caught.value.field == field
    assert placed(file, 3)[1].type == "inline", "all slots are still the client's"
    file.free([FileSlot(slot=0, generation=2), FileSlot(slot=1, generation=1)])
    with pytest.raises(RequestError, match="free or being written"):
        file.free([FileSlot(slot=0, generation=2)])


def test_a_reply_that_is_not_sent_leaves_no_slot(file: CaptureFile) -> None:
    for seed in range(5):
        handover = Handover(file)
        assert {handover.place(rows(seed)).transport.type for _ in range(2)} == {"file"}
        handover.close()
        handover.close()
    sent, _, _ = placed(file, 5)
    sent.sent()
    assert sent.place(rows(6)).transport.type == "file"
    sent.close()  # the second was not sent
    assert placed(file, 7)[1].type == "file"
    assert placed(file, 8)[1].type == "inline"


class SlowColumns(dict[str, Any]):
    """Columns whose writing begins, and goes on when it is told to."""

    def __init__(self) -> None:
        super().__init__(rows(9))
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def items(self) -> Any:
        self.begun.set()
        assert self.goes_on.wait(20)
        return super().items()


@pytest.mark.parametrize("what", ["reply", "file"])
def test_what_is_given_up_while_it_is_written_hurts_nobody(
    folder: CaptureFolder, file: CaptureFile, what: str
) -> None:
    handover, columns = Handover(file), SlowColumns()
    writer = threading.Thread(target=handover.place, args=(columns,))
    writer.start()
    assert columns.begun.wait(20)
    if what == "reply":
        handover.close()
        taken = [placed(file, seed)[1].type for seed in (0, 1)]
        assert taken == ["file", "inline"], "the slot that is being written is not free"
        columns.goes_on.set()
        writer.join()
        assert placed(file, 2)[1].type == "file"
        return
    folder.end(file)
    with open(os.devnull, "rb"):  # would get the number of a file that was closed too early
        columns.goes_on.set()
        writer.join()
    assert placed(file, 0)[1] == RowTransport(
        type="inline", reason="the file's registration has ended"
    )


def test_a_full_memory_is_a_reason(file: CaptureFile) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        _, transport, _ = placed(file, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert transport.type == "inline" and "cannot be written" in (transport.reason or "")
    assert [placed(file, seed)[1].type for seed in (1, 2)] == ["file", "file"]


# -- files ---------------------------------------------------------------------------------


def test_files_are_the_owners_alone_and_go_with_their_client(
    folder: CaptureFolder, file: CaptureFile
) -> None:
    path = Path(file.info.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    _, _, offsets = placed(file, 0)
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    folder.end(file)
    assert not path.exists()
    want = rows(0)["tokens"].tobytes()
    assert mapped[offsets["tokens"] :][: len(want)].tobytes() == want, "who mapped it keeps it"


def test_a_name_is_no_path(folder: CaptureFolder, file: CaptureFile) -> None:
    name, path = file.info.capture_file, Path(file.info.path)
    assert folder.find(name) is file
    for other in ("", ".", "..", str(path), f"../{path.parent.name}/{name}", f"./{name}", "\0"):
        with pytest.raises(RequestError, match="capture_file: is no registered file"):
            folder.find(other)
    folder.end(file)
    with pytest.raises(RequestError, match="no registered file"):
        folder.find(name)


def test_files_and_slots_are_bounded(folder: CaptureFolder) -> None:
    for num_slots in (0, -1, MAX_SLOTS + 1):
        with pytest.raises(RequestError, match=f"num_slots: is {num_slots}; the legal range is 1"):
            folder.register(num_slots, ROW_BYTES)
    files = [folder.register(1, ROW_BYTES) for _ in range(MAX_FILES)]
    with pytest.raises(CapacityError, match="64 clients"):
        folder.register(1, ROW_BYTES)
    folder.end(files[3])
    assert folder.register(1, ROW_BYTES)


def test_a_file_for_which_there_is_no_room_leaves_nothing_open(folder: CaptureFolder) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for _ in range(3):
            with pytest.raises(CapacityError, match="cannot be made"):
                folder.register(1, ROW_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert folder.register(1, ROW_BYTES)


# -- the folder ------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from dovetail.server.capture_files import CaptureFolder
folder = CaptureFolder(Path(sys.argv[1]))
folder.register(4, {"experts": 100})
print("made", flush=True)
signal.pause()
"""


def test_what_a_killed_server_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    src = Path(__file__).resolve().parents[3] / "src"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(src)},
    )
    assert process.stdout is not None and process.stdout.readline() == b"made\n"
    [theirs] = tmp_path.iterdir()
    (tmp_path / "dovetail-capture-note").write_text("a file of the user's")
    (tmp_path / "dovetail-capture-link").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    first = CaptureFolder(tmp_path)
    assert len(list(theirs.iterdir())) == 1, "its server lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    second = CaptureFolder(tmp_path)
    assert not theirs.exists()
    assert len(list(tmp_path.glob("dovetail-capture-*"))) == 4
    first.close()
    second.close()
    assert {path.name for path in tmp_path.iterdir()} == {
        "dovetail-capture-note", "dovetail-capture-link", "other",
    }  # fmt: skip


def test_servers_that_start_together_each_have_a_folder(tmp_path: Path) -> None:
    folders: list[CaptureFolder] = []
    threads = [
        threading.Thread(target=lambda: folders.append(CaptureFolder(tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == len(list(tmp_path.iterdir())) == 8
    for made in folders:
        made.close()


def test_a_folder_that_was_made_for_it_goes_with_its_maker(tmp_path: Path) -> None:
    first = CaptureFolder(tmp_path / "made" / "here")
    second = CaptureFolder(tmp_path / "made" / "here")
    second.close()
    assert (tmp_path / "made" / "here").exists(), "somebody else's"
    first.close()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "kept").mkdir()
    CaptureFolder(tmp_path / "kept").close()
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_folder_whose_parent_goes_in_between_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a server that ends."""
    parent, token_hex = tmp_path / "made", secrets.token_hex
    ending = iter([parent.rmdir])

    def remove_once(num_bytes: int) -> str:
        for remove in ending:
            remove()
        return token_hex(num_bytes)

    monkeypatch.setattr(secrets, "token_hex", remove_once)
    folder = CaptureFolder(parent)
    assert len(list(parent.iterdir())) == 1
    folder.close()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(ConfigError, match=r"capture_files: .*give a folder in memory"):
            CaptureFolder(path)
