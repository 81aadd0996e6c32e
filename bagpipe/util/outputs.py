"""Files that programs write for others: refused before the work if they cannot be written; whole, or not there."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from bagpipe.errors import InputError, JobError

__all__ = ["check_folder", "check_writable", "write_json", "write_whole"]


def check_writable(path: str, key: str) -> None:
    """Raise InputError now rather than lose a result later."""
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise InputError(f"{key}: folder {folder} does not exist")
    if not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise InputError(f"{key}: cannot write {path}")
    if Path(path).exists() and not Path(path).is_file():  # /dev/null, a pipe: a file would take its place
        raise InputError(f"{key}: expected a file, {path} is none")


def check_folder(path: str, key: str) -> None:
    """Raise InputError unless `path` is a folder that can be written, or one that can be made."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"{key}: expected a folder, {folder} is none")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{key}: cannot write in {folder}")


def write_json(path: str, value: object) -> None:
    """Write JSON; a reader never sees half of it. ValueError if a number is not finite."""
    write_whole(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def write_whole(path: str, content: bytes) -> None:
    """Write a file; a reader never sees half of it, and what was there before stays until then.

    Raises:
        JobError: it cannot be written.
    """
    target = Path(path).resolve()  # of a link, what it leads to
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
