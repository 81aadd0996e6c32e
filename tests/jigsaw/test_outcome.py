from __future__ import annotations

import json

import pytest
from hypothesis import given

from bagpipe.jigsaw.job import TrainingJob
from bagpipe.jigsaw.outcome import outcome_of, plain_values
from bagpipe.jigsaw.policy import POLICIES
from bagpipe.jigsaw.simulate import run_jobs
from tests.jigsaw.made_jobs import job, job_lists


def test_figures_of_a_gang() -> None:
    """Iterations of 4 s, in which the ranks compute 3 and 2 s, in turn."""
    found = outcome_of(run_jobs([job(shares=(1.0, 0.5), arrival_s=10.0, deadline_s=25.0)], 2, POLICIES["fifo"]))
    assert found.makespan_s == 16.0
    assert found.efficiency == 5 / 8
    assert found.utilisation == (5 / 8, 5 / 8)
    assert found.backward_share == 0.75
    assert found.num_late == 1
    [only] = found.jobs
    assert (only.start_s, only.finish_s, only.iteration_s, only.computed_s) == (10.0, 26.0, 4.0, 20.0)
    assert only.backward_share == 0.75


def test_what_is_left_out_is_not_done() -> None:
    """The same makespan with half of the backwards: the efficiency is lower, not equal."""
    whole, half = (
        outcome_of(run_jobs([job(shares=shares)], 2, POLICIES["fifo"])) for shares in ((1.0, 1.0), (1.0, 0.0))
    )
    assert whole.makespan_s == half.makespan_s
    assert (whole.efficiency, half.efficiency) == (6 / 8, 4 / 8)
    assert (whole.backward, half.backward) == ("full", "partial")


def test_a_rank_that_nobody_wants_counts() -> None:
    found = outcome_of(run_jobs([job(sync_s=0.0)], 4, POLICIES["jigsaw"]))
    assert found.utilisation == (1.0, 1.0, 0.0, 0.0)
    assert found.efficiency == 0.5


def test_backwards_that_take_no_time() -> None:
    assert outcome_of(run_jobs([job(backward_s=(0.0,))], 2, POLICIES["fifo"])).backward_share == 1.0


@given(job_lists())
def test_shares_of_time(made: tuple[list[TrainingJob], int]) -> None:
    for policy in POLICIES.values():
        found = outcome_of(run_jobs(*made, policy))
        assert all(0 <= share <= 1 + 1e-12 for share in (*found.utilisation, found.efficiency, found.backward_share))
        computed_s = sum(each.iterations * each.computing_s for each in made[0])
        assert found.efficiency * found.makespan_s * made[1] == pytest.approx(computed_s)


def test_plain_values_are_json() -> None:
    values = plain_values(run_jobs([job(deadline_s=3.0)], 2, POLICIES["fifo"]))
    read = json.loads(json.dumps(values))
    assert read["jobs"][0]["is_late"] is True
    assert len(read["pieces"]) == 8
    assert len(read["exchanges"]) == 4
    assert read["num_late"] == 1
