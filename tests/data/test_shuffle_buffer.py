from __future__ import annotations

import gzip
from typing import Any

import numpy as np
import pytest

from bagpipe.errors import InputError
from data.criteo import CriteoSource
from data.loader import LookaheadLoader
from data.row_order import group_permutation
from data.testing import assert_same_batches, check_resume, read_all
from tests.data.files import criteo_line

ROWS = 600


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CriteoSource:
    """Rows in one .gz file, which without a buffer are mixed within blocks of about 20 rows only."""
    path = tmp_path_factory.mktemp("rows") / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"".join(criteo_line(sparse=f"{row:x}") + b"\n" for row in range(ROWS))))
    return CriteoSource(files=(str(path),), block_bytes=2000)


def order(source: CriteoSource, **options: Any) -> list[int]:
    """The numbers of the rows, as they are served."""
    settings: dict[str, Any] = {"batch_size": 50, "shuffle": True, "seed": 1, **options}
    batches = read_all(LookaheadLoader(source, **settings))
    return [int(row) for batch in batches for row in batch.values[: batch.num_examples]]


def test_every_row_is_served_once_an_epoch(source: CriteoSource) -> None:
    for buffer in (0, 1, 100, 10 * ROWS):
        found = order(source, shuffle_buffer=buffer, epochs=2)
        assert sorted(found[:ROWS]) == sorted(found[ROWS:]) == list(range(ROWS))
        assert found[:ROWS] != found[ROWS:]


def test_rows_move_as_far_as_the_buffer_is_long(source: CriteoSource) -> None:
    def farthest(buffer: int) -> int:
        return int(np.abs(np.array(order(source, shuffle_buffer=buffer)) - np.arange(ROWS)).max())

    assert farthest(0) < 30
    assert 70 < farthest(100) < 140
    assert farthest(ROWS) > 400


def test_the_order_depends_on_seed_and_epoch_alone(source: CriteoSource) -> None:
    assert order(source, shuffle_buffer=100) == order(source, shuffle_buffer=100, batch_size=7, workers=2)
    assert order(source, shuffle_buffer=100) != order(source, shuffle_buffer=100, seed=2)


def test_the_order_never_changes() -> None:
    """It is part of what a checkpoint promises."""
    assert group_permutation(8, 1, 2, 3, 4).tolist() == [3, 2, 4, 1, 0, 6, 5, 7]


@pytest.mark.parametrize("options", [{}, {"limit": 333}, {"eval_fraction": 0.4, "limit": 500}])
def test_a_loader_resumes_in_a_group(source: CriteoSource, options: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"batch_size": 40, "shuffle": True, "shuffle_buffer": 90, "epochs": 2, **options}
    check_resume(lambda state: LookaheadLoader(source, state=state, **settings))


def test_a_position_of_another_order_is_refused(source: CriteoSource) -> None:
    with LookaheadLoader(source, batch_size=9, shuffle=True) as loader:
        state = next(loader).reader_state
    with pytest.raises(InputError, match="loader state: shuffle_buffer was None when saved, is 50 now"):
        LookaheadLoader(source, batch_size=9, shuffle=True, shuffle_buffer=50, state=state)


def test_file_order_and_evaluation_know_no_buffer(source: CriteoSource) -> None:
    plain = read_all(LookaheadLoader(source, batch_size=50))
    assert_same_batches(read_all(LookaheadLoader(source, batch_size=50, shuffle_buffer=100)), plain)
    options: dict[str, Any] = {"batch_size": 50, "eval_fraction": 0.5, "phase": "eval"}
    held_out = read_all(LookaheadLoader(source, **options))
    shuffled = LookaheadLoader(source, shuffle=True, shuffle_buffer=100, **options)
    assert_same_batches(read_all(shuffled), held_out)
