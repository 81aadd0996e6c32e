"""Daemons that only plan, and cachers that say on a Plan stream what they are told to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.cacher_pb2_grpc import CacherServicer, add_CacherServicer_to_server
from bagpipe.lookahead.pieces import pieces_of
from tests.cacher.daemons import Daemon, config

__all__ = ["WELCOME", "plan_daemon", "reply", "scripted_planner"]

WELCOME = pb.PlanReply(welcome=pb.PlanWelcome())

#: Replies on one stream; a callable is called with the next request.
Script = Sequence[pb.PlanReply | Callable[[pb.PlanRequest], None]]


def plan_daemon(folder: Path, *flags: str) -> Daemon:
    """A daemon without data, not started."""
    return Daemon(config(), f"unix:{folder}/c.sock", "--plan-only", *flags)


def reply(kind: int, data: bytes = b"", run: int = 1) -> list[pb.PlanReply]:
    """A frame as replies."""
    return [pb.PlanReply(piece=piece) for piece in pieces_of(kind, run, [data])]


class _Servicer(CacherServicer):  # type: ignore[misc] # generated
    def __init__(self, scripts: Sequence[Script]) -> None:
        self._scripts = iter(scripts)

    def Plan(self, requests: Iterator[pb.PlanRequest], context: grpc.ServicerContext) -> Iterator[pb.PlanReply]:
        assert next(requests).WhichOneof("kind") == "hello"
        for line in next(self._scripts, ()):
            if callable(line):
                line(next(requests))
            else:
                yield line


@contextmanager
def scripted_planner(path: Path, *scripts: Any) -> Iterator[str]:
    """URL of a cacher that plays one script per stream and then hangs up."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        add_CacherServicer_to_server(_Servicer(scripts), server)
        server.add_insecure_port(f"unix:{path}")
        server.start()
        try:
            yield f"unix:{path}"
        finally:
            server.stop(grace=0).wait()
