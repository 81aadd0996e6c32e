from __future__ import annotations

import pytest

from bagpipe.dense.chunks.move_program import move_costs, move_program
from bagpipe.dense.chunks.moves import plan_moves
from bagpipe.dense.chunks.simulate import simulate_moves
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.simulate import simulate
from tests.dense.chunks.traces import random_trace


@pytest.mark.parametrize("lookahead", [0, 2])
def test_the_program_of_a_plan_is_valid_and_takes_the_time_that_plans_are_chosen_by(lookahead: int) -> None:
    for seed in range(60):
        trace, num_slots = random_trace(seed)
        plan = plan_moves(trace, num_slots, lookahead=lookahead)
        compute = [1.0 + (seed + number) % 3 for number in range(len(trace))]
        costs = move_costs(plan, compute, 1.5)
        check(move_program(plan, 3))
        ends = [simulate(move_program(plan, walks), costs).timed for walks in (3, 4)]
        before, after = (max(each.finish for each in timed if each.lane == "compute") for timed in ends)
        assert (after - before) / plan.num_batches == pytest.approx(simulate_moves(plan, compute, 1.5).total)
