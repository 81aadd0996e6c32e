from __future__ import annotations

from dataclasses import replace

import pytest

from bagpipe.cluster.model import RowRates
from bagpipe.errors import InputError
from bagpipe.forecast.costs import loop_costs, rates_at
from tests.cluster.clusters import cluster, hosts
from tests.forecast.jobs import DENSE, TRAFFIC, job

ROWS = (
    RowRates(row_bytes=100, reads_per_s=2e6, writes_per_s=1e6),
    RowRates(row_bytes=300, reads_per_s=1e6, writes_per_s=5e5),
)


def test_rates_of_other_row_sizes() -> None:
    assert rates_at(ROWS, 100) == pytest.approx((2e6, 1e6))
    assert rates_at(ROWS, 200) == pytest.approx((1 / 0.75e-6, 1 / 1.5e-6))
    assert rates_at(ROWS, 50) == pytest.approx((2e6, 1e6)), "the cost of a row is not that of its bytes"
    assert rates_at(ROWS, 600) == pytest.approx((5e5, 2.5e5))


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
    assert step.bounds["network"] == pytest.approx(network.all_reduce_s(4e6, range(4)) + DENSE.step_s)


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
