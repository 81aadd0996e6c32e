from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.simulate import Simulation, simulate
from bagpipe.schedule.builders.graphpipe import in_flight_limits
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.schedule.dense import SIZES, dense, peaks, rows, run


def graph(counts: Iterable[int], edges: Iterable[tuple[int, int]]) -> StageGraph:
    return StageGraph(micro_per_batch=tuple(counts), edges=tuple(edges))


def trained(stages: StageGraph) -> Simulation:
    """The simulation; every stage takes 1 forward and 2 backward for equal shares of a batch."""
    batch = max(stages.micro_per_batch)
    costs = {
        f"{s}{op}": cost * batch / m for s, m in enumerate(stages.micro_per_batch) for op, cost in (("F", 1), ("B", 2))
    }
    program = DENSE_SCHEDULES["graph"].build(stages)
    check(program)
    return simulate(program, costs)


@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_a_chain_is_plain_1f1b(ranks: int, micro: int) -> None:
    assert rows(dense("graph", ranks, micro)) == rows(dense("1f1b", ranks, micro))


def test_published_strategies() -> None:
    """A chain of six, and four branches with a join: FlexFlow's partition files; stage 0 is the join."""
    joined = graph([6] * 6, [(1, 0), (2, 0), (3, 0), (4, 0), (0, 5)])
    assert in_flight_limits(chain(6, 6)) == (6, 5, 4, 3, 2, 1)
    assert in_flight_limits(joined) == (2, 3, 3, 3, 3, 1)
    assert (trained(joined).makespan, run("1f1b", 6, 6).makespan) == (24, 33)


@pytest.mark.parametrize(("micro", "as_graph", "as_chain"), [(16, 60, 69), (8, 36, 45)])
def test_two_branches(micro: int, as_graph: int, as_chain: int) -> None:
    """Two branches of four stages; the last of the first joins them."""
    two = graph([micro] * 8, [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7), (7, 3)])
    assert trained(two).makespan == as_graph
    assert run("1f1b", 8, micro).makespan == as_chain


@pytest.mark.parametrize("length", [1, 2, 3])
def test_parallel_branches_do_not_deepen_the_pipeline(length: int) -> None:
    """Eight equal branches of k stages and their join have depth k + 1."""
    join = 8 * length
    inside = [(b * length + n, b * length + n + 1) for b in range(8) for n in range(length - 1)]
    branches = graph([8] * (join + 1), [*inside, *((b * length + length - 1, join) for b in range(8))])
    result = trained(branches)
    assert result.makespan == (8 + length) * 3
    assert peaks(result) == [*(list(range(length + 1, 1, -1)) * 8), 1]


@pytest.mark.parametrize(
    ("sizes", "examples"),
    [
        ((1, 2, 4), (10, 8, 4)),  # the paper's figure 5
        ((4, 4, 4), (12, 8, 4)),
        ((1, 1, 2), (5, 4, 2)),
        ((4, 2, 1), (12, 4, 1)),  # decreasing sizes: one micro-batch more than limit_j + lcm, which gives 8
        ((4, 1, 4), (16, 8, 4)),  # 12
    ],
)
def test_limits_of_different_sizes(sizes: tuple[int, ...], examples: tuple[int, ...]) -> None:
    stages = graph([32 // size for size in sizes], [(0, 1), (1, 2)])
    limits = in_flight_limits(stages)
    assert tuple(limit * size for limit, size in zip(limits, sizes, strict=True)) == examples
    assert peaks(trained(stages)) == list(limits)
    assert trained(stages).makespan == simulate_without_limits(stages)


def simulate_without_limits(stages: StageGraph) -> float:
    """All forwards, then all backwards, without memory limits."""
    batch = max(stages.micro_per_batch)
    last: dict[str, list[float]] = {"F": [0.0] * stages.num_stages, "B": [0.0] * stages.num_stages}
    done: dict[tuple[int, str, int], float] = {}
    for op, cost, order, sources in (
        ("F", 1, stages.order, stages.producers),
        ("B", 2, stages.order[::-1], stages.consumers),
    ):
        for stage in order:
            count = stages.micro_per_batch[stage]
            free = last["F"][stage]
            for m in range(count):
                needed = [((m + 1) * stages.micro_per_batch[s] - 1) // count for s in sources[stage]]
                ready = [done[s, op, n] for s, n in zip(sources[stage], needed, strict=True)]
                free = max([free, *ready]) + cost * batch / count
                done[stage, op, m] = free
            last[op][stage] = free
    return max(last["B"])


@st.composite
def stage_graphs(draw: st.DrawFn, *, equal: bool) -> StageGraph:
    num_stages = draw(st.integers(1, 6))
    edges = [(a, b) for b in range(num_stages) for a in range(b) if draw(st.booleans())]
    names = draw(st.permutations(range(num_stages)))  # edges can lead to lower numbers
    counts = [draw(st.integers(1, 9))] * num_stages
    if not equal:
        counts = [draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12])) for _ in range(num_stages)]
    return graph(counts, [(names[a], names[b]) for a, b in edges])


@given(stage_graphs(equal=True))
def test_equal_sizes_reach_the_lower_bound(stages: StageGraph) -> None:
    assert trained(stages).makespan == pytest.approx((stages.microbatches + max(stages.depths) - 1) * 3)


@given(stage_graphs(equal=False))
def test_limits_do_not_make_an_iteration_longer(stages: StageGraph) -> None:
    result = trained(stages)
    assert result.makespan <= simulate_without_limits(stages) * (1 + 1e-9)
    assert peaks(result) == list(in_flight_limits(stages))
