"""Grouping of tables by pooling and dimension."""

from __future__ import annotations

import pytest

from bagpipe.cache.lookup_layout import TableLookup, build_layout
from bagpipe.errors import InputError
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.schema import RowTable


def test_groups() -> None:
    dims = [4, 4, 8, 8, 8, 8]
    lookups = [
        TableLookup(),
        TableLookup(),
        TableLookup(),
        TableLookup(pooling="mean"),
        TableLookup(collection=1),
        TableLookup(collection=1),
    ]
    segment_tables = [0, 0, 1, 2, 3, 3, 5]  # no feature reads table 4
    layout = build_layout(
        [RowTable(name=str(number), dim=dim) for number, dim in enumerate(dims)],
        [FeatureRef(feature=number, table=table) for number, table in enumerate(segment_tables)],
        lookups,
    )
    got = [(r.index, r.dim, r.first_table, r.end_table, r.first_segment, r.end_segment) for r in layout.groups]
    assert got == [
        # group, dim, tables, segments
        (0, 4, 0, 2, 0, 3),
        (1, 8, 2, 3, 3, 4),
        (2, 8, 3, 4, 4, 6),
        (3, 8, 4, 6, 6, 7),
    ]
    assert [group.index for group in layout.collection_groups(1)] == [3]


def test_refusals() -> None:
    tables = [RowTable(name="a", dim=4), RowTable(name="b", dim=4)]
    with pytest.raises(InputError, match=r"sorted by table number, got table numbers \[1, 0\]"):
        build_layout(tables, [FeatureRef(feature=0, table=1), FeatureRef(feature=0, table=0)], [TableLookup()] * 2)
    with pytest.raises(InputError, match="weights need sum pooling, got pooling 'mean'"):
        TableLookup(pooling="mean", weighted=True)
