"""`Counters`: thread-safe totals since the daemon started."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass

__all__ = ["Counters", "Totals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals since the daemon started.

    Attributes:
        batches_planned: global batches.
        plan_s: seconds spent planning them, without reading and serialising.
        encode_s: seconds spent cutting and serialising the ranks' parts.
        batches_sent, bytes_sent: rank batches sent, repeats included.
        bytes_shared: those of them that went through shared memory.
        batches_indexed: batches indexed as a shard of another cacher.
        index_s: seconds spent indexing and serialising them.
        bytes_indexed: bytes of these indexes.
        streams: streams with a Hello.
        refused: handshakes and requests refused, unauthenticated ones included.
        dropped: streams ended for silence or invalid messages.
    """

    batches_planned: int = 0
    plan_s: float = 0.0
    encode_s: float = 0.0
    batches_sent: int = 0
    bytes_sent: int = 0
    bytes_shared: int = 0
    batches_indexed: int = 0
    index_s: float = 0.0
    bytes_indexed: int = 0
    streams: int = 0
    refused: int = 0
    dropped: int = 0


class Counters:
    """Thread-safe `Totals`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = Totals()

    def add(self, **amounts: float) -> None:
        """Add to the named totals."""
        with self._lock:
            current = {name: getattr(self._totals, name) + amount for name, amount in amounts.items()}
            self._totals = dataclasses.replace(self._totals, **current)

    def totals(self) -> Totals:
        with self._lock:
            return self._totals
