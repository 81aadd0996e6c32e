from __future__ import annotations

from dataclasses import replace

import pytest

from bagpipe.cluster.model import LaneTimes, RowRates
from bagpipe.errors import InputError
from bagpipe.forecast.costs import lock_s, loop_costs, processor_s, request_times
from tests.cluster.clusters import cluster, hosts
from tests.forecast.jobs import DENSE, TRAFFIC, job

ROWS = (
    RowRates(row_bytes=100, reads_per_s=2e6, writes_per_s=1e6),
    RowRates(row_bytes=300, reads_per_s=1e6, writes_per_s=5e5),
)


#: Times of the operations of one rank, for rows of 136 bytes.
LANES = tuple(
    LaneTimes(op=op, row_bytes=136, fixed_s=number * 1e-4, item_s=number * 1e-8)
    for number, op in enumerate(
        ("X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "X_WRITEBACK", "F", "B", "OPT", "X_UPDATE"), start=1
    )
)


def test_requests_for_rows_of_other_sizes() -> None:
    def of(row_bytes: float) -> list[float]:
        return [row_s for _, row_s in request_times(ROWS, row_bytes)]

    assert of(100) == pytest.approx([1 / 2e6, 1 / 1e6])
    assert of(200) == pytest.approx([0.75e-6, 1.5e-6])
    assert of(50) == pytest.approx([1 / 2e6, 1 / 1e6]), "the cost of a row is not that of its bytes"
    assert of(600) == pytest.approx([1 / 5e5, 1 / 2.5e5])
    fixed = tuple(replace(each, read_fixed_s=1e-3, write_fixed_s=each.row_bytes * 1e-5) for each in ROWS)
    assert request_times(fixed, 200)[0][0] == pytest.approx(1e-3)
    assert request_times(fixed, 200)[1][0] == pytest.approx(2e-3)


def test_a_request_goes_to_every_server() -> None:
    """More servers share the rows, and each one has the fixed part of every rank's request."""
    rows = (RowRates(row_bytes=136, reads_per_s=1e6, writes_per_s=1e6, read_fixed_s=1e-3),)
    slow = replace(cluster(), stores=replace(cluster().stores, rows=rows, servers=4))
    seconds = [loop_costs(slow, job(ranks=ranks))["X_FETCH"].bounds["store servers"] for ranks in (1, 2)]
    assert seconds[0] == pytest.approx(8e-5 + 1e-3 + 500 / 4e6, rel=1e-6)
    assert seconds[1] - seconds[0] == pytest.approx(1e-3, rel=1e-6)


def test_measured_lanes_take_the_place_of_bandwidths() -> None:
    measured = cluster(hosts(lanes=LANES, lock_share=0.5))
    works, plain = loop_costs(measured, job()), loop_costs(cluster(), job())
    assert works["X_INSERT"].bounds == {"lane": pytest.approx(4e-4 + 1_500 * 4e-8)}
    assert works["X_EVICT"].bounds == {"lane": pytest.approx(3e-4 + 1_500 * 3e-8)}
    assert works["X_UPDATE"].bounds == {"lane": pytest.approx(9e-4 + 8_000 * 9e-8)}
    assert works["X_FETCH"].bounds["store client"] == pytest.approx(8e-5 + 2e-4 + 500 * 2e-8)
    assert works["X_READ"].bounds["lane"] == pytest.approx(1e-4 + 26_624 * 1e-8)
    pooling_s = [26_624 * 64 / 5e11, 6e-4 + 26_624 * 6e-8]  # through the memory, measured
    assert works["F"].seconds - plain["F"].seconds == pytest.approx(pooling_s[1] - pooling_s[0], rel=0.05)
    compute_s = sum(works[op].processor_s for op in ("F", "B", "OPT", "X_UPDATE"))
    others_s = sum(works[op].processor_s for op in ("X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "X_WRITEBACK"))
    assert lock_s(measured.trainers[0], works) == pytest.approx(compute_s + others_s / 2)
    assert processor_s(measured, job(), works) == pytest.approx(
        compute_s + others_s + 500 / 2e6 + 1_500 / 1e6 + 26_624 / 1e7
    )


def test_one_rank() -> None:
    works = loop_costs(cluster(), job())
    assert set(works) == {"X_READ", "X_FETCH", "X_WRITEBACK", "X_EVICT", "X_INSERT", "F", "B", "OPT", "X_UPDATE"}
    assert works["F"].seconds + works["B"].seconds == pytest.approx(11.24e-3, rel=0.01)
    assert works["X_READ"].limit == "cachers"
    assert works["X_READ"].seconds == pytest.approx(26_624 / 1e7)
    # 2 servers of 2 M reads; the port's 1 GB/s takes 68 us for 68 kB, the servers 125 us
    assert works["X_FETCH"].limit == "store servers"
    assert works["X_FETCH"].seconds == pytest.approx(8e-5 + 500 / 4e6, rel=0.01)


def test_direct_mode_moves_all_rows() -> None:
    cached, direct = loop_costs(cluster(), job()), loop_costs(cluster(), job(direct=True))
    assert direct["X_WRITEBACK"].seconds > 4 * cached["X_WRITEBACK"].seconds
    assert direct["F"] == cached["F"]


def test_ranks_share_servers_and_the_ports_of_their_host() -> None:
    one, four = loop_costs(cluster(), job()), loop_costs(cluster(), job(ranks=4))
    assert four["X_FETCH"].bounds["store servers"] == one["X_FETCH"].bounds["store servers"]
    ports = [each["X_FETCH"].bounds["trainers' ports"] - 8e-5 for each in (one, four)]
    assert ports[1] == pytest.approx(ports[0] / 2), "two ranks on each of two hosts"
    assert four["F"].seconds < one["F"].seconds / 2
    assert set(four) - set(one) == {"X_PREPULL", "X_PULL", "X_PUSH", "X_PUSH_LATE", "X_UPDATE_LATE", "X_ACK"}


def test_gradients_are_summed_by_a_ring() -> None:
    network = cluster().network(4)
    step = loop_costs(cluster(), job(ranks=4))["OPT"]
    assert step.bounds["network"] == pytest.approx(network.all_reduce_s(4e6, range(4)) + DENSE.step_s + 5 * 4e6 / 1e12)


def test_the_slowest_kind_of_hosts_counts() -> None:
    mixed = cluster(hosts(1), hosts(1, "cpu"))
    assert loop_costs(mixed, job(ranks=4))["F"].seconds == pytest.approx(
        (1e-3 + 256 * 1e-5) / 3 / 0.01 + 26_624 / 4 * 64 / 1e10
    )


def test_more_servers_help_until_something_else_is_slower() -> None:
    few = cluster()
    many = replace(few, stores=replace(few.stores, servers=100))
    assert loop_costs(many, job())["X_FETCH"].limit == "trainers' ports"


def test_a_cluster_without_stores() -> None:
    with pytest.raises(InputError, match="stores: expected store servers in the cluster 'small', got none"):
        loop_costs(cluster(stores=None), job())
    with pytest.raises(InputError, match="expected a cluster with 5 devices, got 4"):
        loop_costs(cluster(), job(ranks=5))


def test_rows_of_a_rank_are_those_of_its_examples() -> None:
    works = loop_costs(cluster(), job(ranks=2))
    used = float(job().uniques.unique_at(512)) / 2
    sent = sum(works[op].seconds for op in ("X_PREPULL", "X_PULL"))
    assert sent == pytest.approx(used * 64 / 8e9 + 2 * 2e-5, rel=1e-6), "both ranks are on one host"
    assert TRAFFIC.unique > used
