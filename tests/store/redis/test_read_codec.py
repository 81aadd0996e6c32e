"""Requests of one link and the rows that their replies fill in, without a server."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.store.keys import bucket_key
from bagpipe.store.redis.read_codec import ReadCodec, ReadGroup
from bagpipe.store.redis.request_pipeline import Accepted
from bagpipe.store.redis.routing import Router, servers_of_buckets
from bagpipe.store.redis.row_codecs import max_command_rows
from bagpipe.store.row_checksum import check_words
from tests.store.redis.test_row_replies import encode_replies

NUM_BUCKETS, ROW_BYTES = 8, 256


@pytest.mark.parametrize("one_by_one", [False, True])
@given(st.lists(st.booleans(), min_size=1, max_size=1000), st.lists(st.integers(1, 1 << 16), max_size=5))
def test_replies_in_any_pieces_fill_the_group(one_by_one: bool, found: list[bool], sizes: list[int]) -> None:
    there, ids = np.array(found), np.arange(len(found)) * 7919
    router = Router(servers_of_buckets(NUM_BUCKETS, 1))
    routed = router.route([(3, ids)])
    rows = np.random.default_rng(0).random((len(ids), ROW_BYTES // 4), np.float32).view(f"V{ROW_BYTES}").ravel()
    checks = check_words(np.array([3], np.uint32), ids, rows)
    checks[::5] += np.uint64(1)
    group = ReadGroup(
        routed=routed,
        rows=np.empty_like(rows),
        checks=np.empty_like(checks),
        found=np.ones(len(ids), np.bool_),
    )
    commands = list(router.commands(routed, 0, max_rows=max_command_rows(ROW_BYTES)))
    codec = ReadCodec([bucket_key("job", bucket) for bucket in range(NUM_BUCKETS)], one_by_one=one_by_one)
    requests = [request for frame in codec.frames(group, commands) for request in frame]
    assert sum(b"".join(request.pieces).count(b"HMGET") for request in requests) == len(commands)
    if one_by_one:
        assert len(requests) == len(commands)
    values = [rows[at].tobytes() + checks[at].tobytes() if there[at] else None for at in routed.order]
    data = encode_replies([values[command.start : command.stop] for command in commands])
    buffer = np.frombuffer(data + b"\0" * 16, np.uint8)
    longest = sum(request.max_reply_bytes for request in requests)
    assert longest - len(data) == np.count_nonzero(~there) * (len(b"$264\r\n\r\n") + 264 - len(b"$-1\r\n"))
    position, num_ended = 0, 0
    ends = np.minimum(np.cumsum([0, *sizes, len(data)]), len(data)).tolist()
    for _, end in pairwise(ends):
        while num_ended < len(requests):
            accepted = requests[num_ended].accept(buffer, position, end)
            if accepted is None:
                break
            assert isinstance(accepted, Accepted)
            position, num_ended = accepted.end, num_ended + accepted.num_requests
            if not accepted.num_requests:
                break
    assert (position, num_ended) == (len(data), len(requests))
    assert (group.found == there).all()
    assert (group.rows[there] == rows[there]).all()
    assert (group.checks[there] == checks[there]).all()
    assert sorted(at for part in group.damaged for at in part.tolist()) == (np.flatnonzero(there[::5]) * 5).tolist()
