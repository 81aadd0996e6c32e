"""Fenced deletions: one script per request, which a store runs only for a bucket's owner, once and in order. No I/O.

    EVAL  bucket, its open name, log …    append the fields to the log; if the log then has the expected length, HDEL
                                          them from the bucket, else remove the group from the log again

A script does what the MULTI of `bagpipe.store.redis.fenced_write` does, because no row passes through it. If it fails
behind the log, the log names rows that are still there, which does no harm. The open name is not used; naming it makes
a cluster's node answer TRYAGAIN while the bucket's slot moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.store.redis.link import Bytes
from bagpipe.store.redis.log_guard import (
    ANSWER_BYTES,
    REFUSAL_BYTES,
    GuardedCommand,
    check_refusals,
    guarded_eval,
    strange_reply,
)
from bagpipe.store.redis.resp import ErrorLine, parse_reply
from bagpipe.store.redis.resp_rows import ErrorReply

__all__ = ["Deletion"]

#: Returns 0, or for each rejected bucket: its number, the length its log would have had (or an error), its owner.
#: Lua's unpack fails near 8,000 fields.
_DELETE = b"""local refused={}
for i=1,#KEYS/3 do
local bucket,log,blob=KEYS[3*i-2],KEYS[3*i],ARGV[2*i]
local length=redis.pcall('RPUSHX',log,blob)
local owner
if length==tonumber(ARGV[2*i-1]) then
local fields={}
for at=1,#blob,12 do fields[#fields+1]=string.sub(blob,at,at+11) end
local removed=redis.pcall('HDEL',bucket,unpack(fields))
if type(removed)=='table' then length,owner=removed.err,'' end
else
if type(length)=='table' then length=length.err elseif length>0 then redis.call('RPOP',log) end
owner=redis.pcall('GET',bucket..':owner')
end
if owner~=nil then refused[#refused+1]={i,length,type(owner)=='string' and owner or ''} end
end
return #refused>0 and refused or 0"""

_DONE = b":0\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A script that removes rows, from one bucket or several.

    Attributes:
        token: the writer's token.
        commands: in order, each of a different bucket.
    """

    token: str
    commands: tuple[GuardedCommand, ...]

    def encode(self, fields: Sequence[bytes]) -> bytes:
        """Bytes of the request. `fields`: for each command, the concatenated 12-byte fields of its rows."""
        return guarded_eval(_DELETE, self.commands, fields)

    @property
    def max_reply_bytes(self) -> int:
        """Maximum length of the reply."""
        return ANSWER_BYTES + REFUSAL_BYTES * len(self.commands)

    def accept(self, buffer: Bytes, start: int, end: int) -> int | None:
        """Offset after the reply; None while it is incomplete.

        Raises:
            FencedError: a bucket has another owner.
            RolledBackError: a log is missing; `ShortLog` if it is too short.
            ErrorReply: the script, or a write in it, was rejected.
            StoreError: any other reply.
        """
        data = buffer[start:end].tobytes()
        if data.startswith(_DONE):
            return start + len(_DONE)
        parsed = parse_reply(data, 0)
        if parsed is None:
            return None
        match parsed.reply:
            case list(refusals):
                check_refusals(refusals, self.token, self.commands, start, start + parsed.end)
            case ErrorLine(line):
                raise ErrorReply(line, start, start + parsed.end)
            case other:
                raise strange_reply(other)
        return start + parsed.end
