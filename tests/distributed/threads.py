"""Ranks in threads: runs a test's function once per rank with `LocalPeers`, like `tests.distributed.processes`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bagpipe.testing.local_peers import LocalPeers, local_peers
from tests.distributed.processes import LONG_DEADLINE_S, Ended

__all__ = ["run_threads"]


def run_threads(
    world_size: int, work: Callable[..., Any], *args: object, timeout_s: float = LONG_DEADLINE_S
) -> list[Ended]:
    """Run ``work(peers, *args)`` on every rank. Returns outcomes by rank. A rank's error is reported to the others."""
    ended: list[Ended] = [Ended()] * world_size

    def main(peers: LocalPeers) -> None:
        value, error = None, None
        try:
            value = work(peers, *args)
        except Exception as raised:
            peers.report(raised)
            error = type(raised).__name__, str(raised)
        ended[peers.rank] = Ended(value=value, error=error, code=0)

    threads = [threading.Thread(target=main, args=(peers,)) for peers in local_peers(world_size, timeout_s=timeout_s)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended
