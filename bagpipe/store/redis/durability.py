"""What a store's acknowledged rows survive, and what a server says about it. Pure.

| `store.durability` | the server dies (kill -9) | the machine loses power |
|---|---|---|
| memory | all rows are gone | all rows are gone |
| everysec | nothing is lost | the last second or so is lost |
| always | nothing is lost | nothing is lost, as far as the disk tells the truth |

Every loss is detected (`bagpipe.store.fencing.fence`); durability decides how much is reloaded from files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagpipe.errors import InputError, StoreError

__all__ = ["DURABILITIES", "inspect_durability", "needs_fsync", "refuse_less_durable", "server_options"]

#: From the least to the most; the names of the last two are those of a server's appendfsync.
DURABILITIES = ("memory", "everysec", "always")


def server_options(durability: str) -> dict[str, str]:
    """Options of a server of our own."""
    if durability == "memory":
        return {"appendonly": "no"}
    return {"appendonly": "yes", "appendfsync": durability}


def needs_fsync(durability: str) -> bool:
    """`refuse_less_durable` needs to know appendfsync."""
    return durability != "memory"


def refuse_less_durable(place: str, info: Mapping[str, Any], appendfsync: str, durability: str) -> None:
    """Refuse a server that promises less than was asked for.

    Args:
        place: the server, for the message.
        info: its INFO.
        appendfsync: what its CONFIG GET says; only needed where `needs_fsync`.
        durability: what was asked for.

    Raises:
        InputError: names the server, what it is set to, and the fix.
    """
    if durability == "memory":
        return
    if not int(info.get("aof_enabled", 0)):
        raise InputError(
            f"store {place} keeps rows in memory only: appendonly is no, but store.durability is {durability}; "
            f"run CONFIG SET appendonly yes, or set store.durability = memory"
        )
    if appendfsync not in _at_least(durability):
        raise InputError(
            f"store {place} has appendfsync {appendfsync}, but store.durability is {durability}; "
            f"run CONFIG SET appendfsync {durability}, or ask for less"
        )


def inspect_durability(place: str, info: Mapping[str, Any], durability: str) -> None:
    """StoreError if a server does not persist any more what was asked for. `info`: INFO, with its appendfsync."""
    if durability == "memory":
        return
    if not int(info.get("aof_enabled", 0)):
        raise StoreError(f"store {place}: appendonly is no by now, but store.durability is {durability}")
    appendfsync = str(info.get("appendfsync", durability))
    if appendfsync not in _at_least(durability):
        raise StoreError(f"store {place}: appendfsync is {appendfsync} by now, but store.durability is {durability}")
    status = info.get("aof_last_write_status", "ok")
    if status != "ok":
        raise StoreError(
            f"store {place} cannot write its append-only file: aof_last_write_status is {status}, expected ok; "
            "is its disk full?"
        )


def _at_least(durability: str) -> tuple[str, ...]:
    return DURABILITIES[DURABILITIES.index(durability) :]
