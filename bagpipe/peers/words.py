"""`Words`: what rank 0 tells the others, however long it takes to find out: an address, a digest, that it is done.

rank 0: put ──"word/<n>" in the job's store──> other ranks: look, while rank 0 beats and nobody has failed
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from bagpipe.errors import PeerError
from bagpipe.peers.failure import STORE_ERRORS, Failures
from bagpipe.peers.keystore import KeyStore

__all__ = ["Words"]

_LOOK_S = 0.05


class Words:
    """One rank's end. Called by one thread, the same number of times on every rank.

    Args:
        store: a client of the job's store, with this attempt's prefix.
        failures: whether rank 0 is alive.
        rank: this one.
        silence_s: how long rank 0 may be without a beat.
    """

    def __init__(self, store: KeyStore, failures: Failures, *, rank: int, silence_s: float) -> None:
        self._store = store
        self._failures = failures
        self._rank = rank
        self._silence_s = silence_s
        self._count = 0

    def share(self, value: Any) -> Any:
        """Rank 0's JSON-able value, at every rank.

        Raises:
            InputError, PeerError, SystemExit: another rank has failed.
            PeerError: rank 0 is silent, or the store is gone.
        """
        key = f"word/{self._count}"
        self._count += 1
        try:
            if self._rank == 0:
                self._store.set(key, json.dumps(value))
                return value
            return self._await(key)
        except STORE_ERRORS as error:
            words = f"waited for rank 0's word: {error}"
            raise self._failures.explain(words) or PeerError(words) from None

    def _await(self, key: str) -> Any:
        waiter = threading.Event()  # never set: waiting on it lets signal handlers run
        pulse, heard_s = self._failures.pulse(0), time.monotonic()
        while not self._store.check([key]):
            failure = self._failures.look()
            if failure is not None:
                raise failure.error()
            waiter.wait(_LOOK_S)
            now_s, last = time.monotonic(), pulse
            pulse = self._failures.pulse(0)
            if pulse != last:
                heard_s = now_s
            elif now_s - heard_s > self._silence_s:
                raise PeerError(f"lost rank 0, dead or stopped (no sign of life for {self._silence_s:g} s)")
        return json.loads(self._store.get(key))
