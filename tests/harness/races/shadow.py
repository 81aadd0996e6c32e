"""`Shadow`: who used which cells of one piece of memory last. Knows numbers only.

cell ──> last write (agent, time), last read of every agent          access ──note──> earlier ones that it is not after

Only last writes are kept: one that was ordered after an earlier write and read stands for them, and one that was not
has been reported (Flanagan and Freund's FastTrack, 2009, for cells in place of variables).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tests.harness.races.clocks import Clock

__all__ = ["CELL_BYTES", "Cells", "Shadow"]

#: Bytes of a cell: no two elements of the dtypes in use that stand side by side belong to different lanes below that.
CELL_BYTES = 4

#: Cell numbers: a range, or one by one.
Cells = slice | NDArray[np.int64]


class Shadow:
    """The cells of one storage.

    Args:
        num_bytes: of the storage.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        num_cells = -(-num_bytes // CELL_BYTES)
        self._writers = np.zeros(num_cells, dtype=np.int32)  # agent 0: nobody
        self._written = np.zeros(num_cells, dtype=np.int64)
        self._reads: dict[int, NDArray[np.int64]] = {}

    def note(
        self, cells: Cells, agent: int, time: int, clock: Clock, num_agents: int, *, writes: bool
    ) -> tuple[tuple[int, int, bool], ...]:
        """An access.

        Args:
            cells: what it touches.
            agent, time: who, and when by its own clock.
            clock: what it knows.
            num_agents: numbers of agents are below this.
            writes: or reads.

        Returns:
            (agent, time, whether it wrote) of accesses that it is not ordered after: of each agent the last.
        """
        found = [*self._unordered_writes(cells, clock, num_agents)]
        if writes:
            found += self._unordered_reads(cells, agent, clock)
            self._writers[cells] = agent
            self._written[cells] = time
        else:
            if agent not in self._reads:
                self._reads[agent] = np.zeros(len(self._written), dtype=np.int64)
            self._reads[agent][cells] = time
        return tuple(found)

    def _unordered_writes(self, cells: Cells, clock: Clock, num_agents: int) -> Iterator[tuple[int, int, bool]]:
        writers, written = self._writers[cells], self._written[cells]
        unordered = written > clock.limits(num_agents)[writers]
        if not unordered.any():
            return
        for agent in np.unique(writers[unordered]).tolist():
            yield agent, int(written[unordered & (writers == agent)].max()), True

    def _unordered_reads(self, cells: Cells, agent: int, clock: Clock) -> Iterator[tuple[int, int, bool]]:
        for reader, times in self._reads.items():
            time = int(times[cells].max(initial=0))
            if reader != agent and not clock.knows(reader, time):
                yield reader, time, False
