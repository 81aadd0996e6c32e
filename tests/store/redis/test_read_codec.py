"""Requests of one link and the rows that their replies fill in, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bagpipe.store.keys import bucket_key
from bagpipe.store.redis.cluster_routing import Address, NodeCommands, PendingCommand
from bagpipe.store.redis.read_codec import ReadCodec, ReadGroup, damaged_rows
from bagpipe.store.redis.request_pipeline import Accept, Accepted, Request
from bagpipe.store.redis.routing import BucketCommand, Router, servers_of_buckets
from bagpipe.store.redis.row_codecs import max_command_rows
from bagpipe.store.row_checksum import check_words
from tests.store.redis.test_row_replies import encode_replies

NUM_BUCKETS, ROW_BYTES = 8, 256


class Job:
    """Rows of table 3 to read from one server, every fifth with a wrong check word.

    Args:
        num_rows: rows.
    """

    def __init__(self, num_rows: int) -> None:
        self.ids = np.arange(num_rows) * 7919
        router = Router(servers_of_buckets(NUM_BUCKETS, 1))
        self.routed = router.route([(3, self.ids)])
        row_words = np.random.default_rng(0).random((num_rows, ROW_BYTES // 4), np.float32)
        self.rows = row_words.view(f"V{ROW_BYTES}").ravel()
        self.checks = check_words(np.array([3], np.uint32), self.ids, self.rows)
        self.checks[::5] += np.uint64(1)
        self.group = ReadGroup(
            routed=self.routed,
            rows=np.empty_like(self.rows),
            checks=np.empty_like(self.checks),
            found=np.ones(num_rows, np.bool_),
        )
        self.commands = list(router.commands(self.routed, 0, max_rows=max_command_rows(ROW_BYTES)))

    def requests(self, commands: Sequence[BucketCommand], *, one_by_one: bool) -> list[Request]:
        codec = ReadCodec([bucket_key("job", bucket) for bucket in range(NUM_BUCKETS)], one_by_one=one_by_one)
        return [request for frame in codec.frames(self.group, commands) for request in frame]

    def replies(self, commands: Sequence[BucketCommand], there: NDArray[np.bool_]) -> list[bytes]:
        """Reply to each command if these rows are in the store."""
        values = [
            self.rows[at].tobytes() + self.checks[at].tobytes() if there[at] else None for at in self.routed.order
        ]
        return [encode_replies([values[command.start : command.stop]]) for command in commands]

    def is_read(self, there: NDArray[np.bool_]) -> bool:
        """Whether the group has these rows, and knows which are damaged."""
        group = self.group
        assert (group.found == there).all()
        assert (group.rows[there] == self.rows[there]).all()
        assert (group.checks[there] == self.checks[there]).all()
        return damaged_rows(group).tolist() == (np.flatnonzero(there[::5]) * 5).tolist()


def receive(accepts: Sequence[Accept], data: bytes, sizes: Sequence[int]) -> tuple[int, int]:
    """Accept `data` in pieces of these sizes, the rest in one piece. Returns the bytes and requests accepted."""
    buffer = np.frombuffer(data + b"\0" * 16, np.uint8)
    position, num_ended = 0, 0
    for _, end in pairwise(np.minimum(np.cumsum([0, *sizes, len(data)]), len(data)).tolist()):
        while num_ended < len(accepts):
            accepted = accepts[num_ended](buffer, position, end)
            if accepted is None:
                break
            position, num_requests, is_all = accepted if isinstance(accepted, Accepted) else (accepted, 1, False)
            num_ended += num_requests
            if is_all:
                break
    return position, num_ended


SIZES = st.lists(st.integers(1, 1 << 16), max_size=5)


@pytest.mark.parametrize("one_by_one", [False, True])
@given(st.lists(st.booleans(), min_size=1, max_size=1000), SIZES)
def test_replies_in_any_pieces_fill_the_group(one_by_one: bool, found: list[bool], sizes: list[int]) -> None:
    there, job = np.array(found), Job(len(found))
    requests = job.requests(job.commands, one_by_one=one_by_one)
    assert sum(b"".join(request.pieces).count(b"HMGET") for request in requests) == len(job.commands)
    if one_by_one:
        assert len(requests) == len(job.commands)
    data = b"".join(job.replies(job.commands, there))
    longest = sum(request.max_reply_bytes for request in requests)
    assert longest - len(data) == np.count_nonzero(~there) * (len(b"$264\r\n\r\n") + 264 - len(b"$-1\r\n"))
    assert receive([request.accept for request in requests], data, sizes) == (len(data), len(requests))
    assert job.is_read(there)


@given(st.lists(st.booleans(), min_size=30, max_size=300), st.sets(st.integers(0, NUM_BUCKETS - 1)), SIZES)
def test_commands_answered_by_error_lines_are_sent_again(found: list[bool], moved: set[int], sizes: list[int]) -> None:
    there, job, pending = np.array(found), Job(len(found)), [0]
    served: list[int] = []
    commands = job.commands
    while pending:
        node = NodeCommands(address=Address("here", 1), commands=[PendingCommand(0, command) for command in commands])
        requests = job.requests(commands, one_by_one=True)
        replies = [
            b"-MOVED 7 there:2\r\n" if command.bucket in moved else reply
            for command, reply in zip(commands, job.replies(commands, there), strict=True)
        ]
        data = b"".join(replies)
        accepts = [partial(node.accept, request.accept) for request in requests]
        assert receive(accepts, data, sizes) == (len(data), len(requests))
        assert [command.command.bucket in moved for command in node.redirected] == [True] * len(node.redirected)
        served += [command.bucket for command in commands if command.bucket not in moved]
        commands = [command.command for command in node.unserved()]
        pending, moved = [command.bucket for command in commands], set()
    assert sorted(served) == sorted(command.bucket for command in job.commands)
    assert job.is_read(there)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_second_attempt_starts_anew(one_by_one: bool) -> None:
    """The connection broke within a reply. Meanwhile rows were written, removed and replaced."""
    job = Job(400)
    first, second = np.arange(400) % 3 > 0, np.arange(400) >= 100
    wrong, job.checks = job.checks, job.checks + np.uint64(7)
    data = b"".join(job.replies(job.commands, first))
    accepts = [request.accept for request in job.requests(job.commands, one_by_one=one_by_one)]
    receive(accepts, data[: len(data) * 3 // 4], [])
    assert len(damaged_rows(job.group)) > 100
    job.checks = wrong
    data = b"".join(job.replies(job.commands, second))
    accepts = [request.accept for request in job.requests(job.commands, one_by_one=one_by_one)]
    assert receive(accepts, data, []) == (len(data), len(accepts))
    assert job.is_read(second)
