"""The training process's end of a Plan stream, against cachers that misbehave."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.access import Cacher
from bagpipe.client.address import parse_address
from bagpipe.client.agreement import MAX_IDS_BYTES, MAX_PLAN_BYTES
from bagpipe.client.link import Credentials, LinkLost
from bagpipe.errors import InputError, JobError
from bagpipe.lookahead.frames import FrameKind
from bagpipe.lookahead.remote import RemotePlanner
from bagpipe.lookahead.stream_link import StreamLink
from tests.lookahead.plan_daemons import WELCOME, reply, scripted_planner
from tests.lookahead.streams import batches_of, spec_of


def error_of(path: Path, *script: Any) -> str:
    """The JobError of a run against a cacher that accepts it and says something."""
    with (
        scripted_planner(path / "c.sock", [WELCOME, *script]) as url,
        RemotePlanner(spec_of(), Cacher(url)) as planner,
        pytest.raises(JobError) as raised,
    ):
        list(planner.run(batches_of(9)))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (reply(FrameKind.PLAN, b"nonsense"), "cannot be read: expected a frame that starts with"),
        (reply(FrameKind.PLAN), "cannot be read: malformed frame"),
        (reply(FrameKind.END), "cannot be read: frame of kind 3 after 0 plans of 7 batches"),
        (reply(77), "cannot be read: frame of kind 77"),
        (reply(FrameKind.ERROR, b"[1"), "cannot be read: malformed error"),
        (reply(FrameKind.ERROR, b"[" * 100_000), "cannot be read: malformed error"),
        ([pb.PlanReply(piece=pb.Piece(data=b"x"))], "cannot be read: expected the first piece"),
        ([pb.PlanReply(piece=pb.Piece(kind=4, num_bytes=1 << 60))], f"expected a frame of at most {MAX_PLAN_BYTES}"),
        ([WELCOME], "sent welcome, expected piece"),
        ([pb.PlanReply()], "sent an empty message, expected piece"),
        ([pb.PlanReply(error=pb.Error(kind="JobError", message="the cacher failed"))], "^the cacher failed$"),
        ([], r"is gone \(it ended the stream\)"),
    ],
)
def test_a_cacher_that_says_something_else(tmp_path: Path, script: list[pb.PlanReply], words: str) -> None:
    assert re.search(words, error_of(tmp_path, *script))


def test_a_cacher_that_refuses_or_says_no_welcome(tmp_path: Path) -> None:
    refusal = pb.PlanReply(error=pb.Error(kind="InputError", message="protocol version: no"))
    with scripted_planner(tmp_path / "c.sock", [refusal], reply(FrameKind.END)) as url:
        planner = RemotePlanner(spec_of(), Cacher(url))
        with pytest.raises(InputError, match=r"^protocol version: no$"):
            planner.open()
        with pytest.raises(JobError, match=r"c\.sock sent piece, expected welcome$"):
            planner.open()


def test_a_cacher_that_does_not_answer(tmp_path: Path) -> None:
    def wait(request: pb.PlanRequest) -> None:
        """Nothing is sent before another request, and none comes."""

    with scripted_planner(tmp_path / "c.sock", [wait]) as url:
        link = StreamLink(parse_address(url), Credentials(), "job")
        with pytest.raises(LinkLost, match=r"^it did not answer$"):
            link.await_welcome(0.2)
        link.close()
        link.close()


def test_ids_that_are_too_many_are_not_sent(tmp_path: Path) -> None:
    with scripted_planner(tmp_path / "c.sock", [WELCOME]) as url:
        link = StreamLink(parse_address(url), Credentials(), "job")
        with pytest.raises(InputError, match="a batch has 257 MiB of ids, a cacher takes at most 256 MiB"):
            link.send(FrameKind.BATCH, 1, [np.empty(MAX_IDS_BYTES + (1 << 20), np.uint8)])
        link.close()
