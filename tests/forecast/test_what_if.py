from __future__ import annotations

from dataclasses import replace

import pytest

from bagpipe.cluster.model import ClusterModel
from bagpipe.forecast.forecast import forecast
from bagpipe.forecast.job import JobShape
from bagpipe.forecast.stages import StagedDense
from bagpipe.forecast.what_if import PURCHASES, Gain, what_if
from tests.cluster.clusters import cluster, hosts
from tests.forecast.jobs import DENSE, TRAFFIC, job


def gains_of(where: ClusterModel, what: JobShape) -> dict[str, Gain]:
    [gains] = what_if([(where, what, forecast(where, what))])
    return {gain.purchase: gain for gain in gains}


def slow_port(**changes: float) -> ClusterModel:
    """The trainers' ports are the limit."""
    link = replace(cluster().links["net"], bytes_per_s=1e6)
    return cluster(hosts(port="slow"), links={**cluster().links, "slow": link}, **changes)


@pytest.mark.parametrize("where", [cluster(), slow_port()], ids=["dense", "ports"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gains_are_those_of_direct_forecasts(where: ClusterModel, ranks: int) -> None:
    what = job(ranks=ranks)
    before = forecast(where, what)
    gains = gains_of(where, what)
    for purchase in PURCHASES:
        changed = purchase.vary(where, what)
        assert (purchase.name in gains) == (changed is not None)
        if changed is not None:
            after, gain = forecast(*changed), gains[purchase.name]
            assert gain.step_s == after.step_s
            assert gain.usd_per_million_examples == after.usd_per_million_examples
            assert gain.faster == before.step_s / after.step_s
            assert gain.dearer == pytest.approx(after.usd_per_million_examples / before.usd_per_million_examples)
            assert gain.is_priced == purchase.is_priced


def test_the_limit_s_resource_alone_helps() -> None:
    gains = gains_of(slow_port(), job())
    assert gains["trainers' ports"].faster == pytest.approx(2.0, rel=0.01)
    for name in ("store servers", "cacher hosts", "stores' ports", "device memory's speed", "device's computation"):
        assert gains[name].faster == pytest.approx(1.0)
    gains = gains_of(cluster(), job())
    assert gains["device's computation"].faster == pytest.approx(2.0, rel=0.01)
    assert gains["trainers' ports"].faster == pytest.approx(1.0)


def test_what_is_paid_for() -> None:
    """Hosts cost 3 each, the two servers 1 each and the cacher 0.5 an hour; the step stays as it is."""
    gains = gains_of(cluster(), job())
    assert gains["store servers"].dearer == pytest.approx(7.5 / 5.5)
    assert gains["cacher hosts"].dearer == pytest.approx(6.0 / 5.5)
    free = cluster(hosts(usd_per_hour=0.0), stores=replace(cluster().stores, usd_per_hour=0.0), cachers=None)
    found = gains_of(free, job())
    assert found["store servers"].dearer is None
    assert "cacher hosts" not in found


def test_twice_the_ranks_need_more_hosts() -> None:
    where, what = cluster(), job(ranks=4)
    changed = next(each for each in PURCHASES if each.name == "ranks").vary(where, what)
    assert changed is not None
    more, larger = changed
    assert (more.num_ranks, larger.ranks) == (8, 8)
    assert larger.traffic.total_cache_rows == what.traffic.total_cache_rows


def test_what_cannot_be_says_why() -> None:
    tiny = job(ranks=4, traffic=replace(TRAFFIC, batch_examples=4), dense=DENSE)
    gain = gains_of(cluster(), tiny)["ranks"]
    assert gain.error == "ranks: expected at most the 4 examples of a batch, got 8"
    assert gain.step_s is gain.faster is gain.dearer is None


def test_ranks_and_computation_of_stages_are_left_out() -> None:
    """They would need another cut and another simulation."""
    staged = StagedDense(
        schedule="1f1b",
        stages=2,
        replicas=1,
        microbatches=2,
        step_s=0.01,
        bubble=0.1,
        param_bytes=1e6,
        device_bytes=1e6,
    )
    found = gains_of(cluster(), job(ranks=2, staged=staged))
    assert not {"ranks", "device's computation"} & found.keys()
    assert "store servers" in found


def test_cores_count_on_one_machine() -> None:
    shared = replace(cluster(), shared_cores=1)
    assert gains_of(shared, job())["cores of the machine"].faster > 1
    assert "cores of the machine" not in gains_of(cluster(), job())


def test_many_jobs_are_those_one_by_one() -> None:
    jobs = [(cluster(), job(ranks=ranks), forecast(cluster(), job(ranks=ranks))) for ranks in (1, 2)]
    assert what_if(jobs) == [what_if([each])[0] for each in jobs]
    assert what_if([]) == []
