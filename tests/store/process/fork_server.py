"""`ForkServer`: an interpreter that has imported `bagpipe.store.process.child`, and forks a child for each store.

Importing redis-py takes most of a second, a fork milliseconds. The forked child runs its own `main`, with the file
descriptors that came over a socket.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

__all__ = ["ForkServer", "serve"]

_ROOT = Path(__file__).parents[3]


class _Forked:
    """A forked child: what `bagpipe.store.process.parent.Process` names. It has no exit code of its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._has_ended = False

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("child", timeout or 0.0)
            self._has_ended = True
            os.close(self._pidfd)
        return 0

    def kill(self) -> None:
        if not self._has_ended:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class ForkServer:
    """Context manager."""

    def __enter__(self) -> Self:
        self._socket, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve({other.fileno()})"],
                cwd=_ROOT,
                pass_fds=[other.fileno()],
                process_group=0,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, fds: Sequence[int]) -> _Forked:
        """See `bagpipe.store.process.parent.StartProcess`."""
        socket.send_fds(self._socket, [b"start"], list(fds))
        return _Forked(int(self._socket.recv(64)))


def serve(fd: int) -> None:
    """Fork children until the other end is closed."""
    from bagpipe.store.process import child

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    with socket.socket(fileno=fd) as end:
        while True:
            asked, fds, _, _ = socket.recv_fds(end, 64, 3)
            if not asked:
                return
            parent = os.getpid()
            pid = os.fork()
            if not pid:
                end.close()
                child.main([*map(str, fds), str(parent)])
                os._exit(0)
            for number in fds:
                os.close(number)
            end.send(str(pid).encode())
