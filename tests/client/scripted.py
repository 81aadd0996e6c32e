"""A scripted cacher, for messages that a real one never sends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.cacher_pb2_grpc import CacherServicer, add_CacherServicer_to_server
from bagpipe.types.batch_identity import BatchIdentity
from data.schema_file import criteo_schema
from tests.client.rank_batches import example_rank_batch, frame_of

__all__ = ["Script", "batch", "end", "error", "scripted", "welcome"]

#: Messages of one stream after the trainer's Hello; a callable is called with the next request.
Script = Sequence[pb.CacherMessage | Callable[[pb.TrainerMessage], None]]


def welcome(schema: str = "", *, identity: str = "", code: str = "c", layout: str = "lines") -> pb.CacherMessage:
    schema = schema or json.dumps(criteo_schema().to_json())
    identity = identity or json.dumps(BatchIdentity(code=code, layout=layout, files=()).to_json())
    return pb.CacherMessage(welcome=pb.Welcome(schema=schema, identity=identity))


def batch(index: int, *, run: int = 0, payload: bytes | None = None) -> pb.CacherMessage:
    payload = bytes(frame_of(example_rank_batch(index))) if payload is None else payload
    return pb.CacherMessage(rank_batches=[pb.RankBatch(run=run, index=index, payload=payload)])


def end(next_batch: int, *, run: int = 0, skipped_rows: int = 0) -> pb.CacherMessage:
    return pb.CacherMessage(end=pb.End(run=run, skipped_rows=skipped_rows, next_batch=next_batch))


def error(kind: str, message: str) -> pb.CacherMessage:
    return pb.CacherMessage(error=pb.Error(kind=kind, message=message))


class _Servicer(CacherServicer):  # type: ignore[misc] # generated
    def __init__(self, scripts: Sequence[Script]) -> None:
        self._scripts = iter(scripts)
        self.requests: list[list[pb.TrainerMessage]] = []

    def Train(self, requests: Iterator[pb.TrainerMessage], context: grpc.ServicerContext) -> Iterator[pb.CacherMessage]:
        received = [next(requests)]
        self.requests.append(received)
        for line in next(self._scripts, ()):
            if callable(line):
                received.append(next(requests))
                line(received[-1])
            else:
                yield line


@contextmanager
def scripted(path: Path, *scripts: Script) -> Iterator[tuple[str, list[list[pb.TrainerMessage]]]]:
    """URL of a cacher that plays one script per stream and then hangs up, and the requests received per stream."""
    servicer = _Servicer(scripts)
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        add_CacherServicer_to_server(servicer, server)
        server.add_insecure_port(f"unix:{path}")
        server.start()
        try:
            yield f"unix:{path}", servicer.requests
        finally:
            server.stop(grace=0).wait()
