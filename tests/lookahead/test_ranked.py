"""`RankedPlanner`: ranks in threads, and two processes over gloo."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.lookahead.ids import concatenate, empty_batch
from bagpipe.lookahead.inline import InlinePlanner
from bagpipe.lookahead.interface import WindowPlanner
from bagpipe.lookahead.planner_process import PlannerProcess
from bagpipe.lookahead.protocol import SLACK
from bagpipe.lookahead.ranked import RankedPlanner, Uneven
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.verify import verify
from bagpipe.testing.local_peers import LocalPeers, local_peers
from bagpipe.types.batch import Batch
from tests.distributed.processes import Ended, run_peers
from tests.distributed.threads import run_threads
from tests.lookahead.streams import Counted, batch_of, batches_of, expected_parts, plain_part, spec_of
from tests.oracle.batches import make_batch, traces, with_rank_examples


def planned(
    peers: Any,
    spec: OracleSpec,
    batches: list[Iterable[Batch]],
    planner: type[WindowPlanner] = InlinePlanner,
    uneven: Uneven = "stop",
    found: list[list[Any]] | None = None,
) -> list[Any]:
    """`plain_part` of a rank's batches, and the size of each. Fills its place of `found` as they come."""
    own = found[peers.rank] if found is not None else []
    with RankedPlanner(spec, peers.plans, planner=planner, uneven=uneven) as ranked:
        own.extend(plain_part(part) for part in ranked.run(batches[peers.rank]))
    return own


def good(ends: list[Ended]) -> list[Any]:
    """What the ranks found."""
    assert [end.error for end in ends] == [None] * len(ends)
    return [end.value for end in ends]


@st.composite
def ranked_traces(draw: st.DrawFn) -> tuple[OracleSpec, list[Batch], list[list[Batch]]]:
    """A spec, global batches, and the ranks' parts of them, of any sizes."""
    spec, batches = draw(traces(max_batches=8, max_ranks=3))
    spec = dataclasses.replace(spec, assign="own", example_shares=())
    batches = [with_rank_examples(draw, batch, spec.world_size) for batch in batches]
    parts: list[list[Batch]] = [[] for _ in range(spec.world_size)]
    for batch in batches:
        borders = np.cumsum([0, *batch.rank_examples])
        for own, (start, stop) in zip(parts, itertools.pairwise(borders.tolist()), strict=True):
            own.append(batch.select(np.arange(start, stop)))
    return spec, batches, parts


@settings(deadline=None)
@given(ranked_traces())
def test_plans_are_those_of_the_concatenated_batches(trace: tuple[OracleSpec, list[Batch], list[list[Batch]]]) -> None:
    spec, batches, parts = trace
    found = good(run_threads(spec.world_size, planned, spec, parts))
    assert found == [expected_parts(batches, spec, rank) for rank in range(spec.world_size)]
    assert verify(plan_batches(map(concatenate, zip(*parts, strict=True)), spec), spec).num_batches == len(batches)


@pytest.mark.multiproc
@settings(max_examples=5, deadline=None)
@given(ranked_traces())
def test_the_planner_can_be_a_process(trace: tuple[OracleSpec, list[Batch], list[list[Batch]]]) -> None:
    spec, batches, parts = trace
    found = good(run_threads(spec.world_size, planned, spec, parts, PlannerProcess))
    assert found == [expected_parts(batches, spec, rank) for rank in range(spec.world_size)]


def test_a_rank_gets_the_batches_that_it_brought() -> None:
    batches = [batches_of(9), batches_of(9, size=1), [empty_batch(index, 1) for index in range(9)]]

    def same(peers: LocalPeers) -> list[bool]:
        with RankedPlanner(spec_of(world_size=3), peers.plans, planner=InlinePlanner) as ranked:
            parts = ranked.run(batches[peers.rank])
            return [part.batch is batch for part, batch in zip(parts, batches[peers.rank], strict=True)]

    assert good(run_threads(3, same)) == [[True] * 9] * 3


