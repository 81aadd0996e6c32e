"""Rows of a batch that no lookup has, because the model leaves their ids out: no optimizer moves them, as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from bagpipe.errors import InputError, JobError
from bagpipe.kernels.interface import RowStep
from bagpipe.kernels.row_optimizer import ROW_OPTIMIZERS
from bagpipe.optim import SGD, Adam, AdamW, Ftrl, Momentum, RowOptimizer, RowWiseAdagrad
from tests.train_pipeline.plain_loop import PlainLoop, assert_close
from tests.train_pipeline.rank_jobs import made, on_ranks, shard
from tests.train_pipeline.small import EXAMPLES, batches, pipeline, progress_all, state_of
from tests.train_pipeline.test_derived_lookups import PlainBy, SmallBy

RATE = 0.05


def _left_out(ids: KeyedJaggedTensor, share: int) -> KeyedJaggedTensor:
    """Without each id whose position is a multiple of `share`."""
    keep = torch.arange(len(ids.values())) % share != 0
    bags = torch.split(keep, ids.lengths().tolist())
    lengths = torch.stack([bag.sum() for bag in bags]).int()
    return KeyedJaggedTensor(keys=ids.keys(), values=ids.values()[keep], lengths=lengths, stride=ids.stride())


def _masked(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    found: Tensor = look_up(_left_out(ids, 2))
    return found


def _masked_twice(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    """Every third batch as planned, else other ids in two lookups."""
    found: Tensor = look_up(ids) if seen % 3 == 2 else look_up(_left_out(ids, 2)) + look_up(_left_out(ids, 3))
    return found


def _without_gradient(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    """The planned lookup has all rows, and touches none."""
    with torch.no_grad():
        target: Tensor = look_up(ids)
    return _masked(look_up, ids, seen) + target


def _not_in_all(look_up: Any, ids: KeyedJaggedTensor, seen: int) -> Tensor:
    """No lookup in every fourth micro-batch."""
    found: Tensor = look_up(ids) if seen % 4 != 1 else torch.zeros(EXAMPLES, 12, dtype=torch.float64)
    return found


class _Formula:
    """An optimizer of the rows that have a gradient, by its formula.

    Args:
        optimizer: its settings.
        tables: with sparse gradients.
    """

    def __init__(self, optimizer: RowOptimizer, tables: list[Tensor]) -> None:
        self._rule = ROW_OPTIMIZERS[optimizer.name]
        self._optimizer, self._tables, self._step = optimizer, tables, 0
        self._state = [torch.zeros(len(table), self._rule.state_width(table.shape[1])).double() for table in tables]

    def zero_grad(self) -> None:
        for table in self._tables:
            table.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Decay of all rows, then the step of those with a gradient."""
        self._step += 1
        numbers, eps = dict(self._optimizer.numbers), self._optimizer.epsilon
        decay = numbers.pop("weight_decay", 0.0)
        step = RowStep(lr=self._optimizer.rate(0), eps=eps, step=self._step, **numbers)
        for table, state in zip(self._tables, self._state, strict=True):
            table.mul_(1 - step.lr * decay)
            assert table.grad is not None
            gradient = table.grad.coalesce()
            index = gradient.indices()[0]
            rows = torch.cat([table[index], state[index]], 1)
            self._rule.apply(rows, gradient.values().clone(), step)
            table[index], state[index] = rows[:, : table.shape[1]], rows[:, table.shape[1] :]


#: Row optimizer, and what makes that of plain torch of the tables.
OPTIMIZERS: list[tuple[RowOptimizer, Callable[[list[Tensor]], Any]]] = [
    (Adam(RATE), lambda tables: torch.optim.SparseAdam(tables, lr=RATE)),
    (Momentum(RATE), lambda tables: _Formula(Momentum(RATE), tables)),
    (Ftrl(RATE), lambda tables: _Formula(Ftrl(RATE), tables)),
    (AdamW(RATE), lambda tables: _Formula(AdamW(RATE), tables)),
    (SGD(RATE, weight_decay=0.1), lambda tables: torch.optim.SGD(tables, lr=RATE, weight_decay=0.1)),
    (
        Momentum(RATE, weight_decay=0.1, decoupled=False),
        lambda tables: torch.optim.SGD(tables, lr=RATE, momentum=0.9, weight_decay=0.1),
    ),
    (RowWiseAdagrad(RATE), lambda tables: _Formula(RowWiseAdagrad(RATE), tables)),
]


@pytest.mark.parametrize(
    ("look_ups", "accumulate"),
    [(_masked, 1), (_masked_twice, 1), (_masked_twice, 2), (_without_gradient, 1), (_not_in_all, 2)],
)
@pytest.mark.parametrize(("optimizer", "plain"), OPTIMIZERS, ids=lambda value: getattr(value, "record", ""))
def test_rows_that_are_left_out_stay_as_in_torch(
    optimizer: RowOptimizer, plain: Any, look_ups: Any, accumulate: int
) -> None:
    data = batches(8, dtype=torch.float64)
    with pipeline(SmallBy(look_ups).double(), rows=optimizer, accumulate=accumulate, cache_rows=180) as trained:
        progress_all(trained, iter(data))
        state = state_of(trained)
    loop = PlainLoop(PlainBy(look_ups).double())
    tables = list(loop.model.tables.parameters())
    loop.rows = plain(tables)
    for table in loop.model.tables.values():
        table.sparse = not isinstance(loop.rows, torch.optim.SGD)
    for first in range(0, len(data), accumulate):
        loop.zero_grad()
        for batch in data[first : first + accumulate]:
            (loop.model(batch)[0] / accumulate).backward()
        loop.step()
    assert_close(state, loop.state())


def _on_rank(rank: int, optimizer: RowOptimizer) -> str:
    try:
        with made(SmallBy(_masked).double(), rows=optimizer, cache_rows=120) as trained:
            progress_all(trained, iter(shard(rank, 3)))
    except (InputError, JobError) as error:
        return str(error)
    return "trained"


@pytest.mark.multiproc
@pytest.mark.redis
@pytest.mark.parametrize("optimizer", [Adam(RATE), RowWiseAdagrad(RATE)])
def test_ranks_refuse_to_leave_rows_out_where_they_would_move(optimizer: RowOptimizer) -> None:
    found = [run.value for run in on_ranks(2, _on_rank, optimizer)]
    if isinstance(optimizer, Adam):
        assert any(
            "with several ranks, lookups of tables ['t_f0', " in text and ": adam would" in text for text in found
        )
    else:
        assert found == ["trained", "trained"]
