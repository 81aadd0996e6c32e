"""The process of a store's client: ``python -m bagpipe.store.process.child``. Imports no torch.

    reading thread   requests of the training process's fetches       ┐ regions of shared memory
    writing thread   its write-backs, deletions, fences, rotations    ┘
    beat             a counter in shared memory: this process is not stopped

It ignores Ctrl-C and SIGTERM, because the training process ends it, and exits when that process is gone.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import Fence
from bagpipe.store.interface import DeleteRequest, Store, StoreStatistics
from bagpipe.store.process.messages import Kind, Reply, Request, receive
from bagpipe.store.process.region import Layout, Region
from bagpipe.store.redis.store import RedisStore
from bagpipe.types.schema import RowSchema
from bagpipe.util.documents import parse_json

__all__ = ["BEAT_S", "HEADER_BYTES", "main"]

#: Between two beats.
BEAT_S = 0.25
#: Bytes of shared memory before the first region; the first eight count beats.
HEADER_BYTES = 4096


def main(arguments: Sequence[str]) -> None:
    """Serve one training process until it closes its ends.

    Args:
        arguments: file descriptors of the sockets of reads and of writes and of the shared memory, and the process id
            of the training process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    read_fd, write_fd, memory_fd, parent = map(int, arguments)
    with ExitStack() as stack:
        reading = stack.enter_context(socket.socket(fileno=read_fd))
        writing = stack.enter_context(socket.socket(fileno=write_fd))
        memory = np.frombuffer(mmap.mmap(memory_fd, 0), np.uint8)
        os.close(memory_fd)
        threading.Thread(target=_beat, args=(memory, parent), name="beat", daemon=True).start()
        packet = receive(reading)
        if not packet:
            return
        request = Request.decode(packet)
        given = parse_json(memory[HEADER_BYTES:][: request.size].tobytes())
        schema = RowSchema.from_json(given["schema"])
        try:
            store = stack.enter_context(RedisStore(schema=schema, **given["store"]))
        except Exception as error:
            reading.send(Reply(number=request.number, statistics=StoreStatistics(), error=error).encode())
            return
        reading.send(Reply(number=request.number, statistics=store.statistics()).encode())
        server = _Server(store, Layout(schema, given["region_bytes"]), memory[HEADER_BYTES:])
        writer = threading.Thread(target=server.serve, args=(writing,), name="writing")
        writer.start()
        server.serve(reading)
        writer.join()


def _beat(memory: NDArray[np.uint8], parent: int) -> None:
    """Count while the training process lives; end this process when it does not."""
    beats = memory[:8].view(np.uint64)
    asleep = threading.Event()
    while not asleep.wait(BEAT_S):
        if os.getppid() != parent:
            os._exit(1)
        beats[0] += 1


class _Server:
    """Answers requests.

    Args:
        store: open.
        layout: of its schema.
        memory: all regions.
    """

    def __init__(self, store: Store, layout: Layout, memory: NDArray[np.uint8]) -> None:
        self._store = store
        self._layout = layout
        self._memory = memory
        self._answers: Mapping[Kind, Callable[[Request], None]] = {
            Kind.READ: self._read,
            Kind.WRITE: self._write,
            Kind.DELETE: self._delete,
            Kind.FENCE: self._fence,
            Kind.ROTATE: self._rotate,
            Kind.SUMS: self._sums,
            Kind.NOTHING: lambda request: None,
        }

    def serve(self, end: socket.socket) -> None:
        """Answer the requests of one end, one after the other, until it is closed."""
        while packet := receive(end):
            request, error = Request.decode(packet), None
            try:
                self._answers[request.kind](request)
            except Exception as failed:
                error = failed
            reply = Reply(number=request.number, statistics=self._store.statistics(), error=error)
            try:
                end.send(reply.encode())
            except (BrokenPipeError, ConnectionResetError):  # the training process has ended
                return

    def _bytes(self, request: Request) -> NDArray[np.uint8]:
        start = request.region * self._layout.region_bytes
        return self._memory[start : start + self._layout.region_bytes]

    def _region(self, request: Request) -> Region:
        return Region(self._layout, self._bytes(request), request.size)

    def _read(self, request: Request) -> None:
        region = self._region(request)
        region.put_results(self._store.read_many(region.reads()))

    def _write(self, request: Request) -> None:
        self._store.write_many(self._region(request).writes())

    def _delete(self, request: Request) -> None:
        self._store.delete_many([DeleteRequest(table, ids) for table, ids in self._region(request).reads()])

    def _fence(self, request: Request) -> None:
        self._store.fence(Fence(**parse_json(self._bytes(request)[: request.size].tobytes())))

    def _rotate(self, request: Request) -> None:
        groups = self._store.rotate()
        self._bytes(request)[: groups.nbytes] = groups.view(np.uint8)

    def _sums(self, request: Request) -> None:
        values = self._store.sum_changes().values
        self._bytes(request)[: values.nbytes] = values.view(np.uint8)


if __name__ == "__main__":
    main(sys.argv[1:])