@pytest.mark.parametrize("planner", [InlinePlanner, PlannerProcess])
def test_holds_a_window_at_every_rank(planner: type[WindowPlanner]) -> None:
    counted = [Counted(batches_of(15)), Counted(batches_of(15))]

    def hold(peers: LocalPeers) -> int:
        with RankedPlanner(spec_of(world_size=2), peers.plans, planner=planner) as ranked:
            for _ in ranked.run(counted[peers.rank]):
                counted[peers.rank].held -= 1
            return ranked.max_held

    most = 3 + (SLACK if planner is PlannerProcess else 0)
    assert good(run_threads(2, hold)) == [most, most]
    assert [(own.held, own.most_held) for own in counted] == [(0, most)] * 2


@pytest.mark.parametrize("lookahead", [1, 3, 9])
@pytest.mark.parametrize("counts", [(4, 6), (6, 4), (0, 2), (3, 0), (0, 0), (5, 5)])
def test_all_stop_where_one_ends(counts: tuple[int, int], lookahead: int) -> None:
    batches = [batches_of(count) for count in counts]
    spec = spec_of(world_size=2, lookahead=lookahead)
    first, second = good(run_threads(2, planned, spec, batches, InlinePlanner, "stop"))
    assert [part[0] for part in first] == [part[0] for part in second] == list(range(min(counts)))


@pytest.mark.parametrize("lookahead", [1, 3, 9])
@pytest.mark.parametrize("counts", [(4, 6), (6, 4), (0, 2), (3, 0), (0, 0), (5, 5)])
def test_a_rank_that_has_ended_joins_without_examples(counts: tuple[int, int], lookahead: int) -> None:
    batches = [batches_of(count) for count in counts]
    spec = spec_of(world_size=2, lookahead=lookahead)
    padded = [[*own, *(empty_batch(index, 1) for index in range(len(own), max(counts)))] for own in batches]
    together = [concatenate(parts) for parts in zip(*padded, strict=True)]
    found = good(run_threads(2, planned, spec, batches, InlinePlanner, "join"))
    assert found == [expected_parts(together, spec, rank) for rank in range(2)]

    def shapes(peers: LocalPeers) -> list[tuple[int, ...]]:
        with RankedPlanner(spec, peers.plans, planner=InlinePlanner, uneven="join") as ranked:
            return [part.batch.lengths.shape for part in ranked.run(batches[peers.rank])]

    assert good(run_threads(2, shapes)) == [[part.lengths.shape for part in own] for own in padded]


def failing(count: int, error: Exception) -> Iterator[Batch]:
    yield from batches_of(count)
    raise error


@pytest.mark.parametrize("lookahead", [1, 9])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "others"),
    [
        (KeyError("disk"), ("PeerError", "rank {}: KeyError: 'disk'")),
        (InputError("row 7"), ("InputError", "rank {}: row 7")),
    ],
)
def test_the_error_of_one_rank(error: Exception, others: tuple[str, str], rank: int, lookahead: int) -> None:
    batches: list[Iterable[Batch]] = [batches_of(9), batches_of(9)]
    batches[rank] = failing(5, error)
    found: list[list[Any]] = [[], []]
    spec = spec_of(world_size=2, lookahead=lookahead)
    ends = run_threads(2, planned, spec, batches, InlinePlanner, "stop", found)
    assert ends[rank].error == (type(error).__name__, str(error))
    assert ends[1 - rank].error == (others[0], others[1].format(rank))
    assert [[part[0] for part in own] for own in found] == [[0, 1, 2, 3, 4]] * 2


def test_each_failed_rank_has_its_own_error() -> None:
    batches = [failing(2, KeyError("one")), batches_of(9), failing(2, ValueError("two"))]
    ends = run_threads(3, planned, spec_of(world_size=3), batches)
    assert [end.error for end in ends] == [
        ("KeyError", "'one'"),
        ("PeerError", "rank 0: KeyError: 'one'"),
        ("ValueError", "two"),
    ]


@pytest.mark.parametrize("planner", [InlinePlanner, PlannerProcess])
def test_a_batch_that_does_not_fit_is_the_same_error_everywhere(planner: type[WindowPlanner]) -> None:
    batches = [[batch_of(index, *range(7 + index)) for index in range(20)], batches_of(20, size=1)]
    spec = spec_of(num_slots=5, lookahead=4, world_size=2)
    messages = {end.error for end in run_threads(2, planned, spec, batches, planner)}
    ((name, message),) = messages
    assert name == "CapacityError"
    assert "cache_rows is 5 on each of 2 ranks, 10 in all: raise cache_rows to at least" in message


