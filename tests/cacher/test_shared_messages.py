"""Large messages to trainers on the cacher's host, through shared memory."""

from __future__ import annotations

import dataclasses
import errno
import json
import os

import pytest

import cacher.server
from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import parse_address
from bagpipe.client.agreement import PROTOCOL_VERSION, settings_of
from bagpipe.client.link import Credentials, Link
from bagpipe.client.shared_ring import RingWriter
from bagpipe.errors import JobError
from tests.cacher.daemons import (
    all_batches,
    assert_same_batches,
    config,
    planned_batches,
    remote,
    served,
    spec_of,
    without_shared_memory,
)

pytestmark = pytest.mark.skipif(not RingWriter.is_supported, reason="files in memory need Linux")


def test_large_messages_go_through_memory(listen: str) -> None:
    """On one host. A trainer that cannot open the cacher's file, and one elsewhere, get the same through the stream."""
    job = config(batch_size=500, limit=5000)
    expected = planned_batches(job, 2)

    def shared_bytes(url: str) -> tuple[int, int]:
        with served(job, url) as server:
            for rank, rank_batches in enumerate(all_batches(str(server.address), job, 2)):
                assert_same_batches(rank_batches, expected[rank])
            totals = server.counters.totals()
            return totals.bytes_shared, totals.bytes_sent

    shared, sent = shared_bytes(listen)
    assert shared == sent
    with without_shared_memory():
        assert shared_bytes(listen) == (0, sent)
    assert shared_bytes("127.0.0.1:0") == (0, sent)


def test_rings_are_bounded(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks beyond the limit get everything through the stream; a stream that ends makes room."""
    monkeypatch.setattr(cacher.server, "descriptor_shares", lambda: (100, 1))
    job = config(batch_size=500, limit=5000)
    expected = planned_batches(job, 2)
    with served(job, listen) as server:
        for _ in range(2):
            before = server.counters.totals()
            for rank, rank_batches in enumerate(all_batches(listen, job, 2)):
                assert_same_batches(rank_batches, expected[rank])
            totals = server.counters.totals()
            shared, sent = (getattr(totals, name) - getattr(before, name) for name in ("bytes_shared", "bytes_sent"))
            assert 0 < shared < sent


@pytest.mark.parametrize("fault", ["short", "refused"])
def test_without_memory_messages_go_through_the_stream(
    listen: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel without memory writes a part of a message, or none of it."""

    def failing(fd: int, parts: list[bytes], offset: int) -> int:
        if fault == "refused":
            raise OSError(errno.ENOSPC, "no space")
        return os.pwrite(fd, b"".join(parts)[:4096], offset)

    job = config(batch_size=500, limit=5000)
    monkeypatch.setattr(os, "pwritev", failing)
    with served(job, listen) as server:
        assert_same_batches(all_batches(listen, job)[0], planned_batches(job)[0])
        assert server.counters.totals().bytes_shared == 0


def test_a_trainer_that_takes_what_was_not_sent_is_dropped(listen: str) -> None:
    job = config(batch_size=500, limit=5000)
    hello = pb.Hello(
        protocol=PROTOCOL_VERSION,
        job_id="lying",
        instance="one",
        world_size=1,
        credits=4,
        settings=json.dumps(settings_of(job)),
    )
    with served(job, listen) as server:
        with remote(listen, job, job_id="schema") as source, Link(parse_address(listen), Credentials()) as link:
            spec = json.dumps(dataclasses.asdict(spec_of(job, source.schema)))
            link.put(hello=hello)
            received = link.messages()
            welcome = next(received).welcome
            with open(f"/proc/{welcome.file.pid}/fd/{welcome.file.fd}", "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"\xff" * 8, len(welcome.file.nonce))
            link.put(start=pb.Start(run=0, phase="train", spec=spec))
            with pytest.raises(JobError, match="did not understand us"):
                list(received)
        assert server.counters.totals().dropped == 1
        assert_same_batches(all_batches(listen, job)[0], planned_batches(job)[0])
