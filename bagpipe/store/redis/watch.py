"""`Watch`: what servers said about themselves when a job began, compared with what they say now.

    INFO of every server ──Vitals──> remembered, by place
    later: INFO ──Vitals──> the same process? a master? nothing evicted? ──> fine, or a StoreError with both values

Pure. Keys that expired are not judged here, only counted: other users of a server may let theirs expire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.errors import InputError, StoreError
from bagpipe.store.redis.durability import inspect_durability
from bagpipe.store.redis.servers import refuse_unsafe

__all__ = ["Vitals", "Watch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What must not change while a job runs.

    Attributes:
        run_id: of the process.
        role: master or slave.
        evicted: keys dropped for want of memory.
        expired: keys whose time was up.
    """

    run_id: str
    role: str
    evicted: int
    expired: int

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Vitals:
        """From a server's INFO."""
        return cls(
            run_id=str(info.get("run_id", "")),
            role=str(info.get("role", "master")),
            evicted=int(info.get("evicted_keys", 0)),
            expired=int(info.get("expired_keys", 0)),
        )


class Watch:
    """Remembers every server of a store.

    Args:
        infos: (place, INFO) of every server.
        durability: what the servers must go on to promise.
    """

    def __init__(self, infos: list[tuple[str, Mapping[str, Any]]], durability: str) -> None:
        self._durability = durability
        self._vitals = {place: Vitals.of(info) for place, info in infos}

    def look(self, infos: list[tuple[str, Mapping[str, Any]]]) -> bool:
        """Compare, and remember what is new: a cluster's nodes may come and go.

        Returns:
            keys have expired somewhere since the last look.

        Raises:
            StoreError: names the server, what it said and what it says.
        """
        has_expired = False
        for place, info in infos:
            now = Vitals.of(info)
            before = self._vitals.get(place, now)
            _compare(place, before, now)
            try:
                refuse_unsafe(place, info)
            except InputError as error:  # the server was fine when the job began
                raise StoreError(str(error)) from error
            inspect_durability(place, info, self._durability)
            has_expired = has_expired or now.expired != before.expired
        self._vitals = {place: Vitals.of(info) for place, info in infos}
        return has_expired


def _compare(place: str, before: Vitals, now: Vitals) -> None:
    if now.run_id != before.run_id:
        raise StoreError(
            f"store {place} was started again while the job ran: run_id was {before.run_id}, is {now.run_id}; "
            "rows may be lost"
        )
    if now.role != before.role:
        raise StoreError(f"store {place} was a {before.role} and is a {now.role} now")
    if now.evicted not in (before.evicted, 0):  # CONFIG RESETSTAT puts it back to 0
        raise StoreError(
            f"store {place} has dropped keys for want of memory: evicted_keys was {before.evicted}, is {now.evicted}"
        )
