from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.schedule.resharding.loads import Loads
from bagpipe.schedule.resharding.rounds import rounds, senders
from bagpipe.schedule.resharding.tasks import unit_tasks
from tests.schedule.resharding.arrays import layout

NETWORK = Network(bandwidth_bytes_per_s=1.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6))
def test_equal_slices_take_as_many_rounds_as_the_busiest_port_has_slices(n: int, m: int) -> None:
    tasks = unit_tasks(layout("features", 0, n), layout("batch", n, m), m, n)
    order = rounds(tasks, Loads.of(tasks, NETWORK, 1))
    assert sorted(number for number, _ in order) == list(range(n * m))
    count, busy = 1, set[int]()
    for number, sender in order:
        ports = {sender, *tasks[number].receivers}
        if busy & ports:
            count, busy = count + 1, set[int]()
        busy |= ports
    assert count == max(n, m)


def test_the_senders_of_replicas_are_balanced() -> None:
    for n, m in itertools.product(range(1, 5), repeat=2):
        tasks = unit_tasks(layout("replicated", 0, n), layout("batch", n, m), m, 1)
        chosen = senders(tasks, Loads.of(tasks, NETWORK, 1))
        assert max(chosen.count(rank) for rank in range(n)) == -(-m // n)
