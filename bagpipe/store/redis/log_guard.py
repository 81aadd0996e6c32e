"""Guards of logged groups: what fenced writes and fenced deletions share. No I/O.

    GuardedCommand ──> EVAL with the bucket's keys and the length that its log must have after the group
    refusal of a bucket ──check_refusal──> an earlier attempt has done it | FencedError, RolledBackError, ShortLog

Scripts are sent as text, not by digest: that costs a microsecond, and a server cannot have forgotten them.
The log's length tells what happened. No log: the bucket has another owner, or the server lost the log. Longer than
expected: the group was written before (a connection broke and it was sent again). Shorter: the server lost groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from bagpipe.errors import FencedError, RolledBackError, StoreError
from bagpipe.store.redis.remedies import with_remedy
from bagpipe.store.redis.resp import ErrorLine, Reply
from bagpipe.store.redis.resp_rows import ErrorReply

__all__ = [
    "ANSWER_BYTES",
    "REFUSAL_BYTES",
    "GuardedCommand",
    "ShortLog",
    "bulk_strings",
    "check_refusals",
    "eval_head",
    "eval_request",
    "guarded_eval",
    "log_error",
    "strange_reply",
]

#: Maximum bytes of one rejection and of one command's reply, without error lines.
REFUSAL_BYTES = 160
ANSWER_BYTES = 40


class ShortLog(RolledBackError):
    """A log is shorter than expected; nothing was changed.

    Attributes:
        end: offset after the reply.
    """

    def __init__(self, message: str, end: int) -> None:
        super().__init__(message)
        self.end = end


class GuardedCommand(NamedTuple):
    """Guard of one HSET or HDEL. A tuple, because a batch creates one per bucket.

    Attributes:
        bucket: key of the bucket.
        open: key of the bucket while it is written.
        log: key of the writer's log.
        length: elements of the log including this group.
        num_rows: rows of the command.
    """

    bucket: bytes
    open: bytes
    log: bytes
    length: int
    num_rows: int


def check_refusals(
    refusals: Sequence[Reply], token: str, commands: Sequence[GuardedCommand], start: int, end: int
) -> None:
    """Return if every rejected group was applied by an earlier attempt.

    Args:
        refusals: of each rejected bucket: its number from 1, the length its log would have had, its owner.
        token: the writer's token.
        commands: all commands of the request.
        start: offset of the reply.
        end: offset after the reply.

    Raises:
        ErrorReply: the server refused to write a group. One that refuses the first write of a script refuses all.
        FencedError, RolledBackError, StoreError: a group is not applied.
    """
    for refusal in refusals:
        match refusal:
            case [int(number), int(length), bytes(owner)] if 1 <= number <= len(commands):
                command = commands[number - 1]
                if length <= command.length:
                    # `length` includes the group that the guard appended.
                    raise log_error(token, command.bucket, command.length - 1, max(length - 1, 0), owner, end)
            case [int(), bytes(words), bytes()]:
                raise ErrorReply(words.decode(errors="replace"), start, end)
            case _:
                raise strange_reply(refusal)


def log_error(token: str, bucket: bytes, expected: int, found: int, owner: bytes, end: int) -> StoreError:
    """The error for a log of unexpected length; lengths include the first, empty element."""
    label = f"bucket {bucket.decode()}"
    generation = token.partition("-")[0]
    if owner and owner != token.encode():
        theirs = owner.decode(errors="replace").partition("-")[0]
        return FencedError(
            f"{label} was taken over by another start of a job (generation {theirs}, this one is {generation}); "
            "nothing more is written"
        )
    if found == 0:
        return RolledBackError(f"{label}: the store has lost the log of this job; rows may be lost")
    return ShortLog(
        f"{label}: the store acknowledged {expected - 1} groups of rows and has {found - 1} in its log", end
    )


def strange_reply(reply: Reply) -> StoreError:
    """The error for a reply that no script gives."""
    if isinstance(reply, ErrorLine):
        return StoreError(f"the store answered an error: {with_remedy(reply.line)}")
    return StoreError(f"the store answered {reply!r:.80} to a fenced write")


def guarded_eval(script: bytes, commands: Sequence[GuardedCommand], fields: Sequence[bytes]) -> bytes:
    """Bytes of an EVAL: three keys of each command, then two values of each, its length and its fields.

    Args:
        script: returns 0, or the refusals of `check_refusals`.
        commands: in order, each of a different bucket.
        fields: for each command, the concatenated 12-byte fields of its rows.
    """
    parts = [eval_head(script, 3 * len(commands), 2 * len(commands))]
    parts += [bulk_strings(command[:3]) for command in commands]
    for command, blob in zip(commands, fields, strict=True):
        length = b"%d" % command.length
        parts.append(b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(length), length, len(blob), blob))
    return b"".join(parts)


def eval_request(script: bytes, keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    """Bytes of an EVAL."""
    words = [b"$%d\r\n%b\r\n" % (len(word), word) for word in (*keys, *values)]
    return eval_head(script, len(keys), len(values)) + b"".join(words)


@lru_cache(maxsize=1024)
def eval_head(script: bytes, num_keys: int, num_values: int) -> bytes:
    """An EVAL without its keys and values."""
    return b"*%d\r\n" % (3 + num_keys + num_values) + bulk_strings((b"EVAL", script, b"%d" % num_keys))


@lru_cache(maxsize=4096)
def bulk_strings(words: tuple[bytes, ...]) -> bytes:
    """Words as elements of an array. The keys of a bucket recur with every batch."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
