"""Requests, replies and errors cross as packets."""

from __future__ import annotations

import pytest

from bagpipe import errors
from bagpipe.errors import FencedError, InputError, StoreError
from bagpipe.store.interface import StoreStatistics
from bagpipe.store.process.messages import Kind, Reply, Request, decode_error, encode_error, receive, socket_pair


def test_a_request_comes_back():
    request = Request(kind=Kind.READ, number=(1 << 32) - 1, region=3, size=1 << 40)
    assert Request.decode(request.encode()) == request


def test_a_reply_comes_back_with_its_statistics():
    reply = Reply(number=7, statistics=StoreStatistics(rows_read=1 << 40, failovers=3))
    assert Reply.decode(reply.encode()) == reply


@pytest.mark.parametrize("kind", [*(n for n in errors.__all__ if n.endswith("Error")), "ValueError", "RuntimeError"])
def test_an_error_keeps_its_class_message_and_notes(kind):
    error = getattr(errors, kind, None) or {"ValueError": ValueError, "RuntimeError": RuntimeError}[kind]
    sent = error("store s1: lost “rows”")
    sent.add_note("in bucket 3")
    came = decode_error(encode_error(sent))
    assert (type(came), str(came), came.__notes__) == (error, "store s1: lost “rows”", ["in bucket 3"])


def test_an_error_of_a_subclass_is_one_of_its_base():
    class Unreachable(InputError):
        pass

    assert type(decode_error(encode_error(Unreachable("no server")))) is InputError


def test_an_error_of_another_class_is_a_store_error_that_names_it():
    came = decode_error(encode_error(ZeroDivisionError("division by zero")))
    assert type(came) is StoreError
    assert str(came) == "the store's process failed: ZeroDivisionError: division by zero"


def test_a_long_error_fits_into_a_packet():
    ours, theirs = socket_pair()
    with ours, theirs:
        error = FencedError("\N{GRINNING FACE}" * 1_000_000)
        error.add_note("y" * 1_000_000)
        theirs.send(Reply(number=1, statistics=StoreStatistics(), error=error).encode())
        came = Reply.decode(receive(ours)).error
    assert type(came) is FencedError
    assert str(came).startswith("\N{GRINNING FACE}" * 100)


def test_a_closed_end_is_an_empty_message():
    ours, theirs = socket_pair()
    with ours:
        theirs.close()
        assert receive(ours) == b""
