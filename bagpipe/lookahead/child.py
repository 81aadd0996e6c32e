"""The planner process: ``python -m bagpipe.lookahead.child``, with inherited file descriptors. Imports no torch.

It ignores Ctrl-C and SIGTERM, because the training process ends it, and exits when that process is gone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bagpipe.errors import InputError
from bagpipe.lookahead.frames import FrameKind, decode_spec, encode_error
from bagpipe.lookahead.ids import decode_ids
from bagpipe.lookahead.link import Frame, Link, LinkClosed
from bagpipe.lookahead.planning import planned_batches
from bagpipe.oracle.planner import make_planner
from bagpipe.types.batch import Batch

__all__ = ["main"]


class _Superseded(BaseException):
    """Another run begins. No error of the batches, which are planned to their end."""

    def __init__(self, start: Frame) -> None:
        super().__init__()
        self.start = start


class _Run:
    """One stream of batches.

    Args:
        link: to the training process.
        start: its START frame.
    """

    def __init__(self, link: Link, start: Frame) -> None:
        self._link = link
        self._number = start.run
        self._spec = decode_spec(start.data)

    def serve(self) -> None:
        """Plan all batches, and send the plans.

        Raises:
            LinkClosed: the training process is gone.
        """
        try:
            for planned in planned_batches(
                make_planner(self._spec), self._batches(), on_too_large=lambda: self._send(FrameKind.MORE)
            ):
                for rank in range(self._spec.world_size):
                    self._send(FrameKind.PLAN, planned.frame(rank))
        except InputError as error:
            self._send(FrameKind.ERROR, [encode_error(error)])
        else:
            self._send(FrameKind.END)

    def _batches(self) -> Iterator[Batch]:
        while True:
            frame = _receive(self._link)
            if frame.kind == FrameKind.START:
                raise _Superseded(frame)
            if frame.kind == FrameKind.END:
                return
            yield decode_ids(frame.data)

    def _send(self, kind: FrameKind, parts: Sequence[Any] = ()) -> None:
        self._link.send(kind, self._number, parts)


def _receive(link: Link) -> Frame:
    """The next frame. The end of the training process ends this one too."""
    try:
        return link.receive()
    except LinkClosed:
        raise SystemExit from None


def main(arguments: Sequence[str]) -> None:
    """Serve run after run.

    Args:
        arguments: file descriptors of the pipes to read and to write and of the files of ids and of plans, and the
            process id of the training process.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    read_fd, write_fd, ids, plans, parent = map(int, arguments)
    link = Link(read_fd=read_fd, write_fd=write_fd, in_fd=ids, out_fd=plans, is_alive=lambda: os.getppid() == parent)
    frame = _receive(link)
    while True:
        try:
            if frame.kind == FrameKind.START:
                _Run(link, frame).serve()
            frame = _receive(link)  # the batches of a run that has failed are dropped
        except _Superseded as superseded:
            frame = superseded.start
        except LinkClosed:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
