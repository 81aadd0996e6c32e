from __future__ import annotations

import numpy as np
import pytest

from bagpipe.types.batch import NO_USE, Batch
from data.next_use_batches import BatchUses
from data.next_use_sort import FAR


def batch_of(index: int, lengths: list[list[int]]) -> Batch:
    num_examples = len(lengths[0])
    return Batch(
        index=index,
        dense=np.zeros((num_examples, 0), dtype=np.float32),
        values=np.zeros(int(np.sum(lengths)), dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int32),
        labels=np.zeros(num_examples, dtype=np.float32),
    )


def test_places_are_those_of_the_examples() -> None:
    uses = BatchUses(cycle=10, rows=10, batch_size=2, epochs=1)
    one_hot = uses.of(batch_of(1, [[1, 1], [1, 1]]), 0, np.array([1, 1, 2, 6], dtype=np.uint32))
    assert one_hot.dtype == np.int32
    assert one_hot.tolist() == [1, 2, 2, 4]
    bags = uses.of(batch_of(1, [[0, 2], [2, 0]]), 0, np.array([0, 1, 0, 7], dtype=np.uint32))
    assert bags.tolist() == [1, 2, 1, 4]


@pytest.mark.parametrize(
    ("rows", "epochs", "expected"),
    [
        (5, 1, [2, NO_USE, NO_USE, NO_USE]),  # places 4, 5, 6 and far
        (5, 2, [2, 3, 3, NO_USE]),  # three batches an epoch, the last one smaller
        (4, 2, [NO_USE, 2, 2, NO_USE]),  # place 4 is left out, so its row is taken for unused
    ],
)
def test_the_last_use_of_an_epoch_leads_to_the_next_one(rows: int, epochs: int, expected: list[int]) -> None:
    uses = BatchUses(cycle=5, rows=rows, batch_size=2, epochs=epochs)
    distances = np.array([3, 4, 5, FAR], dtype=np.uint32)
    assert uses.of(batch_of(0, [[0, 4]]), 0, distances).tolist() == expected


def test_distances_of_a_shorter_log_can_be_anything() -> None:
    uses = BatchUses(cycle=5, rows=4, batch_size=2, epochs=9)
    found = uses.of(batch_of(1, [[1, 1]]), 0, np.array([FAR - 1, 0], dtype=np.uint32))
    assert found.tolist() == [NO_USE, 1]
