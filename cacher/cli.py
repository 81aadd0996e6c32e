"""`python -m cacher`: for now only the process a trainer starts for itself, on an inherited socket."""

from __future__ import annotations

import argparse
import signal
import socket

from bagpipe.proto.channel import Channel
from cacher.service import serve

__all__ = ["main"]


def main() -> None:
    """Serve the socket a parent process hands down."""
    parser = argparse.ArgumentParser(prog="python -m cacher", description=__doc__)
    parser.add_argument("--serve-fd", type=int, required=True, help="file descriptor of a connected socket")
    options = parser.parse_args()
    # The trainer decides when the stream ends, by closing the socket; it finishes the batches it has read first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=options.serve_fd) as connection:
        serve(Channel(connection))
