"""`ControlChannel`: control messages over TCPStore. No timeout: heartbeats detect dead peers.

share   rank 0: put ──"word/<n>/0" in the job's store──> other ranks: look ┐ while the ranks that have not put theirs
gather  every rank: put ──"word/<n>/<rank>"──> every rank: look            ┘ beat, and nobody has failed
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bagpipe.distributed.failure import BEAT_S, STORE_ERRORS, Failures
from bagpipe.distributed.keystore import KeyStore
from bagpipe.errors import PeerError

__all__ = ["ControlChannel"]

_LOOK_S = 0.05


class ControlChannel:
    """One rank's end. Called by one thread, the same number of times on every rank.

    Args:
        store: a client of the job's store, with this attempt's prefix.
        failures: whether the others are alive.
        rank, world_size: of this rank.
        silence_s: how long a rank that is waited for may be without a beat.
    """

    def __init__(self, store: KeyStore, failures: Failures, *, rank: int, world_size: int, silence_s: float) -> None:
        self._store = store
        self._failures = failures
        self._rank = rank
        self._world_size = world_size
        self._silence_s = silence_s
        self._count = 0

    def share(self, value: Any) -> Any:
        """Rank 0's JSON-able value, at every rank.

        Raises:
            InputError, PeerError, SystemExit: another rank has failed.
            PeerError: rank 0 is silent, the store is gone, or this rank has failed.
        """
        return self._exchange(value, [0])[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON-able value, by rank.

        Raises:
            InputError, PeerError, SystemExit: as `share`, whichever rank is silent.
        """
        return self._exchange(value, range(self._world_size))

    def _exchange(self, value: Any, speakers: Sequence[int]) -> list[Any]:
        """What the speakers say, by their order in `speakers`."""
        keys = {rank: f"word/{self._count}/{rank}" for rank in speakers}
        self._count += 1
        try:
            if self._rank in keys:
                self._store.set(keys[self._rank], json.dumps(value))
            self._await(keys)
            return [json.loads(self._store.get(key)) for key in keys.values()]
        except STORE_ERRORS as error:
            words = f"waited for another rank's word: {error}"
            raise self._failures.explain(words) or PeerError(words) from None

    def _await(self, keys: Mapping[int, str]) -> None:
        """Until all keys, by the rank that sets them, are there."""
        waiter = threading.Event()  # never set: waiting on it lets signal handlers run
        heard: dict[int, tuple[bytes, float]] = {}
        listen_s = 0.0
        while not self._store.check(list(keys.values())):
            self._failures.look()
            end = self._failures.end()
            if end is not None:
                raise end
            if time.monotonic() > listen_s:
                self._listen(keys, heard)
                listen_s = time.monotonic() + BEAT_S / 2
            waiter.wait(_LOOK_S)

    def _listen(self, keys: Mapping[int, str], heard: dict[int, tuple[bytes, float]]) -> None:
        """Note the last beat, and its time, of every rank that is waited for; PeerError if one has long been silent."""
        now_s = time.monotonic()
        for rank, key in keys.items():
            if not self._store.check([key]):
                pulse = self._failures.pulse(rank)
                last_pulse, last_s = heard.get(rank, (None, now_s))
                if pulse != last_pulse:
                    heard[rank] = pulse, now_s
                elif now_s - last_s > self._silence_s:
                    raise PeerError(f"lost rank {rank}, dead or stopped (no sign of life for {self._silence_s:g} s)")
