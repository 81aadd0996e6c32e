"""Earlier weights of rows: kept, saved and taken back by table and id; what they replace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cache.earlier_rows import EarlierRows
from bagpipe.cache.slots import SlotTable
from bagpipe.errors import InputError
from bagpipe.oracle.plan import RowList
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(
    tables=(RowTable(name="a", dim=2), RowTable(name="b", dim=2), RowTable(name="c", dim=3)),
    optimizer="sgd",
    dtype="float32",
    seed=0,
)


def rows(*ids: list[int]) -> RowList:
    """Rows of the tables by their ids."""
    return RowList(
        table_offsets=np.cumsum([0, *map(len, ids)]), ids=np.array([each for own in ids for each in own], np.int64)
    )


def weights(kept: RowList, dim: int, sign: float = 1.0) -> torch.Tensor:
    """Of a row the table's number and the id, in every column."""
    tables = np.repeat(np.arange(len(kept.table_offsets) - 1), np.diff(kept.table_offsets))
    return torch.from_numpy(sign * (1000 * tables + kept.ids)).float()[:, None].expand(-1, dim).clone()


def empty() -> EarlierRows:
    return EarlierRows(SCHEMA, SlotTable(40))


#: Tables and ids.
NAMES = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 9)))


@given(NAMES, NAMES)
def test_what_two_ranks_kept_replaces_the_rows_of_the_slots(
    first: set[tuple[int, int]], second: set[tuple[int, int]]
) -> None:
    saved = {}
    for rank, own in enumerate((first, second - first)):
        held = empty()
        kept = rows(*(sorted(i for table, i in own if table == number) for number in (0, 1)), [])
        held.keep("X_UPDATE", 0, kept, weights(kept, 2, -1.0))
        saved |= {f"{rank}.{name}": tensor for name, tensor in held.tensors().items()}
    slots = SlotTable(40)
    resident = rows([*range(10)], [*range(10)], [*range(5)])
    slots.claim(resident, np.arange(25, dtype=np.int32), np.zeros(25, np.uint64))
    earlier = EarlierRows(SCHEMA, slots)
    earlier.load(saved)
    index = torch.randperm(20)
    out = weights(resident, 2)[index]
    earlier.apply(index, out)
    for slot, row in zip(index.tolist(), out.tolist(), strict=True):
        table, i = divmod(slot, 10)
        sign = -1 if (table, i) in first | second else 1
        assert row == [sign * (1000 * table + i)] * 2


def test_rows_of_a_batch_replace_those_of_the_batch_before() -> None:
    held = empty()
    for ids in ([1, 2, 3], [5]):
        for share, kept, group in (("now", rows(ids, [], []), 0), ("late", rows([], [], ids), 1)):
            held.keep(share, group, kept, weights(kept, 2 + group))
    saved = held.tensors()
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        "late.2.ids": [5],
        "late.2.weights": [[2005.0] * 3],
        "now.0.ids": [5],
        "now.0.weights": [[5.0] * 2],
    }


def test_only_the_first_batch_after_a_load_reads_them() -> None:
    held = empty()
    held.begin(5)
    assert not held.is_read_by(5)  # nothing was loaded
    held.load({"0.now.0.ids": torch.tensor([3]), "0.now.0.weights": torch.ones(1, 2)})
    held.begin(5)
    assert [held.is_read_by(step) for step in (None, 4, 5, 6)] == [False, False, True, False]
    held.begin(9)  # a later run goes on from rows that have all updates
    assert not held.is_read_by(9)


@pytest.mark.parametrize(("given", "found"), [({}, "none"), ({"0.now.2.weights": torch.ones(1, 2)}, r"\[1, 2\]")])
def test_weights_that_do_not_fit(given: dict[str, torch.Tensor], found: str) -> None:
    with pytest.raises(InputError, match=rf"expected \[1, 3\] weights '0\.now\.2\.ids' of rows .*, got {found}"):
        empty().load({"0.now.2.ids": torch.tensor([3]), **given})
