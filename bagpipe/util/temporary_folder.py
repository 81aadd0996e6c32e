"""`temporary_folder`: a private folder of this process; those of killed processes are removed with the next.

<tmp>/bagpipe-x8k2/owner.lock     names this start of the host; locked while the process lives, the kernel frees the
                                  lock when it is killed
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["temporary_folder"]

_PREFIX = "bagpipe-"
_LOCK = "owner.lock"


@contextmanager
def temporary_folder(purpose: str = "", parent: Path | None = None) -> Iterator[Path]:
    """A folder that only this user can read, removed at the end of the block.

    Args:
        purpose: part of its name.
        parent: where it is; None: the folder for temporary files.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    _sweep(parent)
    # Hidden from `_sweep` until it is locked.
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{purpose}-" if purpose else f".{_PREFIX}", dir=parent))
    folder = parent / hidden.name.removeprefix(".")
    try:
        with (hidden / _LOCK).open("w") as lock:
            lock.write(_host())
            lock.flush()
            with suppress(OSError):  # a file system without locks, where no folder is ever removed for another process
                fcntl.flock(lock, fcntl.LOCK_EX)
            hidden.rename(folder)
            yield folder
    finally:
        for path in (folder, hidden):
            shutil.rmtree(path, ignore_errors=True)


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
