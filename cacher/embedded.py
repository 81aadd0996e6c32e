"""`EmbeddedCacher`: a cacher process that lives and dies with the trainer, joined to it by a socket pair.

A process of its own, because planning and parsing would otherwise take the trainer's interpreter lock.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from bagpipe.client.remote import RemoteSteps
from bagpipe.config import DataConfig
from bagpipe.proto.channel import Channel

__all__ = ["EmbeddedCacher"]

_STOP_TIMEOUT_S = 10.0


class EmbeddedCacher:
    """Context manager that starts `python -m cacher` and yields its steps as a `RemoteSteps`.

    Args:
        data: what the cacher reads.
        seed: seed of the data order.
        credits: steps under way or waiting at most.
    """

    def __init__(self, data: DataConfig, seed: int, *, credits: int) -> None:
        self._data = data
        self._seed = seed
        self._credits = credits
        self._process: subprocess.Popen[bytes] | None = None
        self._steps: RemoteSteps | None = None

    def __enter__(self) -> RemoteSteps:
        ours, theirs = socket.socketpair()
        # Programs are folders of the checkout, not installed: the child must find them as we did.
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cacher", "--serve-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                # Signals sent to the trainer's process group (Ctrl-C) are the trainer's to answer.
                process_group=0,
            )
        self._steps = RemoteSteps(Channel(ours), credits=self._credits)
        try:
            self._steps.open(self._data, self._seed)
        except BaseException:
            self._stop()
            raise
        return self._steps

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pid={self._process.pid if self._process else None})"

    def _stop(self) -> None:
        if self._steps is not None:
            self._steps.close()
        if self._process is not None:
            try:
                self._process.wait(timeout=_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
