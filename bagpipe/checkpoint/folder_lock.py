"""`FolderLock`: says that the job which created a generation's folder still runs. A POSIX record lock on a file.

    new folder ──lock──> renamed to generation-000007, which so appears locked    `holder` ──> "process 71 on host a"
    end of the process, or `release` ──> unlocked                                          ──> "" (nobody)

The lock ends with its process, also on network file systems, and child processes do not inherit it. Locks of one
process do not exclude each other. A file system without locks never shows a holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from bagpipe.checkpoint.files import open_plain

__all__ = ["FolderLock", "holder"]

_NAME = "lock"

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class FolderLock:
    """The lock of a folder that no other process knows yet. Held until `release` or the end of the process.

    Args:
        folder: existing folder; can be renamed while locked.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder / _NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.write(self._descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode())
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def release(self) -> None:
        """Unlock the folder. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def holder(folder: Path) -> str:
    """The process that has locked a folder, as text; empty if none has, or if it is this one.

    If this process has locked the folder, the call unlocks it: closing any descriptor of a file drops its record locks.
    """
    try:
        with open_plain(folder / _NAME) as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return file.read(1_000).decode(errors="replace")
    except OSError:  # no lock file, or no locks
        pass
    return ""
