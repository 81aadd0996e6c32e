"""`PLE` against its formula."""

from __future__ import annotations

import pytest

from bagpipe.models.ple import PLE
from tests.models.comparison import Bags, assert_same_step
from tests.models.plain_tasks import PlainPLE
from tests.models.test_tasks import DIMS, task_batch

TASKS = {"click": 1.0, "buy": 0.5, "keys": 2.0}


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_it_equals_the_formula(levels: int) -> None:
    batch = task_batch(*TASKS)
    model = PLE(
        Bags(DIMS),
        tasks=TASKS,
        num_dense=2,
        num_levels=levels,
        task_experts=2,
        shared_experts=1,
        expert_mlp=(4,),
        tower_mlp=(3,),
    )
    plain = PlainPLE(Bags(DIMS), TASKS, 2, levels, 4)
    assert_same_step(model, plain, lambda module: module(batch)[0] if module is model else module(batch))


def test_outputs_are_by_task() -> None:
    _, outputs = PLE(Bags(DIMS), tasks=TASKS).double()(task_batch(*TASKS, num_dense=0))
    assert {task: value.shape for task, value in outputs.items()} == dict.fromkeys(TASKS, (6,))
