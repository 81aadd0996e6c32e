"""Prometheus metrics of a live daemon."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bagpipe.client.address import Address
from bagpipe.client.agreement import job_label
from cacher.metrics import serve_metrics
from tests.cacher.daemons import Daemon, all_batches, config, free_port, remote, spec_of


@pytest.mark.multiproc
def test_metrics_of_a_running_job(tmp_path: Path) -> None:
    job, port, half = config(), free_port(), job_label("half")
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
        assert found[f"bagpipe_cacher_queue_batches{{job={half},rank=0,run=0}}"] <= 3
        assert found[f"bagpipe_cacher_credits{{job={half},rank=0,run=0}}"] <= 3
        assert found[f"bagpipe_cacher_queue_bytes{{job={half},run=0}}"] > 0
        assert found["process_resident_memory_bytes"] > 1 << 20


@pytest.mark.multiproc
def test_probes_of_a_daemon_that_drains(tmp_path: Path) -> None:
    """It is alive, and takes no new jobs: no longer ready."""
    job, port = config(), free_port()
    with Daemon(job, f"unix:{tmp_path}/c.sock", "--metrics", f"127.0.0.1:{port}") as daemon:
        assert ask(port, "/readyz") == (200, {"state": "serving", "jobs": 0, "ranks": 0})
        with remote(daemon.url, job, job_id="half") as source:
            next(source.batches("train", spec_of(job, source.schema)))
            daemon.process.send_signal(signal.SIGTERM)
            while ask(port, "/readyz")[0] == 200:
                pass
            state = {"state": "draining", "jobs": 1, "ranks": 1}
            assert ask(port, "/readyz") == (503, state)
            assert ask(port, "/healthz") == (200, state)


def test_a_loop_that_does_not_answer_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacher.metrics._SNAPSHOT_TIMEOUT_S", 0.01)
    loop, port = asyncio.new_event_loop(), free_port()  # does not run
    with serve_metrics(Address(host="127.0.0.1", port=port), lambda: None, loop):  # type: ignore[arg-type, return-value]
        assert ask(port, "/healthz") == (503, {"state": "stuck"})
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def ask(port: int, path: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=250) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=250) as response:
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found
