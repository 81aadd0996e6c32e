"""History of decaying tables: what checkpoints keep of it, and which jobs may go on with it."""

from __future__ import annotations

import pytest
import torch

from bagpipe.cache.lookup_layout import TableLookup, build_layout
from bagpipe.cache.row_history import RowHistory
from bagpipe.errors import InputError
from bagpipe.kernels.interface import RowStep
from bagpipe.types.schema import RowSchema, RowTable

CPU = torch.device("cpu")
TABLES = (
    RowTable(name="a", dim=2, optimizer="adagrad_decayed"),
    RowTable(name="b", dim=2, optimizer="adagrad_decayed"),
    RowTable(name="c", dim=2),
)
SCHEMA = RowSchema(tables=TABLES, optimizer="sgd", dtype="float64")


def history_of(settings: tuple[int, ...], rates: list[tuple[float, ...]], begins_at: int = 0) -> RowHistory:
    history = RowHistory(SCHEMA, CPU)
    begin(history, settings, begins_at, rates)
    return history


def begin(history: RowHistory, settings: tuple[int, ...], num_steps: int, rates: list[tuple[float, ...]]) -> None:
    layout = build_layout(TABLES, [], [TableLookup()] * 3, settings)
    history.begin(layout, num_steps)
    for batch in rates:
        history.note(layout, [RowStep(lr=lr, eps=0.0, step=1, weight_decay=0.5) for lr in batch])


def test_a_checkpoint_keeps_the_factors_of_the_batches_before_it() -> None:
    history = history_of((0, 1, 2), [(0.5, 1.0, 0.0), (0.25, 1.0, 0.0)])
    assert history.decaying == {0, 1}
    assert {name: value.tolist() for name, value in history.state(1).items()} == {
        "factors.0": [0.75],
        "factors.1": [0.5],
        "tables": [0, 1, -1],
    }
    resumed = RowHistory(SCHEMA, CPU)
    resumed.load(history.state(1))
    begin(resumed, (0, 1, 2), 1, [(0.25, 1.0, 0.0)])
    records = torch.tensor([[8.0, 8.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for table, expected in ((0, 8 * 0.75 * 0.875), (1, 2.0), (2, 8.0)):
        found = records.clone()
        resumed.catch_up(table, found)
        assert found[0, :2].tolist() == [expected, expected]


def test_tables_share_a_history_while_their_rates_are_equal() -> None:
    history = history_of((0, 0, 1), [(0.5, 0.0)])
    assert history.state(1)["tables"].tolist() == [0, 0, -1]
    apart = RowHistory(SCHEMA, CPU)
    apart.load(history.state(1))
    begin(apart, (0, 1, 2), 1, [(0.5, 0.25, 0.0)])
    assert apart.state(2)["tables"].tolist() == [0, 1, -1]
    again = RowHistory(SCHEMA, CPU)
    again.load(apart.state(2))
    with pytest.raises(InputError, match=r"tables \['a', 'b'\] decayed at different rates before"):
        begin(again, (0, 0, 1), 2, [])


def test_rates_of_the_batches_before_are_needed() -> None:
    with pytest.raises(InputError, match="expected the rates of the 3 batches before, the checkpoint has 0"):
        history_of((0, 0, 1), [], begins_at=3)
    with pytest.raises(InputError, match="decay in other tables"):
        RowHistory(SCHEMA, CPU).load({"tables": torch.tensor([-1, -1, -1])})


def test_nothing_is_kept_if_no_rows_decay() -> None:
    plain = RowHistory(RowSchema(tables=(RowTable(name="a", dim=2),), optimizer="sgd"), CPU)
    assert (plain.decaying, plain.state(5), plain.missed(0)) == (frozenset(), {}, None)
