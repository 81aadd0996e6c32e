"""The planner process: ``python -m bagpipe.lookahead.child``, with inherited file descriptors. Imports no torch.

It ignores Ctrl-C and SIGTERM, because the training process ends it, and exits when that process is gone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from bagpipe.lookahead.link import Link, LinkClosed
from bagpipe.lookahead.protocol import serve_runs

__all__ = ["main"]


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
    with suppress(LinkClosed):
        serve_runs(link)


if __name__ == "__main__":
    main(sys.argv[1:])
