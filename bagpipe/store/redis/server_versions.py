"""Releases of Redis and Valkey with faults that a job should know. Pure: INFO in.

scripting_advice    CVE-2025-49844, 46817, 46818 and 46819: whoever may run scripts can crash the server, run code in it
                    or act as another user. Sources: the security releases of Redis and of Valkey of 2025-10-03
drops_transactions  EXEC checks the rights of the default user while the server loads its append-only file, and leaves
                    out what that user may not do, without an error. Sources: redis pull request 14545, valkey pull
                    request 3984; Redis 7.0.15 and 8.2.3 and Valkey 9.0.0, 9.1.0 and 9.1.1 were seen to do so, Valkey
                    9.1.2 was not
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["drops_transactions", "release_of", "scripting_advice"]

#: First safe release of each line that got the fixes, ascending. Later lines have them from the start, others never.
_FIXED: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    "redis": ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
    "valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4), (9, 0, 0)),
}
#: First release of each that loads every transaction.
_LOADS_ALL: Mapping[str, tuple[int, int, int]] = {"redis": (8, 6, 0), "valkey": (9, 1, 2)}
#: Of Redis, Valkey and their compiler.
_KNOWN_VERSIONS = frozenset({"redis_version", "valkey_version", "gcc_version"})
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})")


def scripting_advice(endpoint: str, info: Mapping[str, Any]) -> str:
    """One line about a server without the fixes; empty if it has them, or if its version is unknown.

    Distributions can have patched an older release, which INFO does not tell. A server behind a unix socket is left
    out: whoever reaches it has an account on its machine, and most are the private servers of jobs.
    """
    if endpoint.startswith("unix:"):
        return ""
    release = release_of(info)
    if release is None:
        return ""
    name, version = release
    fixed = _FIXED[name]
    if version >= fixed[-1] or any(version[:2] == safe[:2] and version >= safe for safe in fixed):
        return ""
    safe = " or ".join(map(_text, fixed[-2:]))
    return (
        f"store {endpoint} runs {name} {_text(version)}: users who may run scripts can break into it (CVE-2025-49844) "
        f"unless its distribution has patched it; the fixes are in {name} {safe}"
    )


def drops_transactions(info: Mapping[str, Any]) -> bool:
    """Whether the server has an append-only file, of which a restart drops what the default user may not do.

    A release from before the fix counts, although a distribution can have patched it.
    """
    release = release_of(info)
    return info.get("aof_enabled") == 1 and release is not None and release[1] < _LOADS_ALL[release[0]]


def release_of(info: Mapping[str, Any]) -> tuple[str, tuple[int, int, int]] | None:
    """``redis`` or ``valkey``, and its version; None if it is another server, or says no version."""
    others = {key for key in info if key.endswith("_version")} - _KNOWN_VERSIONS
    if others:
        return None  # a compatible server, which states the release of Redis that it resembles
    name = str(info.get("server_name", "redis"))
    found = _VERSION.match(str(info.get(f"{name}_version", "")))
    if found is None or name not in _FIXED:
        return None
    return name, (int(found[1]), int(found[2]), int(found[3]))


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
