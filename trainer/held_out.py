"""`HeldOutBatches`: the planned batches of a job's evaluations, asked for ahead; few enough are kept from the first on.

prepare ──request──> cacher reads and plans while training goes on ──> batches of an evaluation
                                                                         └── at most `KEPT_BYTES`: kept
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from bagpipe.client.remote import RemoteBatches
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch

__all__ = ["KEPT_BYTES", "HeldOutBatches"]

#: Bytes of batches and plans that a rank keeps between evaluations.
KEPT_BYTES = 256 << 20


class HeldOutBatches:
    """Passes over the held-out examples. All ranks make the same calls.

    Args:
        source: of the held-out examples. During training not that of the training batches, whose phase goes on.
        spec: what the cacher plans them for.
        max_steps: batches of an evaluation during training; 0: all.
        kept_bytes: batches of more bytes are planned and read each time.

    Attributes:
        skipped_rows: malformed rows skipped in the latest pass.
    """

    def __init__(
        self, source: RemoteBatches, spec: OracleSpec, *, max_steps: int = 0, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.skipped_rows = 0
        self._source = source
        self._spec = spec
        self._max_steps = max_steps
        self._kept_bytes = kept_bytes
        self._asked: Generator[RankBatch, None, None] | None = None
        self._kept: tuple[RankBatch, ...] | None = None
        self._read: tuple[RankBatch, ...] | None = None  # the latest pass, if it was small

    def interrupt(self) -> None:
        """See `RemoteBatches.interrupt`."""
        self._source.interrupt()

    def prepare(self) -> None:
        """Ask for the next evaluation during training: it is read and planned while training goes on."""
        if self._kept is None and self._asked is None:
            self._asked = self._request(self._max_steps)

    def batches(self, *, in_training: bool) -> Generator[RankBatch, None, None]:
        """A pass, which the caller closes.

        Args:
            in_training: at most `max_steps` batches; else all.
        """
        asked, self._asked = self._asked, None
        is_whole = not (in_training and self._max_steps)
        if self._kept is not None and (is_whole == (not self._max_steps)):
            return (_copy(batch) for batch in self._kept)
        if asked is not None and not in_training and self._max_steps:
            asked.close()
            asked = None
        return self._request(0 if is_whole else self._max_steps) if asked is None else asked

    def settle(self, agree: Callable[[bool], bool]) -> None:
        """Keep the batches of the pass just made, if every rank can.

        Args:
            agree: whether a value is true on all ranks.
        """
        if self._kept is None and agree(self._read is not None):
            self._kept = self._read
        self._read = None

    def _request(self, max_steps: int) -> Generator[RankBatch, None, None]:
        # Sent now; the first batch is awaited later.
        return self._noted(self._source.batches("eval", self._spec, max_steps=max_steps))

    def _noted(self, batches: Generator[RankBatch, None, None]) -> Generator[RankBatch, None, None]:
        skipped_before, num_bytes = self._source.skipped_rows(), 0
        read: list[RankBatch] = []
        try:
            for batch in batches:
                num_bytes += _num_bytes(batch)
                if num_bytes <= self._kept_bytes:
                    read.append(batch)
                    batch = _copy(batch)
                else:
                    read.clear()
                yield batch
            self._read = tuple(read) if num_bytes <= self._kept_bytes else None
        finally:
            batches.close()
            self.skipped_rows = self._source.skipped_rows() - skipped_before


def _copy(batch: RankBatch) -> RankBatch:
    """The batch with its own ids and lengths: on a CPU a model gets the arrays themselves, the others are copied."""
    examples = batch.batch
    own = dataclasses.replace(examples, values=examples.values.copy(), lengths=examples.lengths.copy())
    return dataclasses.replace(batch, batch=own)


def _num_bytes(value: Any) -> int:
    """Bytes of the arrays in nested records."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(_num_bytes, value))
    if dataclasses.is_dataclass(value):
        return sum(_num_bytes(getattr(value, item.name)) for item in dataclasses.fields(value))
    return 0
