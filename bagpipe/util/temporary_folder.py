"""`temporary_folder`: a private folder of this process; those of killed processes are removed with the next.
`temporary_file`: a file without a name.

<tmp>/bagpipe-x8k2/owner.lock     names this start of the host; locked while the process lives, the kernel frees the
                                  lock when it is killed
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from bagpipe.errors import InputError
from bagpipe.util.outputs import cannot_write

__all__ = ["MAX_SOCKET_PATH_BYTES", "temporary_file", "temporary_folder", "temporary_place"]

#: Bytes of a unix socket's path: sockaddr_un.sun_path has 108 with the closing zero on Linux, 104 elsewhere (unix(7),
#: unix(4)).
MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103

_VARIABLE = "TMPDIR"
_PREFIX = "bagpipe-"
_LOCK = "owner.lock"
#: Bytes that tempfile adds to a prefix.
_RANDOM_BYTES = 8


@contextmanager
def temporary_folder(purpose: str = "", parent: Path | None = None, *, socket_name: str = "") -> Iterator[Path]:
    """A folder that only this user can read, removed at the end of the block.

    Args:
        purpose: part of its name.
        parent: where it is; None: the folder for temporary files.
        socket_name: of a unix socket that is made in the folder. Where the path of one in the folder for temporary
            files would be too long, or no address, the folder is in one of the usual places.

    Raises:
        InputError: there is no such place that can be written.
        JobError: its disk is full.
    """
    prefix = f"{_PREFIX}{purpose}-" if purpose else _PREFIX
    if parent is None:
        parent = temporary_place()
        if socket_name:
            parent = _place_of_socket(parent, len(f"/{prefix}/{socket_name}") + _RANDOM_BYTES)
        key = _VARIABLE
    else:
        key = ""
    _sweep(parent)
    lock: IO[str] | None = None
    folder = hidden = None
    try:
        try:
            # Hidden from `_sweep` until it is locked.
            hidden = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
            folder = parent / hidden.name.removeprefix(".")
            lock = (hidden / _LOCK).open("w")
            lock.write(_host())
            lock.flush()
            with suppress(OSError):  # a file system without locks, where no folder is ever removed for another process
                fcntl.flock(lock, fcntl.LOCK_EX)
            hidden.rename(folder)
        except OSError as error:
            raise cannot_write(parent, error, key=key) from None
        yield folder
    finally:
        if lock is not None:
            with suppress(OSError):
                lock.close()
        for path in filter(None, (folder, hidden)):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def temporary_file() -> Iterator[BinaryIO]:
    """A file without a name in the folder for temporary files, open to write and read, gone with the block.

    Raises:
        InputError: there is no folder for temporary files that can be written.
        JobError: its disk is full, also at a write.
    """
    place = temporary_place()
    try:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed below
    except OSError as error:
        raise cannot_write(place, error, key=_VARIABLE) from None
    with file, io.BufferedRandom(_TemporaryFile(file.fileno(), place)) as buffered:
        yield buffered


class _TemporaryFile(io.FileIO):
    """The file of a descriptor that is closed elsewhere, with errors that name the place of temporary files."""

    def __init__(self, descriptor: int, place: Path) -> None:
        super().__init__(descriptor, "r+b", closefd=False)
        self._place = place

    def write(self, data: Any, /) -> int:
        """See `io.FileIO`."""
        try:
            return super().write(data)
        except OSError as error:
            raise cannot_write(self._place, error, key=_VARIABLE) from None


def temporary_place() -> Path:
    """The folder for temporary files, of the process.

    Raises:
        InputError: there is none.
    """
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:  # all are missing, cannot be written or are full
        raise InputError(
            f"{_VARIABLE}: expected a folder for temporary files that can be written and has room: {error.strerror}"
        ) from None


def _place_of_socket(first: Path, num_bytes: int) -> Path:
    """A folder in which a path with `num_bytes` more can be a socket's: `first`, else a usual one.

    gRPC takes a comma for the end of an address.

    Raises:
        InputError: there is none.
    """
    for place in (first, *map(Path, filter(None, (os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/var/tmp")))):
        fits = len(os.fsencode(place)) + num_bytes <= MAX_SOCKET_PATH_BYTES and "," not in str(place)
        if fits and (place is first or (place.is_dir() and os.access(place, os.W_OK | os.X_OK))):
            return place
    raise InputError(
        f"{_VARIABLE}: expected a folder in which a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes and no "
        f"comma, got {first}"
    )


def _sweep(parent: Path) -> None:
    """Remove this user's folders whose processes have ended. Those without a lock, and those of other hosts that share
    the file system, are not ours to judge: locks of some file systems hold for one host. Those of earlier starts of
    this host look like another host's, and stay.
    """
    host = _host().encode()
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.read(len(host) + 1) == host:
                    shutil.rmtree(folder)


def _host() -> str:
    """This start of the host's kernel, which frees all locks when it ends; elsewhere than on Linux the host's name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
