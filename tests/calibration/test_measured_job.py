from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.calibration.job_times import TABLES, JobSettings
from bagpipe.calibration.measured_job import ProcessorTimes, measure_job
from bagpipe.cluster.model import OTHER_THREADS
from bagpipe.store.server.embedded import EmbeddedServer

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = Path(tmp_path_factory.mktemp("store"))
    with EmbeddedServer(folder) as server:
        yield server


@pytest.mark.parametrize(("cache_rows", "layers"), [(8_000, ()), (0, (16, 8))])
def test_every_operation_of_a_job_is_measured(server: EmbeddedServer, cache_rows: int, layers: tuple[int, ...]):
    settings = JobSettings(
        store_url=server.url,
        namespace=f"job-{cache_rows}",
        server_process=server.process_id,
        examples=64,
        dim=4,
        cache_rows=cache_rows,
        layers=layers,
        batches=24,
    )
    found = measure_job(settings)
    assert set(found.ops) == {
        "X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "X_WRITEBACK", "F", "B", "OPT", "X_UPDATE", OTHER_THREADS,
    }  # fmt: skip
    assert all(each.processor_s > 0 for op, each in found.ops.items() if op != OTHER_THREADS)
    assert found.ids == found.ops["F"].items == found.ops["X_READ"].items == TABLES * 64
    unique = found.ops["X_UPDATE"].items
    assert 0 < found.ops["X_FETCH"].items < unique < found.ids
    if not cache_rows:
        assert found.ops["X_INSERT"].items == unique
    assert found.step_s > 0
    assert min(found.planner_s, found.server_s) >= 0


def test_waits_and_the_planner_belong_to_the_next_action():
    times = ProcessorTimes()
    for name, category in (("0F", "action"), ("wait 0X_READ #", "wait"), ("0X_PLAN", "action"), ("0B", "action")):
        times.note("compute", name, 3, 0, 0, category)
    assert {op: list(found) for op, found in times.by_op.items()} == {"B": [3]}
    assert times.by_op["B"][3] > 0
