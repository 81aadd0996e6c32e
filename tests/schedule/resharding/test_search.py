from __future__ import annotations

import itertools

import pytest

from bagpipe.cluster.network import Network
from bagpipe.schedule.resharding.greedy import broadcasts_of, greedy
from bagpipe.schedule.resharding.layouts import LAYOUT_KINDS
from bagpipe.schedule.resharding.loads import Loads
from bagpipe.schedule.resharding.plan import Resharding
from bagpipe.schedule.resharding.search import search
from bagpipe.schedule.resharding.simulate import simulate
from bagpipe.schedule.resharding.tasks import unit_tasks
from tests.schedule.resharding.arrays import carry_out, layout

NETWORK = Network(bandwidth_bytes_per_s=1e9, latency_s=20e-6, message_s=5e-6)


@pytest.mark.parametrize(
    ("before", "n", "after", "m"),
    [
        ("batch", 2, "batch", 3),
        ("features", 2, "batch", 2),
        ("replicated", 2, "batch", 3),
        ("batch", 3, "replicated", 2),
    ],
)
def test_it_finds_the_least_of_all_orders(before: str, n: int, after: str, m: int) -> None:
    source, target, size = layout(before, 0, n), layout(after, n, m), (70, 30)
    tasks = unit_tasks(source, target, *size)
    loads = Loads.of(tasks, NETWORK, 4)
    ways = [[b for sender in task.sources for b in broadcasts_of(task, sender, loads)] for task in tasks]
    times = (
        simulate(
            Resharding(source=source, target=target, rows=size[0], columns=size[1], broadcasts=order), NETWORK
        ).makespan_s
        for chosen in itertools.product(*ways)
        for order in itertools.permutations(chosen)
    )
    found = search(source, target, *size, NETWORK)
    assert carry_out(found.resharding)
    assert found.bound_s == found.makespan_s == pytest.approx(min(times))


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LAYOUT_KINDS, repeat=2)))
def test_greedy_is_within_a_tenth_of_it(before: str, after: str) -> None:
    for n, m in ((2, 3), (3, 3), (4, 3), (5, 6), (6, 4), (6, 6)):
        source, target = layout(before, 0, n), layout(after, n, m)
        chosen = simulate(greedy(source, target, 1021, 250, NETWORK), NETWORK).makespan_s
        found = search(source, target, 1021, 250, NETWORK, limit=50)
        assert chosen <= 1.1 * found.bound_s, (n, m)


def test_at_its_limit_it_gives_a_bound() -> None:
    source, target = layout("batch", 0, 3, (3, 1, 2)), layout("replicated", 3, 3)
    ended, stopped = (search(source, target, 70, 30, NETWORK, limit=limit) for limit in (20_000, 2))
    assert stopped.nodes == 2 < ended.nodes
    assert stopped.bound_s < ended.bound_s == ended.makespan_s <= stopped.makespan_s
