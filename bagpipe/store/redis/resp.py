"""RESP parser for short replies of any type. No I/O. Replies with rows are decoded by `resp_rows`.

+text   :number   $length text   *count values   -error line
  str      int       bytes          list           ErrorLine     `$-1` and `*-1`: None
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bagpipe.errors import StoreError

__all__ = ["ErrorLine", "Parsed", "Reply", "parse_reply"]

_CRLF = b"\r\n"
#: Bounds of the replies parsed here.
_MAX_DEPTH = 4
_MAX_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class ErrorLine:
    """An error reply, without its leading minus."""

    line: str


Reply = str | int | bytes | None | ErrorLine | list["Reply"]


class Parsed(NamedTuple):
    """A reply, and the offset after it."""

    reply: Reply
    end: int


def parse_reply(data: bytes, start: int, depth: int = 0) -> Parsed | None:
    """The reply at `start`; None while it is incomplete.

    Raises:
        StoreError: a malformed reply.
    """
    stop = data.find(_CRLF, start)
    if stop < 0:
        return None
    kind, text, after = data[start : start + 1], data[start + 1 : stop], stop + len(_CRLF)
    if kind == b"+":
        return Parsed(text.decode(errors="replace"), after)
    if kind == b"-":
        return Parsed(ErrorLine(text.decode(errors="replace")), after)
    if kind not in (b":", b"$", b"*") or not text.lstrip(b"-").isdigit() or depth > _MAX_DEPTH:
        raise StoreError(f"the store answered {data[start : start + 40]!r}, expected a reply")
    number = int(text)
    if kind == b":":
        return Parsed(number, after)
    if number < 0:
        return Parsed(None, after)
    if kind == b"$":
        end = after + number
        return Parsed(data[after:end], end + len(_CRLF)) if len(data) >= end + len(_CRLF) else None
    if number > _MAX_ELEMENTS:
        raise StoreError(f"the store answered an array of {number} elements")
    elements: list[Reply] = []
    for _ in range(number):
        parsed = parse_reply(data, after, depth + 1)
        if parsed is None:
            return None
        elements.append(parsed.reply)
        after = parsed.end
    return Parsed(elements, after)
