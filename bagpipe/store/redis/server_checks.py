"""Checks of a server's settings: ACL rights, eviction, durability, and changes while a job runs. Pure: INFO in.

    before a job:   ACL rights ── check_rights     maxmemory-policy ── check_eviction     AOF ── check_durability
                    rights of the default user, with which an AOF is loaded ── check_replay
    during a job:   INFO ──ServerMonitor.check──> StoreError: restarted, another role, evicted keys, no longer durable

| `store.durability` | the server dies (kill -9) | the machine loses power |
|---|---|---|
| memory | all rows are lost | all rows are lost |
| everysec | nothing is lost; while its disk syncs, up to two seconds | the last second or two are lost |
| always | nothing is lost | nothing is lost, if the disk tells the truth |

Every loss is detected (`bagpipe.store.fencing.fence`); durability decides how many rows are reloaded from files.

A missing right would otherwise surface in the middle of a job, at the first lost reply or the first recovery. Servers
before Redis 7 have no `redis.acl_check_cmd`; there it surfaces when the command is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagpipe.errors import InputError, StoreError
from bagpipe.store.redis.reply_forms import TEXT, TEXTS, info_number
from bagpipe.store.redis.server_versions import drops_transactions, release_of
from bagpipe.store.redis.servers import KeyCommand

__all__ = [
    "DURABILITIES",
    "READING_COMMANDS",
    "REQUIRED_COMMANDS",
    "ServerMonitor",
    "check_durability",
    "check_eviction",
    "check_replay",
    "check_rights",
    "check_still_durable",
    "denied_commands",
    "needs_appendfsync",
    "replayed_commands",
]

#: From weakest to strongest; the last two are values of a server's appendfsync.
DURABILITIES = ("memory", "everysec", "always")

#: Commands of the row path, its scripts, the ledger and the namespace.
REQUIRED_COMMANDS = (
    "del",
    "eval",
    "exec",
    "exists",
    "get",
    "hdel",
    "hgetall",
    "hlen",
    "hmget",
    "hscan",
    "hset",
    "info",
    "llen",
    "lrange",
    "multi",
    "ping",
    "pttl",
    "rename",
    "renamenx",
    "rpop",
    "rpush",
    "rpushx",
    "sadd",
    "set",
    "smembers",
    "srem",
    "unlink",
    "unwatch",
    "watch",
)

#: Commands of a reader (`bagpipe.serving`). Without EVAL it cannot ask for its rights.
READING_COMMANDS = ("ping", "info", "get", "hgetall", "hlen", "hmget", "llen", "smembers")

#: Commands that an append-only file can have in transactions of a job, with their arguments: `K` is a bucket's key.
_REPLAYED = (
    "del K",
    "hdel K f",
    "hset K f v",
    "rename K K",
    "renamenx K K",
    "rpop K",
    "rpush K v",
    "rpushx K v",
    "sadd K v",
    "set K v",
    "srem K v",
    "unlink K",
)

_DENIED_COMMANDS = """
local denied = {}
if redis.acl_check_cmd then
  for _, command in ipairs(ARGV) do
    if not redis.acl_check_cmd(command, KEYS[1], KEYS[1], KEYS[1]) then table.insert(denied, command) end
  end
end
return denied
"""


def denied_commands(bucket_key: bytes) -> KeyCommand:
    """The command that returns which of `REQUIRED_COMMANDS` the user is denied on the bucket's keys."""
    return KeyCommand(bucket_key, ("EVAL", _DENIED_COMMANDS, 1, bucket_key, *REQUIRED_COMMANDS), TEXTS)


def check_rights(endpoint: str, denied: list[bytes]) -> None:
    """Raise InputError that names the server and the denied commands, if there are any."""
    if denied:
        names = ", ".join(f"'{name.decode(errors='replace')}'" for name in denied)
        raise InputError(f"store {endpoint}: the user may not run commands that are needed: {names}; see docs/store.md")


def replayed_commands(bucket_key: bytes) -> list[KeyCommand]:
    """Commands that return whether the default user may do to a bucket what its append-only file holds: OK if so."""
    asked = [[bucket_key if word == "K" else word for word in line.split()] for line in _REPLAYED]
    return [KeyCommand(bucket_key, ("ACL", "DRYRUN", "default", *words), TEXT) for words in asked]


def check_replay(endpoint: str, info: Mapping[str, Any]) -> str:
    """Refuse a server that drops transactions with rows when it loads its append-only file.

    Args:
        endpoint: the server, for the message.
        info: its INFO, with the answers to `replayed_commands`; without them nothing is known.

    Returns:
        Advice about a server that does not tell; else nothing.

    Raises:
        InputError: names the server and the fix.
    """
    if "answers" not in info or not drops_transactions(info):
        return ""
    answers: Sequence[bytes] | None = info["answers"]
    name, version = release_of(info) or ("", ())
    label = f"store {endpoint} ({name} {'.'.join(map(str, version))})"
    fix = "ACL SETUSER default off ~* &* +@all, and set the same in its configuration; see docs/store.md"
    if answers is None:
        return (
            f"{label} does not tell what its default user may do: without all rights, a restart would drop every "
            f"transaction from its append-only file. Grant this user +acl|dryrun, or make sure of {fix}"
        )
    denied = [line.partition(" ")[0] for line, answer in zip(_REPLAYED, answers, strict=True) if answer != b"OK"]
    if denied:
        raise InputError(
            f"{label} would lose rows when it is restarted: it loads its append-only file with the rights of the "
            f"default user, which may not run {', '.join(map(repr, denied))}; run {fix}"
        )
    return ""


