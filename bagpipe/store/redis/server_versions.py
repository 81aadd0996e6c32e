"""Releases of Redis and Valkey whose scripting can be broken into. Pure: INFO in.

CVE-2025-49844, 46817, 46818 and 46819: whoever may run scripts can crash the server, run code in it or act as another
user. Sources: the security releases of Redis of 2025-10-03 and of Valkey of the same day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["scripting_advice"]

#: First safe release of each line that got the fixes, ascending. Later lines have them from the start, others never.
_FIXED: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    "redis": ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
    "valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4), (9, 0, 0)),
}
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
    others = {key for key in info if key.endswith("_version")} - _KNOWN_VERSIONS
    if others:
        return ""  # a compatible server, which states the release of Redis that it resembles
    name = str(info.get("server_name", "redis"))
    text = str(info.get(f"{name}_version", ""))
    found = _VERSION.match(text)
    if found is None or name not in _FIXED:
        return ""
    version = int(found[1]), int(found[2]), int(found[3])
    fixed = _FIXED[name]
    if version >= fixed[-1] or any(version[:2] == safe[:2] and version >= safe for safe in fixed):
        return ""
    safe = " or ".join(".".join(map(str, each)) for each in fixed[-2:])
    return (
        f"store {endpoint} runs {name} {found[0]}: users who may run scripts can break into it (CVE-2025-49844) unless "
        f"its distribution has patched it; the fixes are in {name} {safe}"
    )