def test_a_bad_id_is_the_same_error_everywhere() -> None:
    batches = [batches_of(5), [*batches_of(4), batch_of(4, 100)]]
    found: list[list[Any]] = [[], []]
    ends = run_threads(2, planned, spec_of(world_size=2), batches, InlinePlanner, "stop", found)
    assert len({end.error for end in ends}) == 1
    assert [len(own) for own in found] == [4, 4]


def test_ranks_with_unlike_features() -> None:
    batches = [batches_of(3), [make_batch(index, [[[1]], [[2]]]) for index in range(3)]]
    ends = run_threads(2, planned, spec_of(world_size=2), batches)
    words = "batch 0: expected as many features from every rank, got 1 from rank 0, 2 from rank 1"
    assert [end.error for end in ends] == [("InputError", words)] * 2


@pytest.mark.multiproc
def test_a_killed_planner_process() -> None:
    def killed(peers: LocalPeers) -> None:
        with RankedPlanner(spec_of(world_size=2), peers.plans) as ranked:
            run = ranked.run(batches_of(50))
            next(run)
            if peers.rank == 0:
                planner = ranked._planner
                assert isinstance(planner, PlannerProcess)
                assert planner.pid is not None
                os.kill(planner.pid, signal.SIGKILL)
            list(run)

    words = "the planner process ended unexpectedly (signal SIGKILL)"
    assert [end.error for end in run_threads(2, killed)] == [("JobError", words), ("PeerError", f"rank 0: {words}")]


def test_it_runs_again_after_a_run_was_closed() -> None:
    def again(peers: LocalPeers) -> list[int]:
        with RankedPlanner(spec_of(world_size=2), peers.plans, planner=InlinePlanner) as ranked:
            unfinished = ranked.run(batches_of(9))
            next(unfinished)
            unfinished.close()
            return [part.batch.index for part in ranked.run(batches_of(9), first_batch=5)]

    assert good(run_threads(2, again)) == [[5, 6, 7, 8]] * 2


def test_false_arguments() -> None:
    (peers,) = local_peers(1)
    with pytest.raises(ValueError, match="expected a spec for 1 ranks, got 2"):
        RankedPlanner(spec_of(world_size=2), peers.plans)
    with pytest.raises(InputError, match="uneven must be one of stop, join, got 'even'"):
        RankedPlanner(spec_of(), peers.plans, uneven="even")  # type: ignore[arg-type]


@pytest.mark.multiproc
@pytest.mark.parametrize("planner", [InlinePlanner, PlannerProcess])
def test_two_processes_over_gloo(planner: type[WindowPlanner]) -> None:
    spec, batches = spec_of(world_size=2, num_slots=50), [batches_of(12, size=40), batches_of(9, size=3)]
    padded = [batches[0], [*batches[1], *(empty_batch(index, 1) for index in range(9, 12))]]
    together = [concatenate(parts) for parts in zip(*padded, strict=True)]
    found = good(run_peers(2, planned, spec, batches, planner, "join"))
    assert found == [expected_parts(together, spec, rank) for rank in range(2)]


def bring_and_fail(peers: Any) -> list[Any]:
    batches = failing(5, KeyError("disk")) if peers.rank else iter(batches_of(9))
    with RankedPlanner(spec_of(world_size=2), peers.plans) as ranked:
        return [part.batch.index for part in ranked.run(batches)]


def bring_and_die(peers: Any) -> list[Any]:
    with RankedPlanner(spec_of(world_size=2), peers.plans, planner=InlinePlanner) as ranked:
        for part in ranked.run(batches_of(50)):
            if peers.rank and part.batch.index == 5:
                os.kill(os.getpid(), signal.SIGKILL)
    return []


@pytest.mark.multiproc
def test_a_failed_rank_over_gloo() -> None:
    first, second = run_peers(2, bring_and_fail)
    assert second.error == ("KeyError", "'disk'")
    assert first.error == ("PeerError", "rank 1: KeyError: 'disk'")


@pytest.mark.multiproc
def test_a_dead_rank_over_gloo() -> None:
    first, second = run_peers(2, bring_and_die)
    assert second.code == -signal.SIGKILL
    assert first.error is not None
    assert first.error[0] == "PeerError"
    assert "lost rank 1" in first.error[1]
