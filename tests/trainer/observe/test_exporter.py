from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bagpipe.errors import InputError
from tests.trainer.observe.small import Clock, interval
from trainer.observe.events import Event
from trainer.observe.exporter import Exporter

CLOCK = Clock()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter("127.0.0.1", 0, rank=1, every_s=0.5, clock=CLOCK)
    yield exporter
    exporter.close(failed=False)


def get(exporter: Exporter, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}{path}", timeout=250) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(exporter: Exporter) -> dict[str, float]:
    """Values by name, and by labels without the rank, which is checked."""
    found = {}
    for family in text_string_to_metric_families(get(exporter, "/metrics")[1]):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("rank", "1") == "1"
            found[" ".join([sample.name, *labels.values()])] = sample.value
    return found


def test_metrics_before_training(exporter: Exporter) -> None:
    found = scrape(exporter)
    assert found["bagpipe_trainer_phase starting"] == 1
    assert found["bagpipe_trainer_steps_total"] == 0
    assert "bagpipe_trainer_loss" not in found
    assert found["process_resident_memory_bytes"] > 1 << 20


def test_metrics_of_a_job(exporter: Exporter) -> None:
    exporter.take(Event(kind="phase", elapsed_s=0, step=1, values={"phase": "training"}))
    lanes = {
        "net-in": {"busy_s": 1.5, "waits_s": {"0X_READ": 0.25}},
        "chunks": {"busy_s": 0.5, "waits_s": {}, "moved_bytes": 4096},
    }
    exporter.take(interval(lanes=lanes))
    exporter.take(Event(kind="checkpoint", elapsed_s=3, step=3, values={"checkpoint_step": 3}))
    exporter.take(Event(kind="evaluation", elapsed_s=4, step=3, values={"auc": 0.75, "left_out": {}}))
    CLOCK.now_s += 2.5
    found = scrape(exporter)
    ours = {name: value for name, value in found.items() if name.startswith("bagpipe")}
    assert ours == {
        "bagpipe_trainer_steps_total": 3.0,
        "bagpipe_trainer_samples_total": 10.0,
        "bagpipe_trainer_samples_per_second": 5.0,
        "bagpipe_trainer_step_age_seconds": 2.5,
        "bagpipe_trainer_phase training": 1.0,
        "bagpipe_trainer_loss": 0.5,
        "bagpipe_trainer_interval_loss": 0.5,
        "bagpipe_trainer_loss_scale": 512.0,
        "bagpipe_trainer_dense_learning_rate": 0.5,
        "bagpipe_trainer_rows_learning_rate": 0.25,
        "bagpipe_trainer_table_rows_learning_rate user": 0.125,
        "bagpipe_trainer_gradient_norm": 1.5,
        "bagpipe_trainer_eta_seconds": 4.0,
        "bagpipe_trainer_rows_unique_total": 4.0,
        "bagpipe_trainer_rows_missed_total": 1.0,
        "bagpipe_trainer_rows_found_total": 1.0,
        "bagpipe_trainer_rows_fetched_total": 1.0,
        "bagpipe_trainer_rows_written_total": 0.0,
        "bagpipe_trainer_evictions_waiting_total": 3.0,
        "bagpipe_trainer_exposed_seconds_total": 0.5,
        "bagpipe_trainer_skipped_batches_total": 2.0,
        "bagpipe_trainer_checkpoints_total": 1.0,
        "bagpipe_trainer_lane_busy_seconds_total net-in": 1.5,
        "bagpipe_trainer_lane_busy_seconds_total chunks": 0.5,
        "bagpipe_trainer_lane_moved_bytes_total chunks": 4096.0,
        "bagpipe_trainer_lane_wait_seconds_total net-in 0X_READ": 0.25,
        "bagpipe_trainer_quality auc": 0.75,
    }
    of_labels = {"auc": 0.75, "auc@click": 0.75, "auc@buy": 0.5}
    exporter.take(Event(kind="evaluation", elapsed_s=5, step=4, values=of_labels))
    found = scrape(exporter)
    quality = {name: value for name, value in found.items() if name.startswith("bagpipe_trainer_quality")}
    assert quality == {"bagpipe_trainer_quality auc click": 0.75, "bagpipe_trainer_quality auc buy": 0.5}


def test_health_says_what_the_job_does_and_since_when(exporter: Exporter) -> None:
    exporter.take(Event(kind="phase", elapsed_s=0, step=7, values={"phase": "evaluating"}))
    CLOCK.now_s += 30.0
    status, body = get(exporter, "/healthz")
    assert (status, json.loads(body)) == (200, {"phase": "evaluating", "step": 7, "step_age_s": 30.0})
    assert get(exporter, "/healthz?max_age_s=60")[0] == 200
    assert get(exporter, "/healthz?max_age_s=29.5") == (503, body)
    assert get(exporter, "/healthz?max_age_s=soon")[0] == 200


def test_an_address_in_use_is_one_line(exporter: Exporter) -> None:
    with pytest.raises(InputError, match=rf"^run\.metrics: cannot listen at 127\.0\.0\.1:{exporter.port}: Address"):
        Exporter("127.0.0.1", exporter.port, every_s=0.5)
    with pytest.raises(InputError, match=r"^run\.metrics: cannot listen at 127\.0\.0\.1:70000: "):
        Exporter("127.0.0.1", 70_000, every_s=0.5)
