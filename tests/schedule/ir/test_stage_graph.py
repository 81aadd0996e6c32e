from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.stage_graph import StageGraph, chain, dense_edges, dense_program
from bagpipe.schedule.registry import DENSE_SCHEDULES

DIAMOND = StageGraph(micro_per_batch=(4,) * 4, edges=((0, 2), (0, 1), (1, 3), (2, 3)))


def test_neighbours_are_sorted() -> None:
    assert DIAMOND.consumers == ((1, 2), (3,), (3,), ())
    assert DIAMOND.producers == ((), (0,), (0,), (1, 2))
    assert DIAMOND.order == (0, 1, 2, 3)
    assert DIAMOND.depths == (3, 2, 2, 1)


def test_a_chain() -> None:
    graph = chain(3, 5)
    assert (graph.edges, graph.micro_per_batch, graph.microbatches) == (((0, 1), (1, 2)), (5, 5, 5), 5)


@pytest.mark.parametrize(
    ("counts", "edges", "message"),
    [
        ((), (), "at least one stage"),
        ((1, 0), ((0, 1),), "micro-batches per stage must be at least 1"),
        ((1, 1), ((0, 2),), "edge 0-2 names a stage that is not among 0 to 1"),
        ((1, 1), ((0, 1), (0, 1)), "edge 0-1 appears twice"),
        ((1, 1), ((0, 0),), "cycle: 0 -> 0"),
        ((1,) * 4, ((0, 1), (1, 2), (2, 3), (3, 1)), "cycle: 1 -> 2 -> 3 -> 1"),
    ],
)
def test_bad_graphs_are_refused(counts: tuple[int, ...], edges: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        StageGraph(micro_per_batch=counts, edges=edges)


def test_names_are_for_all_or_none() -> None:
    with pytest.raises(ScheduleError, match="2 stage names or none, got 1"):
        StageGraph(micro_per_batch=(1, 1), names=("bottom",))


def test_stages_of_different_micro_batches_have_no_single_number() -> None:
    with pytest.raises(ScheduleError, match="one number of micro-batches"):
        StageGraph(micro_per_batch=(2, 4)).microbatches  # noqa: B018


def test_an_empty_chain_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stages must be 1 to 100000, got 0"):
        chain(0, 1)


def test_edges_of_a_diamond() -> None:
    texts = [edge.text for edge in dense_edges(DIAMOND, split=(1,))]
    assert texts[:4] == ["2F(b) <- 0F(b)", "1F(b) <- 0F(b)", "3F(b) <- 1F(b)", "3F(b) <- 2F(b)"]
    assert texts[4:8] == ["0I(b) <- 2I(b)", "0I(b) <- 1I(b)", "1I(b) <- 3I(b)", "2I(b) <- 3I(b)"]
    assert texts[8:] == [*(f"{s}I(b) <- {s}F(b)" for s in range(4)), "1W(b) <- 1I(b)"]


def test_a_gradient_waits_for_every_consumer_and_every_overlapping_micro_batch() -> None:
    graph = StageGraph(micro_per_batch=(1, 2, 3), edges=((0, 1), (0, 2), (1, 2)))
    cells = ("0F0,0B0", "1F0,1F1,1B0,1B1", "2F0,2F1,2F2,2B0,2B1,2B2")
    program = dense_program(graph, [[parse(cell) for cell in row.split(",")] for row in cells])
    check(program)
    resolved = Graph(program)
    waits = {
        action.text: {resolved.actions[p.node].text for p in predecessors if p.edge is not None}
        for action, predecessors in zip(resolved.actions, resolved.predecessors, strict=True)
    }
    assert waits["2F1"] == {"0F0", "1F0", "1F1"}
    assert waits["0B0"] - {"0F0"} == {"1B0", "1B1", "2B0", "2B1", "2B2"}
    assert waits["1B0"] == {"1F0", "2B0", "2B1"}


def test_pipes_share_the_micro_batches() -> None:
    program = dense_program(chain(2, 4), [[], []], num_pipes=2)
    assert dict(program.micro_per_batch) == {0: 2, 1: 2}
    with pytest.raises(ScheduleError, match="a multiple of 2, the number of pipes, got 3"):
        dense_program(chain(2, 3), [[], []], num_pipes=2)


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] < pair[1])))
def test_order_and_depths_follow_the_edges(edges: set[tuple[int, int]]) -> None:
    graph = StageGraph(micro_per_batch=(1,) * 7, edges=tuple(edges))
    assert sorted(graph.order) == list(range(7))
    for producer, consumer in edges:
        assert graph.order.index(producer) < graph.order.index(consumer)
        assert graph.depths[producer] > graph.depths[consumer]


def test_huge_numbers_are_refused_quickly() -> None:
    with pytest.raises(ScheduleError, match="stages must be 1 to 100000, got 99999999"):
        chain(99_999_999, 1)
    with pytest.raises(ScheduleError, match="1f1b: stages times micro-batches must be at most 1000000, got 4000000"):
        DENSE_SCHEDULES["1f1b"].build(chain(2, 2_000_000))
