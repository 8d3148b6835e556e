"""Files that a process keeps in a folder for later processes, of at most a number of bytes together.

In: the contents of files. Out: files that are complete, because a file is renamed to its name when it has been written.

Several processes may share a folder. A writer holds a lock on the file "lock", which the system releases when a process is
killed. The file contains the number of bytes in the folder. A writer raises it before it writes, so the limit always holds.
At the limit, the files that were used longest ago are removed. Readers need no lock, and must expect that any file is gone.
"""

import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from nanoinfer.errors import InvalidValueError, shown

LOCK_SECONDS = 5.0


class DiskCache:
    """The files of a folder, which exists and only the user can read and write, whose names match a pattern, as in a shell.

    max_bytes: the most bytes of these files. Other files are left alone.
    """

    def __init__(self, folder: Path, max_bytes: int, pattern: str) -> None:
        self._folder, self._max_bytes, self._pattern = folder, max_bytes, pattern
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._patience = LOCK_SECONDS  # how long to wait for the lock

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other process writes. None begins to write inside the context.

        Raises: TimeoutError after LOCK_SECONDS, because a process that is stopped keeps its lock. The next call does not wait.
        """
        import fcntl

        deadline, self._patience = time.monotonic() + self._patience, 0.0
        try:
            while True:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"another process has locked the folder for {LOCK_SECONDS:g} s") from error
                    time.sleep(0.01)
            self._patience = LOCK_SECONDS
            (self._folder / "writing").unlink(missing_ok=True)  # a half-written file of a process that was killed
            yield
        finally:
            with suppress(OSError):  # the file system may have no locks
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def write(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file, inside `locked`. It replaces a file of its name, whose contents stay readable where it is open."""
        temporary, num_new_bytes = self._folder / "writing", sum(memoryview(part).nbytes for part in parts)
        num_bytes = self._read_size()
        if num_bytes + num_new_bytes > self._max_bytes:
            num_bytes = self.shrink(min(self._max_bytes - num_new_bytes, self._max_bytes * 9 // 10))
        self._write_size(num_bytes + num_new_bytes)
        try:
            with open(temporary, "xb", opener=partial(os.open, mode=0o600)) as file:
                for part in parts:
                    file.write(part)
            stamp(temporary)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)

    def shrink(self, limit: int | None = None) -> int:
        """Remove the files that were used longest ago, until the others take at most `limit` bytes. Returns their bytes.

        Call it inside `locked`. limit: None: max_bytes.
        """
        files = []
        for path in self._folder.glob(self._pattern):
            with suppress(FileNotFoundError):
                status = path.lstat()
                files.append((status.st_mtime_ns, status.st_size, path))
        num_bytes = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if num_bytes <= (self._max_bytes if limit is None else limit):
                break
            path.unlink(missing_ok=True)
            num_bytes -= size
        self._write_size(num_bytes)
        return num_bytes

    def close(self) -> None:
        os.close(self._lock)

    def _read_size(self) -> int:
        text = os.pread(self._lock, 32, 0)
        return int(text) if text.strip().isdigit() else self.shrink()

    def _write_size(self, num_bytes: int) -> None:
        os.pwrite(self._lock, f"{num_bytes:<31}\n".encode(), 0)


def opened(path: Path) -> BinaryIO:
    """Open a kept file to read it. Raises: OSError, also for a FIFO, whose opening would wait for a writer."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return path.open("rb")


def stamp(path: Path) -> None:
    """Mark a file as used now. The system's own file times are too coarse to order two writes."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def private_folder(name: str | Path, setting: str) -> Path:
    """Return a folder that nobody else can read, and make it if it does not exist. setting: what names it, for messages.

    Raises: InvalidValueError if it cannot be made, or belongs to others as well.
    """
    try:
        folder = Path(name).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the user has no home folder, or there is no such user
        reason = error.strerror if isinstance(error, OSError) else error  # without the path, which the message has
        raise InvalidValueError(f"{setting} must be a folder that can be made, got {shown(str(name))}: {reason}") from error
    if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o077):
        raise InvalidValueError(
            f"{setting} must be a folder that only you can read and write, because its contents are private and are believed, "
            f"got {shown(str(name))} of user {status.st_uid} with mode {status.st_mode & 0o777:o}; name a new folder, or use "
            "chmod 700"
        )
    return folder
