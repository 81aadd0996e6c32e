from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.index import Indexer
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.rank_index import busiest_ranks, split_index
from bagpipe.types.batch import Batch
from tests.oracle.batches import make_batch, traces


def spec_of(world_size: int, num_features: int = 1) -> OracleSpec:
    refs = tuple(FeatureRef(feature=feature, table=feature) for feature in range(num_features))
    return OracleSpec(table_rows=(None,) * num_features, features=refs, num_slots=9, lookahead=1, world_size=world_size)


@given(traces(max_batches=3), st.data())
def test_a_share_is_the_index_of_the_ranks_own_batch(
    trace: tuple[OracleSpec, list[Batch]], data: st.DataObject
) -> None:
    spec, batches = trace
    for batch in batches:
        index = Indexer(spec).index(batch)
        drawn = st.lists(st.integers(0, spec.world_size - 1), min_size=batch.num_examples, max_size=batch.num_examples)
        ranks = np.array(data.draw(drawn), dtype=np.uint16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bagpipe.oracle.rank_index._FEW_RANKS", data.draw(st.sampled_from([0, spec.world_size])))
            rank_indexes = split_index(batch, spec, index, ranks)
        for rank, rank_index in enumerate(rank_indexes):
            assert rank_index.examples.tolist() == np.flatnonzero(ranks == rank).tolist()
            own = Indexer(spec).index(batch.select(rank_index.examples))
            assert index.unique.ids[rank_index.rows].tolist() == own.unique.ids.tolist()
            offsets = np.searchsorted(rank_index.rows, index.unique.table_offsets)
            assert offsets.tolist() == own.unique.table_offsets.tolist()
            for name in ("offsets", "order"):
                assert getattr(rank_index, name).tolist() == getattr(own, name).tolist()
                assert getattr(rank_index, name).dtype == np.int32
            assert rank_index.rows.dtype == rank_index.examples.dtype == np.int32


def test_more_ranks_than_a_byte_counts() -> None:
    spec = spec_of(world_size=300)
    batch = make_batch(0, [[[example % 7] for example in range(600)]])
    ranks = np.repeat(np.arange(300, dtype=np.uint16), 2)
    rank_indexes = split_index(batch, spec, Indexer(spec).index(batch), ranks)
    assert [rank_index.examples.tolist() for rank_index in rank_indexes[298:]] == [[596, 597], [598, 599]]
    assert rank_indexes[299].rows.tolist() == sorted({598 % 7, 599 % 7})


def test_ties_for_the_busiest_rank_go_to_the_lowest() -> None:
    spec = spec_of(world_size=3)
    #                       rank 0        rank 1     rank 2
    batch = make_batch(0, [[[1, 2, 2, 5], [1, 1, 2], [5, 9]]])
    index = Indexer(spec).index(batch)
    rank_indexes = split_index(batch, spec, index, np.array([0, 1, 2], dtype=np.uint16))
    assert index.unique.ids.tolist() == [1, 2, 5, 9]
    assert busiest_ranks(rank_indexes, 4).tolist() == [1, 0, 0, 2]
