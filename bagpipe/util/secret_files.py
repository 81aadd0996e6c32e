"""Secrets given in a file, or in an environment variable where no file is named.

file that its owner, or its group, alone can read ─┐
BAGPIPE_CACHER_SECRET, BAGPIPE_STORE_PASSWORD ─────┴──read_secret──> text, or one line of what is wrong
"""

from __future__ import annotations

import codecs
import os
import stat

from bagpipe.errors import InputError

__all__ = ["CACHER_SECRET", "STORE_PASSWORD", "read_secret", "unprotected_mode"]

#: Environment variables: the secret that cacher and trainers share, and the password of the store's user.
CACHER_SECRET, STORE_PASSWORD = "BAGPIPE_CACHER_SECRET", "BAGPIPE_STORE_PASSWORD"

_MAX_BYTES = 4096


def read_secret(path: str, *, subject: str, variable: str, least: int = 1) -> str:
    """A secret, stripped of whitespace at its ends; empty if there is none.

    Args:
        path: its file; empty: the variable is read.
        subject: the setting that names the file, for errors.
        variable: environment variable.
        least: fewest characters.

    Raises:
        InputError: the file cannot be read, or every user of the machine can read it; the secret is too short, or no
            printable ASCII text. The line never shows the secret.
    """
    if path:
        place, content = f"{subject} {path}", _read(subject, path)
    else:
        place, content = variable, os.environ.get(variable, "").encode(errors="surrogateescape")
        if not content:
            return ""
    try:
        secret = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise InputError(f"{place}: expected ASCII text") from None
    if len(secret) < least or not secret.isprintable():
        characters = f"at least {least} printable characters" if least > 1 else "one line of printable characters"
        raise InputError(f"{place}: expected {characters}, got {len(secret)}")
    return secret


def unprotected_mode(file: str | int) -> int | None:
    """The mode of a file that every user of the machine can read, write or execute. None: none can."""
    mode = stat.S_IMODE(os.stat(file).st_mode)
    return mode if mode & 0o007 else None


def _read(subject: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = unprotected_mode(file.fileno())
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{subject} {path}: {error.strerror}") from None
    if mode is not None:
        raise InputError(
            f"{subject} {path}: expected a file that other users cannot read, got mode {mode:04o}: chmod o-rwx it"
        )
    if len(content) > _MAX_BYTES:
        raise InputError(f"{subject} {path}: expected at most {_MAX_BYTES} bytes")
    return content.removeprefix(codecs.BOM_UTF8)  # of an editor
