"""The window of the planner: handles, next uses and uses by rank of the batches in it.

    BatchWindow     enter(batch) ─> rows new to the window     oldest(), uses_of(rows), leave() ─> next uses
    SteppedWindow   the same methods, for a planner whose window another thread runs:
                    WindowAhead.step(batch) ─> WindowStep ──> planner      planner ──rows that left──> release

What a window says of a batch is a function of the batches alone, not of what the planner decides. So a thread can run
it ahead of the planner. The planner only says which rows need no handle any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.assembly import places_among
from bagpipe.oracle.batch_indexer import IndexedBatch
from bagpipe.oracle.handles import DenseHandles, HashHandles, make_handles
from bagpipe.oracle.plan import OracleSpec, RowList
from bagpipe.oracle.window import NextUses, RankCounts

__all__ = [
    "BatchWindow",
    "LeftBatch",
    "OldestBatch",
    "RowsHeld",
    "SteppedWindow",
    "Window",
    "WindowAhead",
    "WindowStep",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OldestBatch:
    """The batch to plan.

    Attributes:
        indexed: the batch.
        handles: int64 ``[U]``, of its unique rows.
        last_index: the last batch of its window.
    """

    indexed: IndexedBatch
    handles: NDArray[np.int64]
    last_index: int


class Window(Protocol):
    """What a planner knows of the batches ahead."""

    @property
    def handles(self) -> DenseHandles | HashHandles: ...

    def __len__(self) -> int: ...

    def enter(self, indexed: IndexedBatch) -> NDArray[np.int64]:
        """Add a batch. Returns the handles of its rows that no batch in the window used. Batches come in order."""
        ...

    @property
    def num_handles(self) -> int:
        """Length of arrays indexed by the handles of the batches entered so far."""
        ...

    def oldest(self) -> OldestBatch:
        """The batch that entered first. IndexError if the window is empty."""
        ...

    def uses_of(self, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """uint64 ``[len(positions), num_words]``: uses by rank of some rows of the oldest batch, from it on.

        Asked for of rows that are in no cache, so the batch before did not use them.
        """
        ...

    def leave(self) -> NDArray[np.int32]:
        """Remove the oldest batch. Returns the next use of each of its rows, `NEVER` if none."""
        ...

    def release(self, handles: NDArray[np.int64]) -> None:
        """Free handles of rows that were in no batch of the window when the planner evicted them."""
        ...


class BatchWindow:
    """A window in the thread that calls it.

    Args:
        spec: of the plans.
        handles: of the planner.
    """

    def __init__(self, spec: OracleSpec, handles: DenseHandles | HashHandles) -> None:
        self.handles = handles
        self._spec = spec
        self._batches: deque[tuple[IndexedBatch, NDArray[np.int64]]] = deque()
        # Use counts by rank matter only with several ranks.
        self._rank_counts = RankCounts(spec.world_size, largest=spec.lookahead)
        num_words = self._rank_counts.num_words if spec.world_size > 1 else 0
        self._num_handles = handles.num_handles
        self._next_uses = NextUses(self._num_handles, num_count_words=num_words)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def num_handles(self) -> int:
        """See `Window`."""
        return self._num_handles

    def enter(self, indexed: IndexedBatch) -> NDArray[np.int64]:
        """See `Window`."""
        handles = self.handles.lookup_or_add(indexed.unique)
        if self.handles.num_handles > self._num_handles:
            self._num_handles = self.handles.num_handles
            self._next_uses.grow(self._num_handles)
        counts = self._count_uses(indexed) if indexed.rank_indexes else None
        self._batches.append((indexed, handles))
        return self._next_uses.enter(handles, indexed.batch_index, counts)

    def oldest(self) -> OldestBatch:
        """See `Window`."""
        indexed, handles = self._batches[0]
        return OldestBatch(indexed=indexed, handles=handles, last_index=self._batches[-1][0].batch_index)

    def uses_of(self, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """See `Window`."""
        indexed, handles = self._batches[0]
        words = self._next_uses.later_counts(handles, positions)
        words += self._count_uses(indexed).take(positions, axis=0)
        return words

    def leave(self) -> NDArray[np.int32]:
        """See `Window`."""
        _, handles = self._batches.popleft()
        return self._next_uses.leave(handles)

    def repeated(self) -> NDArray[np.bool_]:
        """See `NextUses.repeated`."""
        return self._next_uses.repeated()

    def release(self, handles: NDArray[np.int64]) -> None:
        """See `Window`."""
        self.handles.release(handles)

    def release_late(self, handles: NDArray[np.int64]) -> None:
        """As `release`, after batches have entered since: rows that they use keep their handles."""
        if isinstance(self.handles, HashHandles):
            self.handles.release(handles.take(np.flatnonzero(~self._next_uses.are_in_window(handles))))

    def _count_uses(self, indexed: IndexedBatch) -> NDArray[np.uint64]:
        """uint64 ``[U, num_words]``: the ranks that use each unique row."""
        if indexed.use_words is not None:
            return indexed.use_words.copy()  # the window adds to them
        return self._rank_counts.of([rank_index.rows for rank_index in indexed.rank_indexes], len(indexed.unique))


class RowsHeld:
    """The slots that the batches of a planner need at a time.

    Args:
        spec: of the plans.
    """

    def __init__(self, spec: OracleSpec) -> None:
        self._spec = spec
        self._latest: RowList | None = None  # rows of the batch added last

    def num_held(self, indexed: IndexedBatch) -> int:
        """Rows of the batch added last that this one does not use, if `OracleSpec.rows_delay` holds them; else 0."""
        if not self._spec.rows_delay or self._latest is None:
            return 0
        return len(self._latest) - int(np.count_nonzero(places_among(self._latest, indexed.unique) >= 0))

    def fits(self, indexed: IndexedBatch) -> bool:
        """Whether the caches have slots for a batch."""
        return len(indexed.unique) + self.num_held(indexed) <= self._spec.num_slots * self._spec.world_size

    def add(self, indexed: IndexedBatch) -> None:
        """The batch enters the window."""
        self._latest = indexed.unique


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftBatch:
    """A batch that has left a window.

    Attributes:
        oldest: the batch, as it was the oldest one.
        uses: see `Window.uses_of`, of the rows that the batch before did not use: the others are in caches. None for a
            single rank.
        place_of_uses: int64 ``[U]``, of each row in `uses`, if it is there; empty for a single rank.
        next_use: see `Window.leave`.
    """

    oldest: OldestBatch
    uses: NDArray[np.uint64] | None
    place_of_uses: NDArray[np.int64]
    next_use: NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowStep:
    """A batch enters a window, and the oldest one leaves it once the window is full.

    Attributes:
        new: see `Window.enter`.
        num_handles: see `Window.num_handles`.
        left: the batches that leave. If the batch that enters has no room, it does not enter, and all leave.
    """

    new: NDArray[np.int64]
    num_handles: int
    left: tuple[LeftBatch, ...]


class WindowAhead:
    """Makes the steps of a window, in a thread of its own. At most `lookahead` - 1 steps ahead of the planner:

    A row that the planner evicts is in no batch of its window. So all batches that have entered since and use the row
    are still in this one, and `BatchWindow.release_late` sees them.

    Args:
        spec: of the plans.
    """

    def __init__(self, spec: OracleSpec) -> None:
        self._spec = spec
        self._window = BatchWindow(spec, make_handles(spec.table_rows))
        self._rows = RowsHeld(spec)
        self._has_ended = False
        self._repeated: deque[NDArray[np.bool_]] = deque()  # by batch in the window, of several ranks
        self._released: deque[NDArray[np.int64]] = deque()

    @property
    def handles(self) -> DenseHandles | HashHandles:
        """Of the planner."""
        return self._window.handles

    def release(self, handles: NDArray[np.int64]) -> None:
        """See `Window.release`. Of the planner's thread."""
        self._released.append(handles)

    def step(self, indexed: IndexedBatch) -> WindowStep:
        """A batch enters, see `WindowStep`."""
        while self._released:
            self._window.release_late(self._released.popleft())
        nothing = np.empty(0, dtype=np.int64)
        if self._has_ended or not self._rows.fits(indexed):
            self._has_ended = True
            left = tuple(self.leave() for _ in range(len(self._window)))
            return WindowStep(new=nothing, num_handles=self._window.num_handles, left=left)
        self._rows.add(indexed)
        new = self._window.enter(indexed)
        if self._spec.world_size > 1:
            self._repeated.append(self._window.repeated())
        left = (self.leave(),) if len(self._window) >= self._spec.lookahead else ()
        return WindowStep(new=new, num_handles=self._window.num_handles, left=left)

    def __len__(self) -> int:
        return len(self._window)

    def leave(self) -> LeftBatch:
        """The oldest batch leaves. IndexError if there is none."""
        oldest, uses, places = self._window.oldest(), None, np.empty(0, dtype=np.int64)
        if self._spec.world_size > 1:
            is_wanted = ~self._repeated.popleft()
            uses, places = self._window.uses_of(np.flatnonzero(is_wanted)), is_wanted.cumsum() - 1
        return LeftBatch(oldest=oldest, uses=uses, place_of_uses=places, next_use=self._window.leave())


