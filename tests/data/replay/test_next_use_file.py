from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.batch import NO_USE
from data.replay.next_use_file import NextUseFile, told
from data.replay.row_batch_file import RowBatchFile
from data.replay.row_counter import RowCounter
from tests.oracle.batches import make_batch, with_next_uses

SPEC = OracleSpec(
    table_rows=(None, None),
    features=(FeatureRef(feature=1, table=0), FeatureRef(feature=0, table=1), FeatureRef(feature=2, table=1)),
    num_slots=4,
    lookahead=1,
)


def test_next_uses_are_in_the_order_of_the_rows(tmp_path: Path) -> None:
    batches = [np.array(rows, dtype=np.int32) for rows in ([0, 1], [1, 2], [], [0])]
    with NextUseFile(batches, 3, tmp_path) as found:
        assert [found[number].tolist() for number in range(4)] == [[3, 1], [NO_USE, NO_USE], [], [NO_USE]]
    assert not list(tmp_path.iterdir())


def test_a_next_use_after_a_row_expired_is_marked(tmp_path: Path) -> None:
    """Row 0 expires before batch 3, which uses it, and before batch 5; row 1 before batch 2 and never comes again."""
    batches = [np.array(rows, dtype=np.int32) for rows in ([0, 1], [0], [2], [0], [2], [], [0])]
    expired = [np.array(rows, dtype=np.int32) for rows in ([], [], [1], [0], [], [0], [])]
    with NextUseFile(batches, 3, tmp_path, expired=expired) as found:
        assert [found[number].tolist() for number in range(7)] == [
            [1, NO_USE], [~3], [4], [~6], [NO_USE], [], [NO_USE]
        ]  # fmt: skip


def test_the_file_is_removed_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(IndexError), NextUseFile([np.array([5], dtype=np.int32)], 3, tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_batches_are_told_the_next_uses_of_their_occurrences(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    batches = [
        make_batch(n, [[random.integers(0, 9, random.integers(0, 3)).tolist() for _ in range(4)] for _ in range(3)])
        for n in range(12)
    ]
    counter = RowCounter(SPEC)
    with RowBatchFile(tmp_path) as rows:
        for batch in batches:
            rows.append(counter.take(batch))
        with NextUseFile(rows, counter.num_rows, tmp_path) as next_uses:
            found = list(told(batches, next_uses, SPEC))
    for batch, expected in zip(found, with_next_uses(SPEC, batches), strict=True):
        np.testing.assert_array_equal(batch.next_use, expected.next_use)
