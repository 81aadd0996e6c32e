"""Rates differ from machine to machine: they are positive numbers, and a job can be forecast with them."""

from __future__ import annotations

import pytest

from bagpipe.calibration.machine import measure_machine
from bagpipe.cluster.cluster_file import from_toml, to_toml
from bagpipe.forecast.forecast import forecast
from tests.forecast.jobs import job

pytestmark = [pytest.mark.redis, pytest.mark.slow]


def test_this_machine_is_a_cluster():
    told: list[tuple[int, int]] = []
    machine = measure_machine(2, on_measured=lambda *numbers: told.append(numbers))
    assert told == [(number, 5) for number in range(1, 6)]
    assert from_toml(to_toml(machine), source="x") == machine
    assert machine.num_ranks == 2
    assert machine.shared_cores > 0
    (hosts,) = machine.trainers
    assert machine.stores is not None
    assert [each.row_bytes for each in machine.stores.rows] == [128, 1024]
    ops = {each.op for each in hosts.lanes}
    assert ops >= {"X_READ", "X_FETCH", "X_INSERT", "X_EVICT", "X_WRITEBACK", "F", "B", "OPT", "X_UPDATE"}
    assert ops >= {"X_PREPULL", "X_PULL", "X_PUSH", "X_PUSH_LATE", "X_UPDATE_LATE", "X_ACK"}
    assert 0 <= hosts.lock_share <= 1
    found = forecast(machine, job(ranks=2))
    assert 0 < found.step_s < 10
