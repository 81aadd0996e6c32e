"""Logs: one line of JSON per event."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from bagpipe.client.agreement import job_label
from cacher.logs import JsonLines, start_logging
from tests.cacher.daemons import Daemon, all_batches, config


def test_a_record_is_one_line_whatever_it_holds() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("cacher", logging.WARNING, "f.py", 1, "dropped %s", ("it",), sys.exc_info())
    record.__dict__.update(peer="unix:\n", reason=Path("/x"), created=0.0, msecs=7.0)
    line = JsonLines().format(record)
    assert "\n" not in line
    value = json.loads(line)
    assert value.pop("traceback").endswith("ValueError: two\nlines")
    assert value == {
        "time": "1970-01-01T00:00:00.007Z",
        "level": "warning",
        "event": "dropped it",
        "peer": "unix:\n",
        "reason": "/x",
    }


def test_a_peer_that_is_gone_leaves_no_traceback_of_grpc(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        start_logging("info", "stdout")
        logging.getLogger("grpc._cython.cygrpc").error(
            "ExecuteBatchError raised in core by servicer method [%s]", "Plan"
        )
        logging.getLogger("grpc._cython.cygrpc").error("Unexpected [%s]", "Plan")
    finally:
        root.handlers[:], root.level = before
        logging.captureWarnings(False)
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["Unexpected [Plan]"]


@pytest.mark.multiproc
def test_a_daemon_s_life_in_its_log(tmp_path: Path) -> None:
    job = config()
    with Daemon(job, f"unix:{tmp_path}/c.sock") as daemon:
        all_batches(daemon.url, job, job_id="one")
        assert daemon.end() == 0
    assert daemon.events() == ["listening", "job started", "run started", "job ended", "signal", "drained", "stopping"]
    started = daemon.logs[2]
    assert {key: started[key] for key in ("job", "run", "phase", "first_batch")} == {
        "job": job_label("one"),
        "run": 0,
        "phase": "train",
        "first_batch": 0,
    }
