"""Refusals that pass: error replies of a server that will accept the same command later. The one table of them. Pure.

    error line, or redis-py's error ──is_passing──> wait and send it again, until store.timeout_s     else ──> an error

A refused command was not executed, alone, in a transaction or in a script: servers decide before the first write. So it
can be sent again whatever it is.

Not in the table: a server without memory (OOM) or without room for its append-only file (MISCONF Errors writing to the
AOF file). It has that room again only if somebody makes some: `bagpipe.store.redis.remedies` says so at once.
"""

from __future__ import annotations

import re
from types import MappingProxyType

__all__ = ["PASSING", "is_passing", "is_passing_error", "line_of"]

#: First word of an error line -> what the rest of it must contain. The texts are those of Redis and Valkey.
PASSING = MappingProxyType(
    {
        "BUSY": "",  # a script runs for longer than busy-reply-threshold
        "CLUSTERDOWN": "",  # a slot that no node serves, or too few masters, for example during a failover
        "ERR": "max number of clients",  # the limit of connections (maxclients)
        "LOADING": "",  # the server reads its files, or is a replica that gets its master's rows
        "MASTERDOWN": "",  # a replica without its master
        "MISCONF": "RDB snapshots",  # the last snapshot failed; the next can succeed
        "NOREPLICAS": "",  # fewer replicas than min-replicas-to-write are up to date
        "READONLY": "",  # the master became a replica during a failover
        "TRYAGAIN": "",  # the keys of a slot that moves are on two nodes
    }
)

#: Before the cause: of a transaction; of a script, by servers before Redis 7; of a pipeline, by redis-py.
_BEFORE_THE_CAUSE = re.compile(
    r"^EXECABORT Transaction discarded because of: |^.*@user_script: ?\d+: |^Command # .* of pipeline caused error: ",
    re.DOTALL,
)


def is_passing(line: str) -> bool:
    """Whether an error line says that the same command can succeed a little later.

    Args:
        line: of an error reply, with or without its leading minus.
    """
    cause = _BEFORE_THE_CAUSE.sub("", line.removeprefix("-")).removeprefix("-")
    word, _, rest = cause.partition(" ")
    return word in PASSING and PASSING[word] in rest


def is_passing_error(error: BaseException) -> bool:
    """`is_passing` for an error of redis-py."""
    return is_passing(line_of(error))


def line_of(error: BaseException) -> str:
    """The error line that redis-py made an error of; it drops the words that it knows."""
    text = _BEFORE_THE_CAUSE.sub("", str(error))
    code = getattr(error, "status_code", None)
    return f"{code} {text}" if code and not text.startswith(f"{code} ") else text
