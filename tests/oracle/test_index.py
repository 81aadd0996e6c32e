from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from bagpipe.errors import InputError
from bagpipe.oracle.index import Indexer
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.batch import Batch
from tests.oracle.batches import make_batch, traces


def spec_of(*table_rows: int | None) -> OracleSpec:
    refs = tuple(FeatureRef(feature=table, table=table) for table in range(len(table_rows)))
    return OracleSpec(table_rows=table_rows, features=refs, num_slots=1, lookahead=1)


def test_the_example_of_the_docstring() -> None:
    #          table 0: bags [7 7] [3]    table 1: bags [] [7]
    index = Indexer(spec_of(None, None)).index(make_batch(0, [[[7, 7], [3]], [[], [7]]]))
    assert index.unique.table_offsets.tolist() == [0, 2, 3]
    assert index.unique.ids.tolist() == [3, 7, 7]
    assert index.inverse.tolist() == [1, 1, 0, 2]
    assert index.offsets.tolist() == [0, 1, 3, 4]
    assert index.order.tolist() == [2, 0, 1, 3]


@given(traces())
def test_equals_a_plain_implementation(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    indexer = Indexer(spec)
    for batch in batches:
        index = indexer.index(batch)
        offsets = batch.feature_offsets()
        occurrences = [
            (ref.table, int(np.uint64(i & (2**64 - 1))), i)
            for ref in spec.features
            for i in batch.values[offsets[ref.feature] : offsets[ref.feature + 1]].tolist()
        ]
        rows = sorted(set(occurrences))
        assert index.unique.ids.tolist() == [row[2] for row in rows]
        assert index.inverse.tolist() == [rows.index(row) for row in occurrences]
        by_row = sorted(range(len(occurrences)), key=lambda p: (occurrences[p], p))
        assert index.order.tolist() == by_row
        assert index.offsets.tolist() == [
            *(next(n for n, p in enumerate(by_row) if occurrences[p] == row) for row in rows),
            len(occurrences),
        ]


@pytest.mark.parametrize("largest", [9, 2**40, 2**63 - 1])
@pytest.mark.parametrize("num_examples", [3, 400])
@pytest.mark.parametrize("most", [1, 3])
def test_tables_with_few_and_with_many_ids(largest: int, num_examples: int, most: int) -> None:
    """Tables are handled together or one by one, bags all of one id or not; the first table's ids are always small."""
    rng = np.random.default_rng(largest % 97)
    lengths = [rng.integers(most == 1, most + 1, num_examples).tolist() for _ in range(3)]
    bags = [
        [rng.integers(-9 if table and largest > 9 else 0, largest if table else 9, n).tolist() for n in of_table]
        for table, of_table in enumerate(lengths)
    ]
    index = Indexer(spec_of(9, None, None)).index(make_batch(0, bags))
    rows = [(table, i % 2**64) for table, of_table in enumerate(bags) for bag in of_table for i in bag]
    unique = sorted(set(rows))
    assert [i % 2**64 for i in index.unique.ids.tolist()] == [i for _, i in unique]
    assert index.unique.table_offsets.tolist() == [sum(table < n for table, _ in unique) for n in range(4)]
    places = {row: place for place, row in enumerate(unique)}
    assert index.inverse.tolist() == [places[row] for row in rows]
    assert index.order.tolist() == sorted(range(len(rows)), key=lambda n: (places[rows[n]], n))


@pytest.mark.parametrize("wide", [2**45, 2**62, -1, -(2**63)])
def test_ids_too_wide_to_pack_with_their_position(wide: int) -> None:
    index = Indexer(spec_of(None, None)).index(make_batch(0, [[[wide, 5], [wide]], [[5], [5]]]))
    assert index.unique.ids.tolist() == [5, wide, 5]
    assert index.inverse.tolist() == [1, 0, 1, 2, 2]


def test_a_batch_without_ids() -> None:
    index = Indexer(spec_of(None, 4)).index(make_batch(0, [[[], []], [[], []]]))
    assert index.unique.table_offsets.tolist() == [0, 0, 0]
    assert index.offsets.tolist() == [0]


@pytest.mark.parametrize("bad", [4, 2**40, -1])
def test_an_id_outside_its_table(bad: int) -> None:
    with pytest.raises(InputError, match=rf"table number 1: expected ids in \[0, 4\), got {bad}"):
        Indexer(spec_of(None, 4)).index(make_batch(0, [[[9]], [[bad]]]))


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(InputError, match=r"^expected tables of at least 1 row, got 0 in table number 1$"):
        Indexer(spec_of(4, 0))
