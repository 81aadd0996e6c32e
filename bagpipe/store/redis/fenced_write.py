"""Fenced writes: MULTI transactions that a store accepts only from a bucket's owner, once and in order. No I/O.

    MULTI                                        no reader sees, and no crash leaves, half of a group
    EVAL open   bucket, its open name, log …     append the fields to the log; if the log then has the expected length,
                                                 rename the bucket to its open name, else remove the fields again
    HSET        open name, fields and rows …     plain, so that no row passes through Lua
    EVAL close  bucket, its open name …          rename it back; if the bucket still exists, it was not opened: delete
                                                 the open name
    EXEC

The guard fails closed: if anything fails before the rename (log length, script, missing right), the rows end up under a
name that no reader uses. `bagpipe.store.redis.log_guard` says what the log's length means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bagpipe.errors import StoreError
from bagpipe.store.redis.link import Bytes
from bagpipe.store.redis.log_guard import (
    ANSWER_BYTES,
    REFUSAL_BYTES,
    GuardedCommand,
    bulk_strings,
    check_refusals,
    eval_head,
    eval_request,
    guarded_eval,
    log_error,
    strange_reply,
)
from bagpipe.store.redis.resp import ErrorLine, Reply, parse_reply
from bagpipe.store.redis.resp_rows import ErrorReply

__all__ = ["Rotation", "Transaction"]

#: Returns 0, or for each rejected bucket: its number, the length its log would have had, its owner.
_OPEN = b"""local refused={}
for i=1,#KEYS/3 do
local bucket,open,log=KEYS[3*i-2],KEYS[3*i-1],KEYS[3*i]
local length=redis.pcall('RPUSHX',log,ARGV[2*i])
if length==tonumber(ARGV[2*i-1]) then
if redis.pcall('RENAME',bucket,open).err then redis.call('DEL',open) end
else
if redis.call('EXISTS',bucket)==0 then redis.call('HSET',bucket,'','') end
if type(length)=='table' then length=length.err elseif length>0 then redis.call('RPOP',log) end
local owner=redis.pcall('GET',bucket..':owner')
refused[#refused+1]={i,length,type(owner)=='string' and owner or ''}
end
end
return #refused>0 and refused or 0"""

#: Returns the number of open buckets.
_CLOSE = b"""local closed=0
for i=1,#KEYS,2 do
if redis.call('RENAMENX',KEYS[i+1],KEYS[i])==1 then closed=closed+1
else redis.call('DEL',KEYS[i+1]) redis.call('HDEL',KEYS[i],'') end
end
return closed"""

#: Returns the length of the old log, 0 if the bucket has no logs, and the bucket's owner. Idempotent.
_ROTATE = b"""local length=redis.call('LLEN',KEYS[1])
if redis.call('EXISTS',KEYS[3])==0 then length=0 end
if length==tonumber(ARGV[1]) and redis.call('EXISTS',KEYS[2])==0 then
redis.call('RPUSH',KEYS[2],'')
redis.call('SADD',KEYS[3],ARGV[2])
end
return {length,redis.call('GET',KEYS[4]) or ''}"""

_MULTI = b"*1\r\n$5\r\nMULTI\r\n"
_EXEC = b"*1\r\n$4\r\nEXEC\r\n"
_ABORTED = "EXECABORT Transaction discarded because of: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Transaction:
    """A MULTI transaction of guarded commands, each of a different bucket.

    Attributes:
        token: the writer's token.
        commands: in order.
    """

    token: str
    commands: tuple[GuardedCommand, ...]

    def head(self, fields: Sequence[bytes]) -> bytes:
        """Bytes before the HSETs; these write to `GuardedCommand.open`.

        Args:
            fields: for each command, the concatenated 12-byte fields of its rows.
        """
        return _MULTI + guarded_eval(_OPEN, self.commands, fields)

    def tail(self) -> bytes:
        """Bytes after the HSETs."""
        closing = [bulk_strings(command[:2]) for command in self.commands]
        return b"".join([eval_head(_CLOSE, 2 * len(closing), 0), *closing, _EXEC])

    @property
    def max_reply_bytes(self) -> int:
        """Maximum length of the whole reply."""
        return (ANSWER_BYTES + REFUSAL_BYTES) * (len(self.commands) + 3)

    def accept(self, buffer: Bytes, start: int, end: int) -> int | None:
        """Offset after the replies; None while they are incomplete.

        Raises:
            FencedError: a bucket has another owner.
            RolledBackError: a log is missing; `ShortLog` if it is too short.
            ErrorReply: the transaction was rejected as a whole; the error spans all replies.
            StoreError: any other reply.
        """
        data = buffer[start:end].tobytes()
        if data.startswith(usual := _usual_replies(len(self.commands))):
            return start + len(usual)
        queued = _queued(len(self.commands))
        if data.startswith(queued):
            parsed = parse_reply(data, len(queued))
        elif queued.startswith(data):
            return None
        else:
            return self._refused(data, start)
        if parsed is None:
            return None
        answers, after = parsed
        if isinstance(answers, ErrorLine):
            raise ErrorReply(answers.line.removeprefix(_ABORTED), start, start + after)
        self._check(answers, start, start + after)
        return start + after

    def _refused(self, data: bytes, start: int) -> int | None:
        """Raise for the first command that was not queued, once all replies have arrived."""
        line, position = None, 0
        for _ in range(len(self.commands) + 4):
            parsed = parse_reply(data, position)
            if parsed is None:
                return None
            if line is None and isinstance(parsed.reply, ErrorLine):
                line = parsed.reply.line
            position = parsed.end
        if line is None:
            raise StoreError(f"the store answered {data[:40]!r} to a transaction")
        raise ErrorReply(line, start, start + position)

    def _check(self, answers: Reply, start: int, end: int) -> None:
        commands = self.commands
        if not isinstance(answers, list) or len(answers) != len(commands) + 2:
            raise StoreError(f"the store answered {answers!r:.80} to a transaction of {len(commands)} commands")
        opened, *counts, closed = answers
        num_refused = 0
        if isinstance(opened, list):
            num_refused = len(opened)
            check_refusals(opened, self.token, self.commands, start, end)
        elif opened != 0:
            raise strange_reply(opened)
        for command, count in zip(commands, counts, strict=True):
            if not isinstance(count, int) or not 0 <= count <= command.num_rows:
                raise strange_reply(count)
        if closed != len(commands) - num_refused:
            raise strange_reply(closed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Closes one bucket's log and opens the next.

    Attributes:
        token: the writer's token.
        bucket: key of the bucket.
        log: key of the log to close.
        length: its expected elements.
        next_log: key of the next log.
        next_name: name of the next log in the set of logs.
        logs: key of the set of logs.
        owner: key of the bucket's owner.
    """

    token: str
    bucket: bytes
    log: bytes
    length: int
    next_log: bytes
    next_name: bytes
    logs: bytes
    owner: bytes

    def encode(self) -> bytes:
        """Bytes of the request."""
        return eval_request(
            _ROTATE, [self.log, self.next_log, self.logs, self.owner], [b"%d" % self.length, self.next_name]
        )

    @property
    def max_reply_bytes(self) -> int:
        """Maximum length of the reply."""
        return REFUSAL_BYTES

    def accept(self, buffer: Bytes, start: int, end: int) -> int | None:
        """See `Transaction.accept`."""
        parsed = parse_reply(buffer[start:end].tobytes(), 0)
        if parsed is None:
            return None
        match parsed.reply:
            case [int(length), bytes(owner)]:
                if length != self.length:
                    raise log_error(self.token, self.bucket, self.length, length, owner, start + parsed.end)
            case ErrorLine(line):
                raise ErrorReply(line, start, start + parsed.end)
            case other:
                raise strange_reply(other)
        return start + parsed.end


@lru_cache(maxsize=256)
def _queued(num_commands: int) -> bytes:
    return b"+OK\r\n" + b"+QUEUED\r\n" * (num_commands + 2)


@lru_cache(maxsize=256)
def _usual_replies(num_commands: int) -> bytes:
    """Replies to a transaction that every bucket accepts and that replaces rows only."""
    answers = b":0\r\n" + b":0\r\n" * num_commands + b":%d\r\n" % num_commands
    return _queued(num_commands) + b"*%d\r\n" % (num_commands + 2) + answers