class SteppedWindow:
    """The planner's side of a `WindowAhead`.

    Args:
        ahead: runs the window.
        step: of the batch with a number.
        left: the next batch that leaves; waited for.
    """

    def __init__(self, ahead: WindowAhead, *, step: Callable[[int], WindowStep], left: Callable[[], LeftBatch]) -> None:
        self.handles = ahead.handles
        self.release = ahead.release
        self.num_handles = self.handles.num_handles
        self._step = step
        self._left = left
        self._num_batches = 0
        self._oldest: LeftBatch | None = None

    def __len__(self) -> int:
        return self._num_batches

    def enter(self, indexed: IndexedBatch) -> NDArray[np.int64]:
        """See `Window`."""
        step = self._step(indexed.batch_index)
        self.num_handles = step.num_handles
        self._num_batches += 1
        return step.new

    def oldest(self) -> OldestBatch:
        """See `Window`."""
        if not self._num_batches:
            raise IndexError("the window is empty")
        if self._oldest is None:
            self._oldest = self._left()
        return self._oldest.oldest

    def uses_of(self, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """See `Window`."""
        assert self._oldest is not None, "it was asked for"
        assert self._oldest.uses is not None, "there are several ranks"
        return self._oldest.uses.take(self._oldest.place_of_uses.take(positions), axis=0)

    def leave(self) -> NDArray[np.int32]:
        """See `Window`."""
        assert self._oldest is not None, "it was asked for"
        next_use, self._oldest = self._oldest.next_use, None
        self._num_batches -= 1
        return next_use
