"""`with_remedy`: error replies of a server that has no room, or refuses the user, with what to do about it.

OOM …      the server's memory is full        MISCONF …   its disk is full, or it cannot write there
NOPERM …   the user lacks a right             WRONGPASS …, NOAUTH …   the user's password was changed
"""

from __future__ import annotations

from types import MappingProxyType

__all__ = ["with_remedy"]

_LOGIN = "check user and password in store.url, store.password_file or BAGPIPE_STORE_PASSWORD"

#: Part of a server's text (redis-py drops the word OOM) -> what to do. The texts are those of Redis and Valkey.
_REMEDIES = MappingProxyType(
    {
        "command not allowed when used memory > 'maxmemory'": (
            "the server's memory is full: raise its maxmemory, or delete namespaces that no job needs; "
            "a job with checkpoint.dir then resumes"
        ),
        "MISCONF": (
            "the server cannot write its files: free space on the disk of its folder (CONFIG GET dir); "
            "a job with checkpoint.dir then resumes"
        ),
        "NOPERM": "the user of store.url lacks this right: docs/store.md lists them",
        "WRONGPASS": _LOGIN,
        "NOAUTH": _LOGIN,
    }
)


def with_remedy(text: str) -> str:
    """The text of an error reply in one line, followed by the remedy if one is known."""
    line = " ".join(text.split())
    remedy = next((remedy for part, remedy in _REMEDIES.items() if part in line), "")
    return f"{line.rstrip('.')}; {remedy}" if remedy else line
