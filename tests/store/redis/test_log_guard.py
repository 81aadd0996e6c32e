"""Requests that name a group, and refusals of several. More of them: test_fenced_write, test_fenced_delete."""

from __future__ import annotations

import pytest

from bagpipe.errors import FencedError
from bagpipe.store.redis.log_guard import GuardedCommand, check_refusals, eval_request, guarded_eval
from bagpipe.store.redis.resp import parse_reply

TOKEN = "7-" + "0" * 32
COMMANDS = [
    GuardedCommand(bucket=b"b%d" % n, open=b"o%d" % n, log=b"l%d" % n, length=4 + n, num_rows=1) for n in (0, 1)
]


def test_a_guarded_command_states_keys_length_and_fields() -> None:
    request = guarded_eval(b"return 0", COMMANDS, [b"x" * 12, b"y" * 24])
    keys = [b"b0", b"o0", b"l0", b"b1", b"o1", b"l1"]
    values = [b"4", b"x" * 12, b"5", b"y" * 24]
    parsed = parse_reply(request, 0)  # a request is an array of words, as a reply can be
    assert parsed is not None
    assert parsed.reply == [b"EVAL", b"return 0", b"6", *keys, *values]
    assert request == eval_request(b"return 0", keys, values)


def test_groups_that_were_applied_before_and_one_that_was_not() -> None:
    owner = TOKEN.encode()
    check_refusals([[1, 5, owner], [2, 9, owner]], TOKEN, COMMANDS, start=0, end=0)
    with pytest.raises(FencedError, match="bucket b1 was taken over"):
        check_refusals([[1, 5, owner], [2, 0, b"8-" + b"1" * 32]], TOKEN, COMMANDS, start=0, end=0)
