from __future__ import annotations

from dataclasses import replace

import pytest

from bagpipe.cluster.model import ObjectStorage, RowRates
from bagpipe.errors import InputError
from bagpipe.forecast.forecast import forecast, forecast_all
from bagpipe.forecast.job import DenseCosts, JobShape
from bagpipe.forecast.traffic import RowTraffic
from tests.cluster.clusters import cluster, hosts
from tests.forecast.jobs import DENSE, TRAFFIC, job


def test_a_cached_job_is_as_fast_as_its_dense_part() -> None:
    found = forecast(cluster(), job())
    compute = sum(found.op_s[op] for op in ("F", "B", "OPT", "X_UPDATE"))
    assert found.step_s == pytest.approx(compute, rel=1e-6)
    assert found.limit == "B: dense part"
    assert found.busy["compute"] == pytest.approx(1.0)
    assert found.examples_per_s == pytest.approx(1024 / found.step_s)
    assert found.usd_per_million_examples == pytest.approx(5.5 / 3600 * found.step_s / 1024 * 1e6)


def test_direct_mode_waits_for_everything() -> None:
    """The dense step alone runs beside the rows' way."""
    direct = forecast(cluster(), job(direct=True))
    in_turn = ("X_FETCH", "X_INSERT", "F", "B", "X_UPDATE", "X_EVICT", "X_WRITEBACK")
    assert direct.step_s == pytest.approx(sum(direct.op_s[op] for op in in_turn), rel=1e-6)


def test_a_slow_link_is_the_limit() -> None:
    link = replace(cluster().links["net"], bytes_per_s=1e6)
    slow = cluster(hosts(port="slow"), links={**cluster().links, "slow": link})
    found = forecast(slow, job())
    assert found.limit == "X_WRITEBACK: trainers' ports"
    assert found.step_s == pytest.approx(1500 * 136 / 1e6, rel=0.01)


def test_rows_that_leave_at_once_wait_for_the_update() -> None:
    """The eviction waits for the batch just before, so it is a part of the step."""
    dense = replace(DENSE, step_s=0.0, param_bytes=0.0)  # a step of the dense part would hide it
    waiting = job(traffic=replace(TRAFFIC, waiting=100.0), dense=dense)
    slow = cluster(hosts(1, "cpu"))
    assert forecast(slow, waiting).step_s > forecast(slow, job(dense=dense)).step_s


def test_many_jobs_are_those_one_by_one() -> None:
    points = [(cluster(), job(ranks=ranks, direct=direct)) for ranks in (1, 2, 4) for direct in (False, True)]
    found = forecast_all([*points, (cluster(), job(ranks=8))])
    for (where, what), each in zip(points, found, strict=False):
        alone = forecast(where, what)
        assert not isinstance(each, InputError)
        assert each.step_s == pytest.approx(alone.step_s, rel=1e-12)
        assert each.limit == alone.limit
    assert str(found[-1]) == "expected a cluster with 8 devices, got 4 of 'small'"


def test_processes_of_one_machine_share_its_cores() -> None:
    """Computation alone takes 11 ms; with the client, the server and the cacher one core needs longer."""
    rates = (RowRates(row_bytes=136, reads_per_s=1e6, writes_per_s=1e6),)
    alone = cluster(hosts(rows=rates))
    one, many = (replace(alone, shared_cores=cores) for cores in (1, 8))
    assert forecast(many, job()).step_s == forecast(alone, job()).step_s
    found = forecast(one, job())
    assert found.limit == "shared cores"
    compute = sum(found.op_s[op] for op in ("F", "B", "OPT", "X_UPDATE", "X_EVICT", "X_INSERT"))
    rows_s = 500 / 1e6 + 500 / 2e6 + 1500 / 1e6 + 1500 / 1e6
    assert found.step_s == pytest.approx(compute + rows_s + 26_624 / 1e7, rel=1e-6)
    with pytest.raises(InputError, match="shared_cores: expected at least 0, got -1"):
        replace(alone, shared_cores=-1)


def test_two_thousand_ranks() -> None:
    large = cluster(hosts(256, devices_per_host=8))
    traffic = replace(TRAFFIC, batch_examples=65_536, unique=200_000.0, ids=1_703_936.0)
    found = forecast(large, job(traffic=traffic, ranks=2048))
    assert 0 < found.step_s < 1


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InputError) as caught:
        forecast(cluster(), job(traffic=replace(TRAFFIC, cache_rows=200_000_000)))
    assert str(caught.value).startswith("devices.card: expected at most 1.6e+10 bytes, got a job of 2.721e+10: par")
    assert "cache 2.72e+10" in str(caught.value)
    small = cluster()
    small = replace(small, stores=replace(small.stores, memory_bytes=1e9))
    with pytest.raises(InputError, match=r"stores: expected at most 2e[+]09 bytes, 2 servers of 1e[+]09, the job's 1e"):
        forecast(small, job(store_rows=1e8))


def test_without_rows_it_is_data_parallelism() -> None:
    """The ring of gradients is the limit of many ranks."""
    nothing = RowTraffic(
        policy="x", lookahead=2, cache_rows=1, batch_examples=1024, ranks=1, ids=1e-6, unique=1e-6, new=0.0,
        fetched=0.0, written=0.0, waiting=0.0, row_bytes=1.0,
    )  # fmt: skip
    shape: JobShape = job(traffic=nothing, ranks=4, dense=DenseCosts(per_example_s=1e-6, param_bytes=4e8))
    found = forecast(cluster(), shape)
    ring_s = cluster().network(4).all_reduce_s(4e8, range(4))
    assert found.step_s == pytest.approx(ring_s + 256e-6, rel=0.05)
    assert found.limit == "OPT: network"


def test_checkpoints_wait_for_the_object_storage() -> None:
    """Frequent ones write few rows each, but more in all: a row that is trained twice is written twice."""
    storage = ObjectStorage(bytes_per_s=5e7, latency_s=0.01)
    where = replace(cluster(), object_storage=storage)
    steps = {every: forecast(where, job(checkpoint_every=every)).step_s for every in (1, 10, 1000)}
    assert steps[1] > steps[10] > steps[1000]
    assert steps[1] == pytest.approx(0.01 + (8_000 * 136 + 2 * 4e6) / 5e7, rel=1e-6)
    assert forecast(where, job(checkpoint_every=1)).limit == "object storage"
    assert steps[1000] == forecast(where, job()).step_s
    known = forecast(where, job(checkpoint_every=1, store_rows=1_000)).step_s
    assert known == pytest.approx(0.01 + (1_000 * 136 + 2 * 4e6) / 5e7, rel=1e-6)
    assert forecast(cluster(), job(checkpoint_every=1)).step_s == forecast(cluster(), job()).step_s, "without storage"
