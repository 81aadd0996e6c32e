"""Digests of what a cacher's batches depend on besides the settings. A trainer returns them after a reconnect.

    files: names, sizes, times of change ──┐
    code of readers, oracle and cacher ────┴──> {"data": …, "code": …} ──Welcome──> trainer ──Hello──> compared

After a cacher restart, a trainer continues in the middle of a plan. This is correct only if the new cacher plans what
the old one did. The check is conservative: a file with a new modification time counts as changed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

import bagpipe
import data
from bagpipe.errors import InputError

__all__ = ["identity_of"]

_OURS = Path(bagpipe.__file__).parent
_PLANNING_CODE = (
    _OURS / "oracle",
    _OURS / "client",
    _OURS / "types",
    Path(data.__file__).parent,
    Path(__file__).parent,
)


def identity_of(files: Iterable[str], layout: str) -> Mapping[str, str]:
    """The digests of data and code, by name.

    Args:
        files: all files that are read.
        layout: `data.source.Source.layout`.

    Raises:
        InputError: a file is missing.
    """
    lines, num_bytes = [layout], 0
    for file in files:
        try:
            status = os.stat(file)
        except OSError as error:
            raise InputError(f"{file}: {error.strerror}") from None
        num_bytes += status.st_size
        lines.append(f"{file} {status.st_size} {status.st_mtime_ns}")
    return {
        "data": f"{len(lines) - 1} files of {num_bytes} bytes ({_digest(lines)})",
        "code": _digest([np.__version__, *_code()]),
    }


def _code() -> list[str]:
    files = (file for folder in _PLANNING_CODE for file in sorted(folder.glob("*.py")))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
