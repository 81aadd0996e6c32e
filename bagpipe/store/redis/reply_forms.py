"""Forms of the replies to administrative commands, and numbers of INFO. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bagpipe.errors import InputError

__all__ = [
    "BUCKET_STATE",
    "COUNT",
    "DURATION",
    "NAMES",
    "PAIRS",
    "TEXT",
    "TEXTS",
    "TEXT_OR_NONE",
    "ReplyForm",
    "info_number",
]


class ReplyForm(NamedTuple):
    """What a command may be answered.

    Attributes:
        name: for messages.
        fits: whether a decoded reply has this form.
    """

    name: str
    fits: Callable[[object], bool]


def _is_count(reply: object) -> bool:
    return isinstance(reply, int) and reply >= 0


def _are_texts(reply: object) -> bool:
    return isinstance(reply, list) and all(isinstance(element, bytes) for element in reply)


def _are_names(reply: object) -> bool:
    return isinstance(reply, list | set) and all(isinstance(element, bytes) for element in reply)


def _are_pairs(reply: object) -> bool:
    return isinstance(reply, list) and len(reply) % 2 == 0 and _are_texts(reply)


def _is_bucket_state(reply: object) -> bool:
    if not isinstance(reply, list) or len(reply) < _STATE_WORDS or len(reply) % 2 == 0:
        return False
    return _are_texts([*reply[:2], *reply[3::2]]) and all(map(_is_count, reply[2::2]))


#: Owner, checkpoint id, number of rows.
_STATE_WORDS = 3

COUNT = ReplyForm("a count", _is_count)
#: Of PTTL: -1 without an end, -2 without a key.
DURATION = ReplyForm("a number", lambda reply: isinstance(reply, int))
TEXT = ReplyForm("a text", lambda reply: isinstance(reply, bytes))
TEXT_OR_NONE = ReplyForm("a text or nothing", lambda reply: reply is None or isinstance(reply, bytes))
TEXTS = ReplyForm("a list of texts", _are_texts)
#: Of SMEMBERS, which redis-py makes a set.
NAMES = ReplyForm("a set of texts", _are_names)
PAIRS = ReplyForm("a list of names and values", _are_pairs)
#: Of `bagpipe.store.redis.ledger_scripts.STATE`.
BUCKET_STATE = ReplyForm("the state of a bucket", _is_bucket_state)


def info_number(endpoint: str, info: Mapping[str, Any], name: str) -> int:
    """A number of a server's INFO; 0 if it is not there.

    Raises:
        InputError: something else.
    """
    value = info.get(name, 0)
    if not isinstance(value, int):
        raise InputError(f"store {endpoint}: INFO states {name} {value!r}, expected a number")
    return value
