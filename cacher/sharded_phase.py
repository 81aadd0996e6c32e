"""`ShardedPhase`: one phase of a cacher from all of its shards.

ShardLink of each shard ──parts of batch b──> a thread: ShardMerger, WindowAhead
                                                ──two batches ahead──> MergedIndexer, SteppedWindow ─> planner
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from bagpipe.client.codec import values_are_derivable
from bagpipe.client.index_codec import ShardPart
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.batch_indexer import IndexedBatch
from bagpipe.oracle.batch_window import LeftBatch, SteppedWindow, WindowAhead, WindowStep
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.shard import MergedIndexer, ShardMerger
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema
from cacher.ahead import Ahead
from cacher.shard_link import ShardEnded, ShardLink, Stopped

__all__ = ["MAX_CREDITS", "ShardedPhase"]

#: Batches that a shard is ahead, at most.
MAX_CREDITS = 32
_JOIN_TIMEOUT_S = 2.0
#: Batches joined before the planner asks for them.
_JOINED_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Joined:
    """A batch from all shards.

    Attributes:
        parts: by shard.
        indexed: joined.
        waits: by shard, when the wait for its part began and ended, in seconds of `time.perf_counter`.
        step: of the window; None: the planner runs it.
    """

    parts: Sequence[ShardPart]
    indexed: IndexedBatch
    waits: Sequence[tuple[float, float]]
    step: WindowStep | None


class ShardedPhase:
    """One phase from all shards. Usable inside a ``with`` block.

    Attributes:
        first_batch: the first one that is indexed.
        is_narrow: the planner's own reader leaves the ids' columns out: lengths and ids come from the shards.
        indexer, window: of the batches, for a planner; no window: it runs its own.
        links: one for each shard.
    """

    def __init__(
        self,
        spec: OracleSpec,
        shard_of_table: Sequence[int],
        features: Sequence[Sequence[int]],
        schema: DataSchema,
        *,
        first_batch: int,
        reader_state: Mapping[str, Any] | None,
    ) -> None:
        self._spec = spec
        self._features = features
        self._num_features = len(schema.features)
        is_weighted = any(feature.weighted for feature in schema.features)
        self.is_narrow = values_are_derivable(spec, self._num_features) and not is_weighted
        self.indexer = MergedIndexer(spec, lambda index: self._joined_of(index).indexed)
        self.first_batch = 0 if self.indexer.learns else first_batch
        self.links: list[ShardLink] = []
        # States of the reader after the latest batches, for shards that begin anew: (number of the next batch, JSON).
        self._states: deque[tuple[int, str]] = deque(maxlen=1 + MAX_CREDITS)
        if reader_state is not None:
            self._note(reader_state)
        self._merger = ShardMerger(spec, shard_of_table)
        # A step is made while `_JOINED_AHEAD` wait and one is handed over.
        has_window = spec.num_slots > 0 and not self.indexer.learns and spec.lookahead > _JOINED_AHEAD + 1
        self._steps = WindowAhead(spec) if has_window else None
        self.window: SteppedWindow | None = None
        if self._steps is not None:
            self.window = SteppedWindow(self._steps, step=self._step_of, left=self._next_left)
        self._left: deque[LeftBatch] = deque()
        self._ahead: Ahead[_Joined | LeftBatch] = Ahead(self._join_all(), depth=_JOINED_AHEAD, name="cacher-joiner")
        self._latest: _Joined | None = None

    def __enter__(self) -> Self:
        for link in self.links:
            link.begin()
        self._ahead.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._ahead.join(_JOIN_TIMEOUT_S)
        for link in self.links:
            link.join(_JOIN_TIMEOUT_S)

    def stop(self) -> None:
        """Wake whoever waits for a shard. From any thread."""
        self._ahead.stop()
        for link in self.links:
            link.stop()

    def state_before(self, next_batch: int) -> str:
        """JSON of the latest known state of a reader at or before a batch; empty: there is none."""
        states = [text for batch, text in list(self._states) if batch <= next_batch]
        return states[-1] if states else ""

    def complete(self, batch: Batch) -> Batch:
        """A batch of the narrowed reader with the lengths of all bags. Its ids are zeros: the plan has them.

        Raises:
            InputError: bad data at this batch, found by a shard.
            JobError: a shard is lost.
            Stopped: the phase was stopped.
        """
        if batch.reader_state is not None:
            self._note(batch.reader_state)
        if not self.is_narrow or batch.index < self.first_batch:
            return batch
        parts, shape = self._joined_of(batch.index).parts, (self._num_features, batch.num_examples)
        for part, features in zip(parts, self._features, strict=True):
            if part.lengths is None or part.lengths.shape != (len(features), batch.num_examples):
                raise JobError(f"batch {batch.index}: a shard sent lengths of other bags than were asked for")
        if all(part.is_one_hot for part in parts):
            lengths, num_ids = np.broadcast_to(np.int32(1), shape), math.prod(shape)
        else:
            lengths = np.empty(shape, dtype=np.int32)
            for part, features in zip(parts, self._features, strict=True):
                assert part.lengths is not None, "checked"
                lengths[list(features)] = part.lengths
            num_ids = int(lengths.sum(dtype=np.int64))
        return dataclasses.replace(batch, lengths=lengths, values=np.broadcast_to(np.int64(0), (num_ids,)))

    def _note(self, state: Mapping[str, Any]) -> None:
        number = state.get("batch")
        if type(number) is int:
            self._states.append((number, json.dumps(state)))

    def _join_all(self) -> Iterator[_Joined | LeftBatch]:
        """In a thread of its own: all batches, joined; then those that are left in the window."""
        try:
            for index in itertools.count(self.first_batch):
                parts, waits = [], []
                for link in self.links:
                    start_s = time.perf_counter()
                    parts.append(link.take(index))
                    waits.append((start_s, time.perf_counter()))
                indexed = self._merger.merge([part.indexed for part in parts])
                step = None if self._steps is None else self._steps.step(indexed)
                yield _Joined(parts=parts, indexed=indexed, waits=waits, step=step)
        except (ShardEnded, InputError) as error:  # the batches before are planned, as one process plans them
            if self._steps is not None:
                for _ in range(len(self._steps)):
                    yield self._steps.leave()
            raise error

    def _joined_of(self, index: int) -> _Joined:
        """A batch, the one asked for last or the next one. Waits for it."""
        if self._latest is None or self._latest.indexed.batch_index != index:
            start_s = time.perf_counter()
            joined = next(self._ahead, None)
            while isinstance(joined, LeftBatch):  # the shards' data has ended, or is bad: their error follows
                self._left.append(joined)
                joined = next(self._ahead, None)
            end_s = time.perf_counter()
            if joined is None:
                raise Stopped
            for link, (waited_s, came_s) in zip(self.links, joined.waits, strict=True):
                link.count_wait(min(came_s, end_s) - max(waited_s, start_s))
            self._left += () if joined.step is None else joined.step.left
            self._latest = joined
        return self._latest

    def _step_of(self, index: int) -> WindowStep:
        """The step of the window with a batch."""
        step = self._joined_of(index).step
        assert step is not None, "there is a window"
        return step

    def _next_left(self) -> LeftBatch:
        """The next batch that leaves the window. Waits for it where no batch enters any more.

        If only the planner's own reader has found bad data, the shards go on: batches behind it enter the window then,
        which are never planned.
        """
        while not self._left:
            item = next(self._ahead, None)
            if item is None:
                raise Stopped
            if isinstance(item, LeftBatch):
                return item
            self._left += () if item.step is None else item.step.left
        return self._left.popleft()
