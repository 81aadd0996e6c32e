from __future__ import annotations

import dataclasses

from bagpipe.oracle.batch_indexer import BatchIndexer
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from tests.oracle.batches import make_batch

SPEC = OracleSpec(
    table_rows=(None,), features=(FeatureRef(feature=0, table=0),), num_slots=9, lookahead=1, assign="locality"
)


def test_one_rank_keeps_the_whole_index_and_several_their_shares() -> None:
    batch = make_batch(3, [[[5, 5], [6]]])
    alone = BatchIndexer(SPEC).index(batch)
    assert (alone.batch_index, alone.unique.ids.tolist(), alone.rank_indexes) == (3, [5, 6], ())
    assert alone.whole is not None
    assert alone.whole.inverse.tolist() == [0, 0, 1]
    shared = BatchIndexer(dataclasses.replace(SPEC, world_size=3)).index(batch)
    assert shared.whole is None
    assert [rank_index.rows.tolist() for rank_index in shared.rank_indexes] == [[], [0], [1]]


def test_the_assignment_learns_from_every_batch() -> None:
    indexer = BatchIndexer(dataclasses.replace(SPEC, world_size=2))
    assert indexer.learns
    assert not BatchIndexer(dataclasses.replace(SPEC, world_size=2, assign="contiguous")).learns
    assert not BatchIndexer(SPEC).learns
    indexer.index(make_batch(0, [[[5], [6]]]))
    second = indexer.index(make_batch(1, [[[6], [5]]]))
    assert [rank_index.examples.tolist() for rank_index in second.rank_indexes] == [[1], [0]]
