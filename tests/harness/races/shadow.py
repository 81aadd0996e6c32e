"""`Shadow`: last accesses of the cells of one storage. Knows only numbers.

cell ──> last write (agent, time), last read of every agent     access ──note──> earlier ones that it is not after

Only last accesses are kept: a write that was ordered after an earlier access implies it, and one that was not has been
reported (FastTrack, Flanagan and Freund 2009, with cells instead of variables).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tests.harness.races.clocks import Clock

__all__ = ["CELL_BYTES", "Cells", "Shadow"]

#: Bytes of a cell. All elements of a cell belong to the same lane, for all dtypes in use.
CELL_BYTES = 4

#: Cell indices: a range or an array.
Cells = slice | NDArray[np.int64]


class Shadow:
    """The cells of one storage.

    Args:
        num_bytes: of the storage.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        num_cells = -(-num_bytes // CELL_BYTES)
        self._writers = np.zeros(num_cells, dtype=np.int32)  # agent 0: none
        self._written = np.zeros(num_cells, dtype=np.int64)
        self._reads: dict[int, NDArray[np.int64]] = {}

    def note(
        self, cells: Cells, agent: int, time: int, clock: Clock, num_agents: int, *, writes: bool
    ) -> tuple[tuple[int, int, bool], ...]:
        """Record an access.

        Args:
            cells: of the access.
            agent, time: the agent and its own time.
            clock: of the agent.
            num_agents: agent numbers are below this.
            writes: whether it writes.

        Returns:
            (agent, time, whether it wrote) of the last access of each agent that this access is not ordered after.
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
