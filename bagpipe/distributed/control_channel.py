"""`ControlChannel`: control messages over TCPStore. No timeout: heartbeats detect dead peers.

share   rank 0: set ──"control/<n>/0" in the job's store──> other ranks: poll ┐ until all keys are set, while heartbeats
gather  every rank: set ──"control/<n>/<rank>"──> every rank: poll            ┘ arrive and no rank has failed
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bagpipe.distributed.failure import HEARTBEAT_S, STORE_ERRORS, Failures
from bagpipe.distributed.keystore import KeyStore
from bagpipe.errors import PeerError

__all__ = ["ControlChannel"]

_POLL_S = 0.05


class ControlChannel:
    """One rank's end of the channel. One thread calls it, the same number of times on every rank.

    Args:
        store: client of the job's store, with this attempt's prefix.
        failures: failures and heartbeats of the other ranks.
        rank, world_size: this rank and the number of ranks.
        silence_s: longest time without a heartbeat from a rank whose message is awaited.
    """

    def __init__(self, store: KeyStore, failures: Failures, *, rank: int, world_size: int, silence_s: float) -> None:
        self._store = store
        self._failures = failures
        self._rank = rank
        self._world_size = world_size
        self._silence_s = silence_s
        self._count = 0

    def share(self, value: Any) -> Any:
        """Broadcast rank 0's JSON-able value; returns it on every rank.

        Raises:
            InputError, PeerError, SystemExit: another rank has failed.
            PeerError: rank 0 is silent, the store is gone, or this rank has failed.
        """
        return self._exchange(value, [0])[0]

    def gather(self, value: Any) -> list[Any]:
        """Gather every rank's JSON-able value, ordered by rank.

        Raises:
            InputError, PeerError, SystemExit: as `share`, for any silent rank.
        """
        return self._exchange(value, range(self._world_size))

    def _exchange(self, value: Any, senders: Sequence[int]) -> list[Any]:
        """The senders' values, in the order of `senders`."""
        keys = {rank: f"control/{self._count}/{rank}" for rank in senders}
        self._count += 1
        try:
            if self._rank in keys:
                self._store.set(keys[self._rank], json.dumps(value))
            self._wait(keys)
            return [json.loads(self._store.get(key)) for key in keys.values()]
        except STORE_ERRORS as error:
            message = f"waited for a control message of another rank: {error}"
            raise self._failures.explain(message) or PeerError(message) from None

    def _wait(self, keys: Mapping[int, str]) -> None:
        """Wait until all keys are set. `keys` maps each sender to its key."""
        waiter = threading.Event()  # never set; waiting on it lets signal handlers run
        last_seen: dict[int, tuple[bytes, float]] = {}
        check_s = 0.0
        while not self._store.check(list(keys.values())):
            self._failures.poll()
            end = self._failures.end()
            if end is not None:
                raise end
            if time.monotonic() > check_s:
                self._check_heartbeats(keys, last_seen)
                check_s = time.monotonic() + HEARTBEAT_S / 2
            waiter.wait(_POLL_S)

    def _check_heartbeats(self, keys: Mapping[int, str], last_seen: dict[int, tuple[bytes, float]]) -> None:
        """Record the last heartbeat and its time for every missing sender; PeerError after `silence_s` without one."""
        now_s = time.monotonic()
        for rank, key in keys.items():
            if not self._store.check([key]):
                heartbeat = self._failures.last_heartbeat(rank)
                previous, last_s = last_seen.get(rank, (None, now_s))
                if heartbeat != previous:
                    last_seen[rank] = heartbeat, now_s
                elif now_s - last_s > self._silence_s:
                    raise PeerError(f"lost rank {rank}, dead or stopped (no sign of life for {self._silence_s:g} s)")
