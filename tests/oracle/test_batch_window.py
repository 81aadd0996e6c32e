"""Plans from a window that runs ahead of its planner are those of a window beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import CapacityError
from bagpipe.oracle.batch_indexer import BatchIndexer, IndexedBatch
from bagpipe.oracle.batch_window import LeftBatch, SteppedWindow, WindowAhead, WindowStep
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import Planner, plan_batches, plans_of
from bagpipe.types.batch import Batch
from tests.oracle.batches import far_traces, make_batch, traces
from tests.oracle.plan_bytes import as_bytes


class Stepped:
    """A planner, and a window that is as many batches ahead of it as asked for."""

    def __init__(self, spec: OracleSpec, batches: Sequence[Batch], ahead: int) -> None:
        self._batches = batches
        self._ahead = ahead
        self._index = BatchIndexer(spec).index
        self._steps = WindowAhead(spec)
        self._made: list[tuple[IndexedBatch, WindowStep]] = []
        self._left: deque[LeftBatch] = deque()
        self._num_taken = 0
        window = SteppedWindow(self._steps, step=lambda index: self._made[index][1], left=self._next_left)
        self.planner = Planner(spec, self, window)

    learns = False

    def num_unique(self, batch: Batch) -> int:
        return len(self.index(batch).unique)

    def index(self, batch: Batch) -> IndexedBatch:
        for later in self._batches[len(self._made) : batch.index + self._ahead + 1]:
            indexed = self._index(later)
            self._made.append((indexed, self._steps.step(indexed)))
        for _, step in self._made[self._num_taken : batch.index + 1]:
            self._left += step.left
        self._num_taken = batch.index + 1
        return self._made[batch.index][0]

    def _next_left(self) -> LeftBatch:
        return self._left.popleft() if self._left else self._steps.leave()


@settings(max_examples=100, deadline=None)
@given(traces() | far_traces(), st.data())
def test_plans_do_not_depend_on_the_thread_of_the_window(
    trace: tuple[OracleSpec, list[Batch]], data: st.DataObject
) -> None:
    spec, batches = trace
    if not spec.num_slots:
        return
    expected = [as_bytes(plan) for _, plan in plan_batches(batches, spec)]
    stepped = Stepped(spec, batches, data.draw(st.integers(0, spec.lookahead - 1)))
    assert [as_bytes(plan) for plan in plans_of(stepped.planner, batches)] == expected


@pytest.mark.parametrize("ahead", [0, 3, 5])
def test_rows_that_come_back_while_their_handles_are_released(ahead: int) -> None:
    spec = OracleSpec(
        table_rows=(None, None),
        features=tuple(FeatureRef(feature=table, table=table) for table in range(2)),
        num_slots=130,
        lookahead=6,
        world_size=2,
    )
    rng = np.random.default_rng(7)
    batches = [make_batch(number, (rng.zipf(1.3, (2, 20, 2)) % 400).tolist()) for number in range(120)]
    expected = [as_bytes(plan) for _, plan in plan_batches(batches, spec)]
    stepped = Stepped(spec, batches, ahead)
    assert [as_bytes(plan) for plan in plans_of(stepped.planner, batches)] == expected


def test_a_batch_without_room_enters_neither_window() -> None:
    """Those before it are planned without it: nothing after it is wanted."""
    spec = OracleSpec(table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=4, lookahead=5)
    batches = [make_batch(number, [[[number, number + 1]]]) for number in range(7)]
    batches[5] = make_batch(5, [[[1, 2, 3, 4, 5]]])

    def plans(planner: Planner) -> list[bytes]:
        found = []
        for batch in batches[:5]:
            planner.push(batch)
        found.append(as_bytes(planner.plan()))
        with pytest.raises(CapacityError):
            planner.push(batches[5])
        assert planner.num_unique(batches[6]) == 2
        return found + [as_bytes(planner.plan()) for _ in range(4)]

    assert plans(Stepped(spec, batches, 2).planner) == plans(Planner(spec))