def check_eviction(endpoint: str, info: Mapping[str, Any]) -> None:
    """Refuse a server that can evict rows.

    Args:
        endpoint: the server, for the message.
        info: its INFO.

    Raises:
        InputError: names the server, its settings and the fix.
    """
    policy, max_bytes = info.get("maxmemory_policy"), info_number(endpoint, info, "maxmemory")
    if policy is None:
        raise InputError(f"store {endpoint}: INFO does not tell maxmemory_policy, so rows may be dropped")
    if max_bytes > 0 and policy != "noeviction":
        raise InputError(
            f"store {endpoint} drops rows when full: maxmemory {max_bytes} with maxmemory-policy {policy}, "
            f"expected noeviction; run CONFIG SET maxmemory-policy noeviction"
        )


def needs_appendfsync(durability: str) -> bool:
    """Whether `check_durability` needs the server's appendfsync."""
    return durability != "memory"


def check_durability(endpoint: str, info: Mapping[str, Any], appendfsync: str, durability: str) -> None:
    """Refuse a server that is less durable than `store.durability`.

    Args:
        endpoint: the server, for the message.
        info: its INFO.
        appendfsync: from its CONFIG GET; only used if `needs_appendfsync`.
        durability: the value of `store.durability`.

    Raises:
        InputError: names the server, its settings and the fix.
    """
    if durability == "memory":
        return
    if not info_number(endpoint, info, "aof_enabled"):
        raise InputError(
            f"store {endpoint} keeps rows in memory only: appendonly is no, but store.durability is {durability}; "
            f"run CONFIG SET appendonly yes, or set store.durability = memory"
        )
    if appendfsync not in _at_least(durability):
        raise InputError(
            f"store {endpoint} has appendfsync {appendfsync}, but store.durability is {durability}; "
            f"run CONFIG SET appendfsync {durability}, or set a weaker store.durability"
        )


def check_still_durable(endpoint: str, info: Mapping[str, Any], durability: str) -> None:
    """Raise StoreError if a running server no longer provides `durability`. `info`: INFO plus appendfsync."""
    if durability == "memory":
        return
    if not info_number(endpoint, info, "aof_enabled"):
        raise StoreError(f"store {endpoint}: appendonly is now no, but store.durability is {durability}")
    appendfsync = str(info.get("appendfsync", durability))
    if appendfsync not in _at_least(durability):
        raise StoreError(f"store {endpoint}: appendfsync is now {appendfsync}, but store.durability is {durability}")
    status = info.get("aof_last_write_status", "ok")
    if status != "ok":
        raise StoreError(
            f"store {endpoint} cannot write its append-only file: aof_last_write_status is {status}, expected ok; "
            "is its disk full?"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServerState:
    """Fields of INFO that must not change while a job runs; `evicted` and `expired` count keys."""

    run_id: str
    role: str
    evicted: int
    expired: int

    @classmethod
    def from_info(cls, endpoint: str, info: Mapping[str, Any]) -> _ServerState:
        return cls(
            run_id=str(info.get("run_id", "")),
            role=str(info.get("role", "master")),
            evicted=info_number(endpoint, info, "evicted_keys"),
            expired=info_number(endpoint, info, "expired_keys"),
        )


class ServerMonitor:
    """Compares every server's INFO with the one before.

    Expired keys are counted, not refused: other users of a server may let their keys expire.

    Args:
        infos: (endpoint, INFO) of every server.
        durability: the value of `store.durability`.
    """

    def __init__(self, infos: list[tuple[str, Mapping[str, Any]]], durability: str) -> None:
        self._durability = durability
        self._states = {endpoint: _ServerState.from_info(endpoint, info) for endpoint, info in infos}

    def check(self, infos: list[tuple[str, Mapping[str, Any]]]) -> bool:
        """Compare, and keep these for the next check. A cluster's nodes may come and go.

        Returns:
            whether keys have expired on any server since the last check.

        Raises:
            StoreError: names the server, the old and the new value.
        """
        has_expired = False
        for endpoint, info in infos:
            try:
                now = _ServerState.from_info(endpoint, info)
                check_eviction(endpoint, info)
            except InputError as error:  # a valid setting when the job began: no longer the user's input
                raise StoreError(str(error)) from error
            before = self._states.get(endpoint, now)
            _compare(endpoint, before, now)
            check_still_durable(endpoint, info, self._durability)
            has_expired = has_expired or now.expired != before.expired
        self._states = {endpoint: _ServerState.from_info(endpoint, info) for endpoint, info in infos}
        return has_expired


def _compare(endpoint: str, before: _ServerState, now: _ServerState) -> None:
    if now.run_id != before.run_id:
        raise StoreError(
            f"store {endpoint} was started again while the job ran: run_id was {before.run_id}, is {now.run_id}; "
            "rows may be lost"
        )
    if now.role != before.role:
        raise StoreError(f"store {endpoint} changed its role from {before.role} to {now.role}")
    if now.evicted not in (before.evicted, 0):  # CONFIG RESETSTAT resets it to 0
        raise StoreError(f"store {endpoint} has evicted keys: evicted_keys was {before.evicted}, is {now.evicted}")


def _at_least(durability: str) -> tuple[str, ...]:
    return DURABILITIES[DURABILITIES.index(durability) :]
