"""`MMoE` against its formula."""

from __future__ import annotations

import pytest
from torch import nn

from bagpipe.models.mmoe import MMoE
from tests.models.comparison import Bags, assert_same_step
from tests.models.plain_tasks import PlainMMoE
from tests.models.test_tasks import DIMS, task_batch

TASKS = {"items": 1.0, "buy": 0.5}  # "items" is the name of a method of torch's ModuleDict


@pytest.mark.parametrize(("num_dense", "weighted"), [(2, True), (0, False)])
def test_it_equals_the_formula(num_dense: int, weighted: bool) -> None:
    batch = task_batch(*TASKS, num_dense=num_dense, weighted=weighted)
    model = MMoE(Bags(DIMS), tasks=TASKS, num_dense=num_dense, num_experts=3, expert_mlp=(5, 4), tower_mlp=(3,))
    plain = PlainMMoE(Bags(DIMS), TASKS, num_dense, 3, (5, 4))
    assert_same_step(model, plain, lambda module: module(batch)[0] if module is model else module(batch))


def test_outputs_are_probabilities_by_task() -> None:
    loss, outputs = MMoE(Bags(DIMS), tasks=TASKS, num_dense=2).double()(task_batch(*TASKS))
    assert list(outputs) == list(TASKS)
    assert all(float(value.min()) > 0 and float(value.max()) < 1 for value in outputs.values())
    assert all(value.shape == (6,) and not value.requires_grad for value in outputs.values())
    assert loss.requires_grad


def test_hidden_gates_dropout_and_batch_norm() -> None:
    model = MMoE(Bags(DIMS), tasks=TASKS, num_dense=2, gate_mlp=(4,), dropout=0.2, batch_norm=True)
    kinds = [type(module) for module in model.modules()]
    # two layers in each of four experts, one in each gate and tower
    assert kinds.count(nn.Dropout) == kinds.count(nn.BatchNorm1d) == 4 * 2 + 2 + 2
