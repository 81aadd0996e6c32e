"""Output files: checked before the work begins, and written atomically."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from bagpipe.errors import InputError, JobError

__all__ = ["check_folder", "check_writable", "write_json", "write_whole"]


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
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
