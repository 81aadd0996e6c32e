"""Rates differ from machine to machine: they are positive numbers, and a job can be forecast with them."""

from __future__ import annotations

import pytest

from bagpipe.calibration.machine import measure_machine
from bagpipe.cluster.cluster_file import from_toml, to_toml
from bagpipe.forecast.forecast import forecast
from tests.forecast.jobs import job

pytestmark = pytest.mark.redis


def test_this_machine_is_a_cluster():
    told: list[tuple[int, int]] = []
    machine = measure_machine(2, on_measured=lambda *numbers: told.append(numbers))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert from_toml(to_toml(machine), source="x") == machine
    assert machine.num_ranks == 2
    assert machine.shared_cores >= 1
    (hosts,) = machine.trainers
    assert machine.stores is not None
    for rates in (hosts.rows, machine.stores.rows):
        assert [each.row_bytes for each in rates] == [128, 1024]
    found = forecast(machine, job(ranks=2))
    assert 0 < found.step_s < 10
