from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.jigsaw.job import TrainingJob
from bagpipe.jigsaw.picture import grid
from bagpipe.jigsaw.policy import POLICIES
from bagpipe.jigsaw.simulate import run_jobs
from bagpipe.jigsaw.timeline import Timeline
from bagpipe.schedule.analysis.simulate import simulate
from tests.jigsaw.made_jobs import job, job_lists, together
from tests.jigsaw.programs import costs_of, program_of

POLICY = st.sampled_from(list(POLICIES))
GANGS = [name for name, policy in POLICIES.items() if policy.hold != "piece"]

#: Two jobs of four iterations; one worker computes the backward of all layers (2 s), the other one that of half (1 s).
TWO = [job("a", shares=(1.0, 0.5)), job("b", shares=(1.0, 0.5))]


def run(jobs: list[TrainingJob], ranks: int, policy: str) -> Timeline:
    return run_jobs(jobs, ranks, POLICIES[policy])


def picture(jobs: list[TrainingJob], ranks: int, policy: str) -> list[str]:
    return grid(run(jobs, ranks, policy)).splitlines()[:-1]


# By hand. A forward takes 1 s, a whole backward 2 s, half of it 1 s, an exchange 1 s: an iteration of a gang takes
# 1 + 2 + 1 = 4 s, the eight of them 32 s. Its ranks compute 3 + 2 of 8 s: 62.5 %.
def test_two_jobs_as_gangs() -> None:
    assert picture(TWO, 2, "fair") == [
        "rank 0      Aaa.Bbb.Aa..Bb..Aaa.Bbb.Aa..Bb..",
        "rank 1      Aa..Bb..Aaa.Bbb.Aa..Bb..Aaa.Bbb.",
        "exchange A  ...=.......=.......=.......=....",
        "exchange B  .......=.......=.......=.......=",
    ]
    assert picture(TWO, 2, "fifo")[:2] == [
        "rank 0      Aaa.Aa..Aaa.Aa..Bbb.Bb..Bbb.Bb..",
        "rank 1      Aa..Aaa.Aa..Aaa.Bb..Bbb.Bb..Bbb.",
    ]


# The short worker of A ends at 2 and leaves rank 1 to B; rank 0 follows at 3. A's exchange ends at 4, when rank 1 has
# just become free; rank 0 is busy with B's long worker until 6. From then on both ranks always have a job to compute
# while the other one exchanges: 8 x 5 s of computation on two ranks end at 20, and the last exchange at 21.
def test_two_jobs_as_a_jigsaw() -> None:
    assert picture(TWO, 2, "jigsaw") == [
        "rank 0      AaaBbbAaBbAaaBbbAaBb.",
        "rank 1      AaBbAaaBbbAaBbAaaBbb.",
        "exchange A  ...=....=....=....=..",
        "exchange B  ......=...=.....=...=",
    ]


@given(job_lists(), POLICY)
def test_a_rank_runs_one_piece_at_a_time(made: tuple[list[TrainingJob], int], policy: str) -> None:
    timeline = run(*made, policy)
    for rank in range(timeline.ranks):
        assert all(a.finish_s <= b.start_s for a, b in pairwise(timeline.of_rank(rank)))


@given(job_lists(), POLICY)
def test_iterations_are_whole_and_in_order(made: tuple[list[TrainingJob], int], policy: str) -> None:
    """Each worker has each iteration once, on its own rank, and none begins before the last exchange of its job."""
    timeline = run(*made, policy)
    for number, each in enumerate(timeline.jobs):
        pieces = [piece for piece in timeline.pieces if piece.job == number]
        exchanges = [exchange for exchange in timeline.exchanges if exchange.job == number]
        assert sorted((piece.iteration, piece.worker) for piece in pieces) == [
            (iteration, worker) for iteration in range(each.iterations) for worker in range(each.workers)
        ]
        assert (
            len({(piece.worker, piece.rank) for piece in pieces})
            == len({piece.rank for piece in pieces})
            == each.workers
        )
        free_s = each.arrival_s
        for iteration, exchange in enumerate(exchanges):
            own = [piece for piece in pieces if piece.iteration == iteration]
            assert exchange.iteration == iteration
            assert min(piece.start_s for piece in own) >= free_s
            assert exchange.start_s == max(piece.finish_s for piece in own)
            free_s = exchange.finish_s
        assert len(exchanges) == each.iterations


