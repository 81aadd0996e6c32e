from __future__ import annotations

import pytest

from bagpipe.errors import InputError
from tests.trainer.batches import batch_of
from tests.trainer.schemas import schema_of
from trainer.groups import GroupColumn, feature_number


def test_the_group_of_an_example_is_its_id() -> None:
    groups = GroupColumn(1)
    groups.add(batch_of([[[1], [2, 3], []], [[-7], [], [2**62]]]))
    groups.add(batch_of([[[]], [[5, 6]]]))
    ids, lengths = groups.columns()
    assert ids.tolist() == [-7, 0, 2**62, 5]
    assert lengths.tolist() == [1, 0, 1, 2]


def test_groups_of_batches_of_one_id_per_bag_and_of_none() -> None:
    groups = GroupColumn(0)
    assert [column.tolist() for column in groups.columns()] == [[], []]
    groups.add(batch_of([[[4], [5]], [[6], [7]]]))
    assert groups.columns()[0].tolist() == [4, 5]


def test_the_number_of_a_feature() -> None:
    data = schema_of(4, 4)
    assert [feature_number(data, name) for name in ("f0", "f1")] == [0, 1]
    with pytest.raises(InputError, match=r"^eval\.group must be a feature of the data, one of f0, f1, got 'x'$"):
        feature_number(data, "x")
