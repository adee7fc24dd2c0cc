"""Memory files by which captured rows reach clients on this machine without being sent.

Owns the files, their slots, and the folder that they are in: what is made there is removed, also
after a server that was killed. Must not know HTTP, nor what a row means.

A slot is the client's from the reply that names it until the client acknowledges it, gives the
request up, or dies. It is the server's until then: a reply that is never sent, or of which the
connection tells that it was not read, leaves none behind.
"""

import fcntl
import os
import secrets
import shutil
import stat
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dovetail.core.routes import Columns, Placement
from dovetail.errors import CapacityError, ConfigError, RequestError
from dovetail.server.delivery import Delivery
from dovetail.wire.capture import FileInfo, FileSlot, RowTransport

MAX_FILES = 64
MAX_SLOTS = 256
DEFAULT_SLOTS = 16
ALIGNMENT = 4096
"""Of slots and of the columns in one: a page, so that a column can be mapped by itself."""

FOLDER_PREFIX = "dovetail-capture-"
TRIES = 16


class CaptureFile:
    """The file of one client: slots of one size. Thread-safe.

    A slot is free, being written, or with the client. ``end`` closes the file when nobody writes.

    Args:
        path: of the file to make, which must not exist.
        num_slots: of the file.
        slot_bytes: of each.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, path: Path, *, num_slots: int, slot_bytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600)
        try:
            os.ftruncate(self._descriptor, num_slots * slot_bytes)  # memory comes with writing
        except BaseException:
            os.close(self._descriptor)
            raise
        self.info = FileInfo(
            capture_file=path.name, path=str(path), num_slots=num_slots, slot_bytes=slot_bytes
        )
        self._path = path
        self._lock = threading.Lock()
        self._free = list(reversed(range(num_slots)))
        self._generations = [0] * num_slots
        self._with_client: dict[int, Sequence[str]] = {}  # slot -> rids of what it is of
        self._open: weakref.WeakSet[Handover] = weakref.WeakSet()  # event loop only
        self._num_writing = 0
        self._is_ended = False

    @property
    def is_ended(self) -> bool:
        """True once the file has been removed."""
        return self._is_ended

    def take(self) -> FileSlot | None:
        """Return a slot to write to, None if there is none. ``keep`` or ``drop`` comes next."""
        with self._lock:
            if self._is_ended or not self._free:
                return None
            slot = self._free.pop()
            self._generations[slot] += 1
            self._num_writing += 1
            return FileSlot(slot=slot, generation=self._generations[slot])

    def write(self, taken: FileSlot, columns: Columns) -> dict[str, int]:
        """Write columns into a slot that was taken; return the offset of each in the file.

        Raises:
            OSError: the memory is full.
        """
        offsets = _offsets({name: rows.nbytes for name, rows in columns.items()})
        begin = taken.slot * self.info.slot_bytes
        for name, rows in columns.items():
            assert offsets[name] + rows.nbytes <= self.info.slot_bytes
            _write_all(self._descriptor, rows, begin + offsets[name])
        return {name: begin + offset for name, offset in offsets.items()}

    def keep(self, taken: FileSlot, rids: Sequence[str] = ()) -> None:
        """Say that a slot has been written for these requests; it waits for its client."""
        with self._lock:
            self._num_writing -= 1
            self._with_client[taken.slot] = rids
            self._close_if_over()

    def drop(self, taken: FileSlot) -> None:
        """Give back a slot that was not written."""
        with self._lock:
            self._num_writing -= 1
            self._free.append(taken.slot)
            self._close_if_over()

    def free(self, slots: Sequence[FileSlot]) -> None:
        """Take slots back that their client has read: all of them, or none if one is wrong.

        Raises:
            RequestError: a slot is not with the client, or was taken again since; names it.
        """
        with self._lock:
            for index, one in enumerate(slots):
                self._check(index, one)
            if len({one.slot for one in slots}) != len(slots):
                raise RequestError("slots", "names a slot twice; acknowledge each once")
            for one in slots:
                self._take_back(one.slot)

    def opened(self, handover: "Handover") -> None:
        """Know the slots of a reply that is being made."""
        self._open.add(handover)

    def give_up(self, rid: str) -> None:
        """Take back what requests with this rid have, and will have. None is no error."""
        for handover in list(self._open):
            if rid in handover.rids:
                handover.close()
        with self._lock:
            for slot, rids in list(self._with_client.items()):
                if rid in rids:
                    self._take_back(slot)

    def reclaim(self, slots: Sequence[FileSlot]) -> None:
        """Take back slots of which their client has not been told."""
        with self._lock:
            for one in slots:
                is_same = one.generation == self._generations[one.slot]
                if is_same and one.slot in self._with_client:
                    self._take_back(one.slot)

    def end(self) -> None:
        """Remove the file. Whoever has mapped it keeps the memory until it is unmapped."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            self._path.unlink(missing_ok=True)
            self._close_if_over()

    def _take_back(self, slot: int) -> None:
        del self._with_client[slot]
        self._free.append(slot)

    def _close_if_over(self) -> None:
        if self._is_ended and self._num_writing == 0:
            os.close(self._descriptor)

    def _check(self, index: int, one: FileSlot) -> None:
        where = f"slots[{index}]"
        if not 0 <= one.slot < self.info.num_slots:
            raise RequestError(
                f"{where}.slot", f"is {one.slot}; the file has {self.info.num_slots} slots, from 0"
            )
        now = self._generations[one.slot]
        if one.generation != now or one.slot not in self._with_client:
            state = "with the client" if one.slot in self._with_client else "free or being written"
            raise RequestError(
                f"{where}.generation",
                f"is {one.generation} of slot {one.slot}, whose generation is {now} and which is "
                f"{state}; acknowledge what a reply named, once",
            )