@given(job_lists(), POLICY)
def test_work_is_kept(made: tuple[list[TrainingJob], int], policy: str) -> None:
    """The pieces take what the jobs need; what is left out of backwards is not computed, and nothing else is."""
    timeline = run(*made, policy)
    for number, each in enumerate(timeline.jobs):
        computed = math.fsum(piece.finish_s - piece.start_s for piece in timeline.pieces if piece.job == number)
        assert computed == pytest.approx(each.iterations * each.computing_s)


@given(job_lists(), POLICY)
def test_no_job_is_faster_than_alone(made: tuple[list[TrainingJob], int], policy: str) -> None:
    timeline = run(*made, policy)
    for number, each in enumerate(timeline.jobs):
        finish_s = max(exchange.finish_s for exchange in timeline.exchanges if exchange.job == number)
        assert finish_s >= each.arrival_s + each.shortest_s


@given(job_lists(), POLICY)
def test_one_job_runs_alike_with_every_policy(made: tuple[list[TrainingJob], int], policy: str) -> None:
    """There is nothing to fill its gaps; with whole backwards it has none."""
    jobs, ranks = made
    alone = run(jobs[:1], ranks, policy)
    gang = run(jobs[:1], ranks, "fifo")
    assert (alone.pieces, alone.exchanges) == (gang.pieces, gang.exchanges)
    assert alone.last_s == jobs[0].arrival_s + jobs[0].shortest_s


@given(job_lists(), st.sampled_from(GANGS))
def test_gangs_start_together_and_exclude_others(made: tuple[list[TrainingJob], int], policy: str) -> None:
    """From the start of an iteration to the end of its exchange no other job computes on its ranks."""
    timeline = run(*made, policy)
    for exchange in timeline.exchanges:
        own = [p for p in timeline.pieces if (p.job, p.iteration) == (exchange.job, exchange.iteration)]
        [start_s] = {piece.start_s for piece in own}
        ranks = {piece.rank for piece in own}
        inside = [
            p for p in timeline.pieces if p.rank in ranks and p.finish_s > start_s and p.start_s < exchange.finish_s
        ]
        assert {piece.job for piece in inside} == {exchange.job}


@given(job_lists())
def test_a_jigsaw_leaves_no_rank_idle_that_a_piece_waits_for(made: tuple[list[TrainingJob], int]) -> None:
    timeline = run(*made, "jigsaw")
    released_s = {(number, 0): each.arrival_s for number, each in enumerate(timeline.jobs)}
    released_s |= {(each.job, each.iteration + 1): each.finish_s for each in timeline.exchanges}
    for piece in timeline.pieces:
        busy = [each for each in timeline.of_rank(piece.rank) if each.start_s < piece.start_s]
        from_s = max(released_s[piece.job, piece.iteration], busy[-1].finish_s if busy else 0.0)
        assert piece.start_s == from_s


@given(job_lists())
def test_the_simulator_of_schedules_agrees(made: tuple[list[TrainingJob], int]) -> None:
    """The order of a jigsaw, as a program, takes exactly as long; a gang's order less, for it waits on purpose."""
    jobs, ranks = [replace(each, arrival_s=0.0) for each in made[0]], made[1]
    for policy in POLICIES:
        timeline = run(jobs, ranks, policy)
        program = program_of(timeline)
        found = {(t.lane, t.action.text): (t.start, t.finish) for t in simulate(program, costs_of(timeline)).timed}
        for piece in timeline.pieces:
            index = piece.iteration * jobs[piece.job].workers + piece.worker
            start_s, _ = found[f"rank {piece.rank}", f"{piece.job}F{index}"]
            _, finish_s = found[f"rank {piece.rank}", f"{piece.job}B{index}"]
            if policy == "jigsaw":
                assert (piece.start_s, piece.finish_s) == (start_s, finish_s)
            assert piece.finish_s >= finish_s


