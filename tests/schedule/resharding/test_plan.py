from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.errors import ScheduleError
from bagpipe.schedule.resharding.greedy import greedy
from bagpipe.schedule.resharding.layouts import LAYOUT_KINDS, Layout
from bagpipe.schedule.resharding.plan import Broadcast, Resharding, send_to_all
from bagpipe.schedule.resharding.tasks import unit_tasks
from tests.schedule.resharding.arrays import carry_out, layout, sides

NETWORK = Network(bandwidth_bytes_per_s=1e9, latency_s=1e-5, message_s=1e-8, hosts={0: 0, 1: 0, 4: 1, 5: 1})


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LAYOUT_KINDS, repeat=2)))
def test_all_pairs_of_layouts_on_one_to_four_ranks_are_exact(before: str, after: str) -> None:
    for n, m in itertools.product(range(1, 5), repeat=2):
        source, target = layout(before, 0, n), layout(after, n, m)
        assert carry_out(greedy(source, target, 11, 7, NETWORK))
        assert carry_out(send_to_all(source, target, 11, 7))


@given(sides(), st.integers(0, 9), st.integers(1, 6), st.integers(0, 3))
def test_uneven_and_empty_parts_are_exact(pair: tuple[Layout, Layout], rows: int, columns: int, seed: int) -> None:
    assert carry_out(greedy(*pair, rows, columns, NETWORK, seed=seed))
    assert carry_out(send_to_all(*pair, rows, columns))


def test_a_relayed_slice_goes_down_its_route_in_chunks() -> None:
    (task,) = unit_tasks(layout("replicated", 0, 1), layout("replicated", 1, 2), 3, 2)
    relayed = Broadcast(task=task, sender=0, route=(2, 1), chunks=3)
    assert [(m.sender, m.receiver, m.first, m.end) for m in relayed.messages(0)] == [
        (0, 2, 0, 2),
        (0, 2, 2, 4),
        (2, 1, 0, 2),
        (0, 2, 4, 6),
        (2, 1, 2, 4),
        (2, 1, 4, 6),
    ]
    direct = Broadcast(task=task, sender=0, route=(2, 1), relays=False)
    assert [(m.sender, m.receiver, m.first, m.end) for m in direct.messages(0)] == [(0, 2, 0, 6), (0, 1, 0, 6)]


def test_refused() -> None:
    source, target = layout("batch", 0, 2), layout("batch", 2, 3)
    plan = send_to_all(source, target, 6, 1)
    with pytest.raises(ScheduleError, match="expected one broadcast for each of 4 unit tasks, got 3"):
        Resharding(source=source, target=target, rows=6, columns=1, broadcasts=plan.broadcasts[1:])
    task = plan.broadcasts[0].task
    with pytest.raises(ScheduleError, match=r"rank 1 has no .*: expected one of \(0,\)"):
        Broadcast(task=task, sender=1, route=(2,))
    with pytest.raises(ScheduleError, match=r"expected a route over the ranks \(2,\), got \(3,\)"):
        Broadcast(task=task, sender=0, route=(3,))
    with pytest.raises(ScheduleError, match="expected 1 to 2 chunks, as many as elements, got 3"):
        Broadcast(task=task, sender=0, route=(2,), chunks=3)
