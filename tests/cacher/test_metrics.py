"""Prometheus metrics of a live daemon."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cacher.daemons import Daemon, all_batches, config, free_port, remote, spec_of


@pytest.mark.multiproc
def test_metrics_of_a_running_job(tmp_path: Path) -> None:
    job, port = config(), free_port()
    with Daemon(job, f"unix:{tmp_path}/c.sock", "--metrics", f"127.0.0.1:{port}") as daemon:
        all_batches(daemon.url, job, 2)
        with remote(daemon.url, job, job_id="half") as source:
            rank_batches = source.batches("train", spec_of(job, source.schema))
            for _ in range(4):
                next(rank_batches)
            # The daemon has processed the last acknowledgement once it has planned as far as that allows.
            while (found := scrape(port))["bagpipe_cacher_batches_planned_total"] < 18 + 7:
                pass
        assert found["bagpipe_cacher_jobs"] == 1
        assert found["bagpipe_cacher_ranks"] == 1
        assert found["bagpipe_cacher_streams_total"] == 3
        assert found["bagpipe_cacher_refused_total"] == 0
        assert found["bagpipe_cacher_batches_sent_total"] >= 36 + 4
        assert found["bagpipe_cacher_sent_bytes_total"] > 36 * 1000
        assert found["bagpipe_cacher_plan_seconds_total"] > 0
        assert found["bagpipe_cacher_encode_seconds_total"] > 0
        assert found["bagpipe_cacher_queue_batches{job=half,rank=0,run=0}"] <= 3
        assert found["bagpipe_cacher_credits{job=half,rank=0,run=0}"] <= 3
        assert found["bagpipe_cacher_queue_bytes{job=half,run=0}"] > 0
        assert found["process_resident_memory_bytes"] > 1 << 20


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