@given(together())
def test_a_jigsaw_is_no_longer_than_gangs(made: tuple[list[TrainingJob], int]) -> None:
    """Jobs that arrive together, want all ranks and have no deadline. docs/jigsaw.md has the proof."""
    last_s = run(*made, "jigsaw").last_s
    for policy in GANGS:
        assert last_s <= run(*made, policy).last_s


@given(together(narrow=True))
def test_a_jigsaw_is_no_longer_than_the_jobs_in_a_row(made: tuple[list[TrainingJob], int]) -> None:
    """The same for jobs that want some ranks only. docs/jigsaw.md has the proof."""
    assert run(*made, "jigsaw").last_s <= math.fsum(each.shortest_s for each in made[0])


def test_a_jigsaw_can_be_longer_than_fifo() -> None:
    """An anomaly of jobs that want some ranks: on its arrival C gets the rank that looks less busy, A's.

    A's second piece then waits for C, and its exchange is late; fifo gives C the rank of B, which is free first.
    """
    jobs = [
        job("a", iterations=2, workers=1, backward_s=(0.0,), sync_s=4.0),
        job("b", iterations=1, workers=1, backward_s=(4.0,), sync_s=0.0),
        job("c", iterations=1, workers=1, backward_s=(8.0,), sync_s=0.0),
    ]
    assert picture(jobs, 2, "jigsaw")[:2] == ["rank 0      ACccccccccA....", "rank 1      Bbbbb.........."]
    assert picture(jobs, 2, "fifo")[:2] == ["rank 0      A....A........", "rank 1      BbbbbCcccccccc"]


def test_an_earlier_deadline_goes_first() -> None:
    jobs = [job("a", deadline_s=90.0), job("b", deadline_s=30.0), job("c")]
    for policy in ("edf", "jigsaw"):
        ends = {exchange.job: exchange.finish_s for exchange in run(jobs, 2, policy).exchanges}
        assert ends[1] < ends[0] < ends[2]


def test_weights_divide_the_ranks() -> None:
    """The heavy job has had three times the computation of the light one when it ends."""
    timeline = run([job("light", iterations=40), job("heavy", iterations=30, weight=3.0)], 2, "fair")
    end_s = max(exchange.finish_s for exchange in timeline.exchanges if exchange.job == 1)
    light = [exchange for exchange in timeline.exchanges if exchange.job == 0 and exchange.finish_s <= end_s]
    assert len(light) == 10


def test_a_wide_gang_is_not_starved() -> None:
    """Narrow jobs never free both ranks at once by chance; those behind the wide job wait for it."""
    narrow = [job(name, workers=1, backward_s=(back,), iterations=50) for name, back in (("a", 2.0), ("b", 2.5))]
    timeline = run([*narrow, job("wide", arrival_s=1.0)], 2, "fair")
    ends = {exchange.job: exchange.finish_s for exchange in timeline.exchanges}
    assert ends[2] < ends[0]


def test_jobs_go_to_the_ranks_with_the_least_work() -> None:
    jobs = [job("a", workers=1, iterations=9), job("b", workers=1), job("c", workers=1), job("d", workers=2)]
    timeline = run(jobs, 3, "jigsaw")
    assert [sorted({p.rank for p in timeline.pieces if p.job == number}) for number in range(4)] == [
        [0],
        [1],
        [2],
        [1, 2],
    ]


def test_jobs_that_cannot_run() -> None:
    with pytest.raises(InputError, match="at most the 1 ranks"):
        run(TWO, 1, "jigsaw")
