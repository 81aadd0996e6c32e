from __future__ import annotations

import pytest

from bagpipe.oracle.direct import DirectPlanner
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from tests.oracle.batches import make_batch


def test_every_batch_fetches_everything_after_everything_was_written() -> None:
    spec = OracleSpec(table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=0, lookahead=64)
    planner = DirectPlanner(spec)
    assert not planner.is_ready
    with pytest.raises(IndexError):
        planner.plan()
    planner.push(make_batch(0, [[[5, 6, 5]]]))
    planner.push(make_batch(1, [[[6]]]))
    first, second = planner.plan(), planner.plan()
    assert first.owners[0].fetch.ids.tolist() == [5, 6]
    assert not first.owners[0].fetch_new.any()
    assert second.owners[0].evict.ids.tolist() == [5, 6]
    assert (second.owners[0].evict_after, second.owners[0].fetch_after) == (0, 1)
    assert second.owners[0].num_slots == 2


def test_planned_rows_are_not_new_on_any_owner() -> None:
    spec = OracleSpec(
        table_rows=(10,), features=(FeatureRef(feature=0, table=0),), num_slots=0, lookahead=64, world_size=2
    )
    planner = DirectPlanner(spec)
    planner.push(make_batch(0, [[[5, 6], [6, 6, 7]]]))
    planner.push(make_batch(1, [[[6], [9]]]))
    first, second = planner.plan(), planner.plan()
    assert [owner.fetch_new.tolist() for owner in first.owners] == [[True], [True, True]]
    assert [owner.fetch.ids.tolist() for owner in second.owners] == [[6], [9]]
    assert [owner.fetch_new.tolist() for owner in second.owners] == [[False], [True]]


def test_the_busiest_rank_owns_a_row_for_one_batch() -> None:
    spec = OracleSpec(
        table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=0, lookahead=64, world_size=2
    )
    planner = DirectPlanner(spec)
    planner.push(make_batch(0, [[[5, 6], [6, 6, 7]]]))
    planner.push(make_batch(1, [[[6], [9]]]))
    first, second = planner.plan(), planner.plan()
    assert [owner.fetch.ids.tolist() for owner in first.owners] == [[5], [6, 7]]
    assert [owner.evict.ids.tolist() for owner in second.owners] == [[5], [6, 7]]
    assert [owner.fetch.ids.tolist() for owner in second.owners] == [[6], [9]]
    assert [owner.num_slots for owner in second.owners] == [1, 2]
    # Row 6 comes back through the store, so no pull waits for the previous batch.
    assert [exchange.pull_now.tolist() for exchange in second.exchanges] == [[False], [False]]
    assert first.consumers[0].owners.tolist() == [0, 1]
    assert first.exchanges[1].serve_offsets.tolist() == [0, 1, 3]
    assert first.exchanges[1].serve_rows.tolist() == [0, 0, 1]
