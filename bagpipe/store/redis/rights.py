"""Which commands a job runs at its store, and whether its user may. Asked before anything is written.

    bucket key ──script: redis.acl_check_cmd for each command──> commands denied ──> one InputError that names them

A missing right would otherwise show in the middle of a job, with the first lost reply or the first recovery.
Servers before Redis 7 cannot be asked: there it shows when the command is used.
"""

from __future__ import annotations

from bagpipe.errors import InputError
from bagpipe.store.redis.servers import KeyCommand

__all__ = ["COMMANDS", "ask_rights", "refuse_missing_rights"]

#: Those of the rows' own path, of its scripts, of the ledger and of the namespace.
COMMANDS = (
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

_ASK = """
local denied = {}
if redis.acl_check_cmd then
  for _, command in ipairs(ARGV) do
    if not redis.acl_check_cmd(command, KEYS[1], KEYS[1], KEYS[1]) then table.insert(denied, command) end
  end
end
return denied
"""


def ask_rights(bucket_key: bytes) -> KeyCommand:
    """Answers the commands that the user may not run on the bucket's keys."""
    return KeyCommand(bucket_key, ("EVAL", _ASK, 1, bucket_key, *COMMANDS))


def refuse_missing_rights(place: str, denied: list[bytes]) -> None:
    """InputError if anything is denied: names the server and the commands."""
    if denied:
        names = ", ".join(f"'{name.decode()}'" for name in denied)
        raise InputError(f"store {place}: the user may not run commands that are needed: {names}; see docs/store.md")
