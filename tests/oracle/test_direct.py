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