class Handover:
    """The slots of one reply, from their writing until the reply has been sent.

    ``place`` runs on any thread, the rest on the event loop. A slot that is being written when the
    reply is given up is freed by its writer.

    Args:
        file: of the client; None for a reply that needs none.
        rids: the client's labels of what is answered.
    """

    def __init__(self, file: CaptureFile | None, rids: Sequence[str] = ()) -> None:
        self.rids = rids
        self._file = file
        if file is not None:
            file.opened(self)
        self._lock = threading.Lock()
        self._slots: list[FileSlot] = []
        self._is_over = False

    def place(self, columns: Columns) -> Placement:
        """Write columns into a slot and say where they are; or why they are not there."""
        file = self._file
        assert file is not None
        taken = file.take()
        if taken is None:
            ended = "the file's registration has ended"
            return _inline(ended if file.is_ended else "no slot of the file is free")
        try:
            offsets = file.write(taken, columns)
        except OSError as error:
            file.drop(taken)
            return _inline(f"the file cannot be written: {error.strerror}")
        file.keep(taken, self.rids)
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._slots.append(taken)
        if is_over:  # nobody will hear of it
            file.reclaim([taken])
        return Placement(
            transport=RowTransport(
                type="file",
                capture_file=file.info.capture_file,
                slot=taken.slot,
                generation=taken.generation,
            ),
            offsets=offsets,
        )

    def sent(self, delivery: Delivery | None = None) -> None:
        """Say that what names the slots has been sent: they are the client's.

        Args:
            delivery: of that; where it fails they are taken back. None where nobody can tell.
        """
        with self._lock:
            slots, self._slots = self._slots, []
        if slots and self._file is not None and delivery is not None:
            delivery.on_failure(partial(self._file.reclaim, slots))

    def close(self) -> None:
        """Free what no reply has told of."""
        with self._lock:
            self._is_over = True
            slots, self._slots = self._slots, []
        if self._file is not None:
            self._file.reclaim(slots)


