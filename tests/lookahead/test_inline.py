"""`InlinePlanner`, and what all planners do for one rank."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from bagpipe.errors import InputError
from bagpipe.lookahead.inline import InlinePlanner
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.batch import Batch
from tests.lookahead.streams import Counted, batches_of, expected_parts, plain_part, spec_of
from tests.oracle.batches import traces


@given(traces(max_ranks=1))
def test_plans_are_those_of_the_oracle(trace: tuple[OracleSpec, list[Batch]]) -> None:
    spec, batches = trace
    with InlinePlanner(spec) as planner:
        found = list(planner.run(batches))
    assert [plain_part(part) for part in found] == expected_parts(batches, spec)
    assert all(part.batch is batch for part, batch in zip(found, batches, strict=True))


@pytest.mark.parametrize(("num_slots", "held"), [(20, 3), (0, 1)])
def test_holds_one_window(num_slots: int, held: int) -> None:
    planner, counted = InlinePlanner(spec_of(num_slots=num_slots)), Counted(batches_of(10))
    for _ in planner.run(counted):
        counted.held -= 1
    assert (counted.held, counted.most_held) == (0, held)
    assert planner.max_held == held


def test_it_runs_again() -> None:
    planner, batches = InlinePlanner(spec_of()), batches_of(6)
    unfinished = planner.run(batches)
    next(unfinished)
    unfinished.close()
    for _ in range(2):
        assert [plain_part(part) for part in planner.run(batches)] == expected_parts(batches, planner.spec)


def test_a_spec_that_cannot_be_planned_for() -> None:
    with pytest.raises(InputError, match=r"oracle\.lookahead must be at least 1, got 0"):
        InlinePlanner(spec_of(lookahead=0))


def test_one_rank_only() -> None:
    spec = dataclasses.replace(spec_of(), world_size=2)
    with pytest.raises(ValueError, match="expected a spec for 1 rank, got 2"):
        InlinePlanner(spec).run([])
