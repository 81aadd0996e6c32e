"""`Child`: the process of a store's client as the training process sees it: sockets, shared memory, liveness."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.process.child import BEAT_S
from bagpipe.store.process.messages import Kind, Reply, Request, receive, socket_pair
from bagpipe.util.priority import lower_process_priority
from bagpipe.util.programs import module_command, module_environment
from bagpipe.util.shared_file import open_shared_file

__all__ = ["Child", "Process", "StartProcess", "start_process"]

_EXIT_S = 2.0
#: A thread that waits for a reply looks for a beat so often.
_TURN_S = 4 * BEAT_S


class Process(Protocol):
    """What is used of a `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


#: From the file descriptors that the process inherits: its sockets of reads and of writes, the shared memory.
StartProcess: TypeAlias = Callable[[Sequence[int]], Process]


def start_process(fds: Sequence[int]) -> Process:
    """Start the process of a store's client, and do not wait for it."""
    process = subprocess.Popen(
        [*module_command("bagpipe.store.process.child"), *map(str, (*fds, os.getpid()))],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        process_group=0,  # a terminal's Ctrl-C is for the training process
        env=_environment(),
    )
    lower_process_priority(process)
    return process


class Child:
    """Starts the process. `ask` is for one thread per socket; not after `close`.

    Args:
        num_bytes: of shared memory.
        stopped_s: seconds without a beat after which an exchange fails.
        start: starts the process.

    Attributes:
        process: the process.
        reading, writing: sockets of the requests of two threads.

    Raises:
        OSError: there are no descriptors or processes left, or no memory.
    """

    def __init__(self, num_bytes: int, *, stopped_s: float, start: StartProcess = start_process) -> None:
        self._stopped_s = stopped_s
        with ExitStack() as both, ExitStack() as on_error:
            fd = open_shared_file(num_bytes)
            both.callback(os.close, fd)
            ends = []
            for _ in range(2):
                own, other = socket_pair()
                on_error.enter_context(own)
                ends.append((own, both.enter_context(other)))
            fds = (*(other.fileno() for _, other in ends), fd)
            self.process = start(fds)
            self._maps = [mmap.mmap(fd, num_bytes)]
            on_error.pop_all()
        (self.reading, _), (self.writing, _) = ends
        self._numbers = dict.fromkeys((self.reading, self.writing), 0)  # of the latest request
        self._open: set[socket.socket] = set()  # with a request whose reply has not come

    def memory(self, first_byte: int, num_bytes: int) -> NDArray[np.uint8]:
        """A part of the shared memory, a new array each time."""
        return np.frombuffer(self._maps[0], np.uint8, num_bytes, first_byte)

    def put_json(self, first_byte: int, value: object) -> int:
        """Write a value as JSON into the shared memory. Returns its bytes."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        self.memory(first_byte, len(text))[:] = text
        return len(text)

    def _num_beats(self) -> int:
        return int(self.memory(0, 8).view(np.uint64)[0])

    def ask(self, end: socket.socket, kind: Kind, region: int = 0, size: int = 0) -> Reply:
        """Send a request, and wait for its reply. The thread that waits does not hold the interpreter lock.

        Args:
            end: `reading` or `writing`.
            kind, region, size: of the request.

        Raises:
            StoreError: the process has ended, or is stopped.
        """
        self._numbers[end] = number = (self._numbers[end] + 1) % (1 << 32)
        self._open.add(end)
        try:
            end.send(Request(kind=kind, number=number, region=region, size=size).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise StoreError(self._ended()) from None
        while True:
            self._await(end)
            packet = receive(end)
            if not packet:
                raise StoreError(self._ended())
            reply = Reply.decode(packet)
            if reply.number == number:
                self._open.discard(end)
                return reply

    def settle(self, end: socket.socket) -> None:
        """Wait until no region is in use by an earlier request of this end, whose thread was interrupted.

        Raises:
            StoreError: as `ask`.
        """
        if end in self._open:
            self.ask(end, Kind.NOTHING)

    def _await(self, end: socket.socket) -> None:
        """Wait for a packet, or for the other end to close.

        Turns of waiting count, not the time: a training process that was stopped with its child is not at fault.
        """
        poll = select.poll()
        poll.register(end, select.POLLIN)
        last, silent_s = self._num_beats(), 0.0
        while not poll.poll(int(1e3 * _TURN_S)):
            beats = self._num_beats()
            last, silent_s = beats, 0.0 if beats != last else silent_s + _TURN_S
            if silent_s >= self._stopped_s:
                raise StoreError(
                    f"the store's process {self.process.pid} has been stopped for {silent_s:.0f} s (store.timeout_s): "
                    "it runs no more, or this host gives it no processor"
                )

    def _ended(self) -> str:
        try:
            code = self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return f"the store's process {self.process.pid} has closed its connection"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"the store's process {self.process.pid} ended unexpectedly ({how})"

    def close(self) -> None:
        """End the process. Idempotent."""
        for end in (self.reading, self.writing):
            with suppress(OSError):  # the process has ended
                end.shutdown(socket.SHUT_RDWR)  # processes forked from this one can hold the socket too
            end.close()
        self._maps.clear()  # it has a descriptor, and an error's traceback can keep this object
        try:
            self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _environment() -> dict[str, str]:
    """Failpoints are those of the training process."""
    environment = {**module_environment(), "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("BAGPIPE_CRASH_AT", None)
    return environment