class CaptureFolder:
    """Where the files of one server are. Used on its event loop alone.

    Servers share a parent folder: each has a folder of its own, which it locks while it lives, so
    that the next one to start can tell whose owner is dead, and removes it.

    Args:
        parent: a folder in memory, such as one under /dev/shm; made if it is missing, and then
            removed at the end, unless others use it.

    Raises:
        ConfigError: files cannot be made there.
    """

    def __init__(self, parent: Path) -> None:
        self._files: dict[str, CaptureFile] = {}
        self._made = _missing(parent)
        try:
            _remove_orphans(parent)
            self._path, self._lock = _locked_folder(parent)
        except OSError as error:
            raise ConfigError(
                "capture_files",
                f"{parent} cannot be used ({error.strerror}); give a folder in memory that can be "
                "written, such as /dev/shm/dovetail",
            ) from None

    def register(self, num_slots: int, row_bytes: Mapping[str, int]) -> CaptureFile:
        """Make a file whose slots hold ``row_bytes``: column -> most bytes of its rows.

        Raises:
            RequestError: ``num_slots`` is out of range.
            CapacityError: there is no room for another file.
        """
        if not 1 <= num_slots <= MAX_SLOTS:
            raise RequestError("num_slots", f"is {num_slots}; the legal range is 1 to {MAX_SLOTS}")
        if len(self._files) >= MAX_FILES:
            raise CapacityError(
                f"{MAX_FILES} clients have a capture file; end another's registration",
                retry_after_s=1,
            )
        offsets = _offsets(row_bytes)
        slot_bytes = max(offsets[name] + _aligned(row_bytes[name]) for name in row_bytes)
        path = self._path / secrets.token_hex(16)
        try:
            file = CaptureFile(path, num_slots=num_slots, slot_bytes=slot_bytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            message = f"a capture file cannot be made: {error.strerror}"
            raise CapacityError(message, retry_after_s=10) from None
        self._files[path.name] = file
        return file

    def find(self, name: str) -> CaptureFile:
        """Return the file that a client names; the name is looked up, it is no path.

        Raises:
            RequestError: no such file is registered here.
        """
        file = self._files.get(name)
        if file is None:
            raise RequestError(
                "capture_file",
                "is no registered file, or its registration has ended; register one with "
                "/register_capture_file, or leave the field out",
            )
        return file

    def end(self, file: CaptureFile) -> None:
        """End a registration: its client has gone."""
        del self._files[file.info.capture_file]
        file.end()

    def close(self) -> None:
        """Remove all that is left."""
        for file in list(self._files.values()):
            self.end(file)
        shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._lock)
        with suppress(OSError):  # others have something there, or have removed it
            for folder in self._made:
                folder.rmdir()


def given(folder: CaptureFolder | None) -> CaptureFolder:
    """Return the server's folder.

    Raises:
        RequestError: it has none.
    """
    if folder is None:
        raise RequestError(
            "capture_file", "this server has no capture files; start it with --capture-files"
        )
    return folder


def _inline(reason: str) -> Placement:
    return Placement(transport=RowTransport(type="inline", reason=reason), offsets={})


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _offsets(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return where each column begins, one behind the other."""
    offsets: dict[str, int] = {}
    at = 0
    for name, num_bytes in sizes.items():
        offsets[name] = at
        at += _aligned(num_bytes)
    return offsets


def _write_all(descriptor: int, rows: NDArray[np.generic], offset: int) -> None:
    """Write an array; not through a map, where a full memory is a signal instead of an error."""
    rest = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    while len(rest):
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


def _missing(folder: Path) -> list[Path]:
    """Return what has to be made for a folder to be there, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _remove_orphans(parent: Path) -> None:
    """Remove the folders of servers that live no more. What is not ours is left alone."""
    for path in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            status = path.lstat()
        except FileNotFoundError:  # its server has just ended
            continue
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            continue
        lock = _lock_of(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor that holds its lock.

    Another server that starts now may take the folder for a dead one's before it is locked, and one
    that ends may remove the parent that it made; then there is a next try.
    """
    for _ in range(TRIES):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = parent / f"{FOLDER_PREFIX}{secrets.token_hex(8)}"
        try:
            path.mkdir(mode=0o700)
        except FileNotFoundError:
            continue
        lock = _lock_of(path)
        if lock is None:
            continue
        if path.exists():
            return path, lock
        os.close(lock)
    raise ConfigError("capture_files", f"{parent} is changed by others all the time; give another")


def _lock_of(path: Path) -> int | None:
    """Lock a folder; None if somebody else has, or it is gone. The lock ends with the process."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
