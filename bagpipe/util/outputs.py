"""Output files and folders: checked before the work begins, written atomically, and what to say of a full disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bagpipe.errors import InputError, JobError

__all__ = [
    "cannot_write",
    "check_folder",
    "check_writable",
    "has_no_room",
    "new_folder",
    "reason_of",
    "write_json",
    "write_whole",
    "written_whole",
]

#: Numbers of a full disk, and the text with which libraries in other languages report them without a number.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ROOM_TEXT = "No space left on device"


def check_writable(path: str, key: str) -> None:
    """Raise InputError if `path` cannot be written, before there is a result to lose."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InputError(f"{key}: folder {folder} does not exist")
    if not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise InputError(f"{key}: cannot write {path}")
    if Path(path).exists() and not Path(path).is_file():  # /dev/null or a pipe: os.replace would replace it by a file
        raise InputError(f"{key}: expected a file, {path} is not a regular file")


def check_folder(path: str, key: str) -> None:
    """Raise InputError unless `path` is a writable folder or can be created."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"{key}: expected a folder, {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{key}: cannot write in {folder}")


def reason_of(error: OSError) -> str:
    """Words for a failed write: its reason, and of a full disk what to do."""
    reason = error.strerror or " ".join(str(error).split())
    if not has_no_room(error):
        return reason
    words = _NO_ROOM_TEXT if _NO_ROOM_TEXT in str(error) else reason
    return f"{words}; free space there, or choose another place"


def cannot_write(path: object, error: OSError, *, key: str = "") -> InputError | JobError:
    """The error of an output that cannot be written: a JobError if its disk is full, else an InputError.

    Args:
        path: of the output.
        error: why.
        key: the flag or key that names the output, for the message.
    """
    kind = JobError if has_no_room(error) else InputError
    return kind(f"{key + ': ' if key else ''}cannot write {path}: {reason_of(error)}")


def has_no_room(error: OSError) -> bool:
    """Whether a write failed because the disk, or the user's share of it, is full."""
    return error.errno in _NO_ROOM or _NO_ROOM_TEXT in str(error)


def write_json(path: str, value: object) -> None:
    """Write JSON atomically. Raises ValueError if a number is not finite."""
    write_whole(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def write_whole(path: str, content: bytes) -> None:
    """Write a file atomically: readers see the old content or all of the new one.

    Raises:
        JobError: it cannot be written.
    """
    target = Path(path).resolve()  # replaces the target of a link, not the link
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise JobError(f"cannot write {path}: {reason_of(error)}") from error


@contextmanager
def written_whole(path: str) -> Iterator[str]:
    """The name of a file beside `path`, for the block to write; it takes the place of `path` at a clean exit.

    Raises:
        InputError: it cannot be written.
        JobError: the disk is full.
    """
    partial = f"{path}.partial"
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        with suppress(OSError):
            os.unlink(partial)


@contextmanager
def new_folder(out: Path, flag: str) -> Iterator[Path]:
    """A temporary folder beside `out`, renamed to it at a clean exit, else removed; after a kill, by the next call.

    Args:
        out: absent, or empty.
        flag: names it in messages.

    Raises:
        InputError: it is not empty, or cannot be written.
        JobError: the disk is full.
    """
    out = out.absolute()
    temporary: Path | None = None
    lock: int | None = None
    try:
        if out.exists() and any(out.iterdir()):
            raise InputError(f"{flag} {out} is not empty")
        _remove_abandoned(out)
        temporary = out.with_name(f"{out.name}.{secrets.token_hex(4)}.tmp")  # random: a fixed name can exist
        hidden = temporary.with_name(f".{temporary.name}")  # from other calls until it is locked
        hidden.mkdir(parents=True)
        lock = _lock_folder(hidden)
        hidden.rename(temporary)
        yield temporary
        temporary.replace(out)
    except OSError as error:
        raise cannot_write(out, error, key=flag) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned(out: Path) -> None:
    """Remove what killed processes of this user left of the folder `out`."""
    form = re.compile(re.escape(out.name) + r"\.[0-9a-f]{8}\.tmp")
    for folder in out.parent.glob("*.tmp"):
        if form.fullmatch(folder.name) is None:
            continue
        with suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            lock = _lock_folder(folder)
            if lock is not None:
                shutil.rmtree(folder)
                os.close(lock)


def _lock_folder(folder: Path) -> int | None:
    """The descriptor of a folder that is locked until it is closed. None: another process has it, or nobody can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
