"""Shards that a cacher cannot use."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import InputError
from cacher.planning import PlannedData
from cacher.shards import Shards
from tests.cacher.daemons import Daemon, children_of, config, refused_daemon, served
from tests.cacher.sharding import sharded
from tests.data.files import criteo_lines

pytestmark = pytest.mark.multiproc


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"shards": "27"}, "cacher.shards: expected at most as many as the data's 26 tables, got 27"),
        ({"shards": "0"}, "cacher.shards must be a number from 1 to 64, or addresses"),
        ({"shards": "2", "shard_tables": "C1,C27"}, "cacher.shard_tables: expected tables of the data, got 'C27'"),
        ({"shards": "2", "shard_tables": "C1,C1"}, "cacher.shard_tables: 'C1' is named twice"),
        (
            {"shards": "1", "shard_tables": "C1,C2"},
            "cacher.shard_tables: expected the tables of at most 1 shards, got 2",
        ),
        ({"shards": "unix:/nowhere.sock", "timeout_s": "0.2"}, "shard 0 (unix:/nowhere.sock) was not reached within"),
    ],
)
def test_a_cacher_whose_shards_cannot_be_used_does_not_start(
    flags: Mapping[str, str], message: str, listen: str
) -> None:
    settings = [f"--cacher.{key}={value}" for key, value in flags.items()]
    code, said = refused_daemon("--listen", listen, "--data.format=synthetic", *settings)
    assert (code, message in said) == (2, True), said


def test_a_shard_that_does_not_start_has_its_name(tmp_path: Path) -> None:
    log = tmp_path / "day_0"
    log.write_bytes(criteo_lines(100))
    job = sharded(config(format="criteo-tsv", path=str(log), limit=0), "2")
    data = PlannedData(job.data, job.run.seed)
    log.unlink()
    with pytest.raises(InputError, match=r"shard 0 does not start: .*day_0"):
        Shards(job, data.schema, data.identity, np.ones(26)).__enter__()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_shards_start_ends_the_daemon(number: signal.Signals, tmp_path: Path) -> None:
    """As one that serves: a line, exit code 0, and no shard and no file is left."""
    daemon = Daemon(config(), f"unix:{tmp_path}/c.sock", "--cacher.shards=2", environment={"TMPDIR": str(tmp_path)})
    daemon.start()
    try:
        while not (shards := children_of(daemon.process.pid)):
            assert daemon.process.poll() is None
        assert daemon.end(number) == 0
    finally:
        daemon.__exit__()
    assert [line["event"] for line in daemon.logs] == ["signal"]
    assert not [shard for shard in shards if Path(f"/proc/{shard}").exists()]
    assert not list(tmp_path.iterdir())


def test_a_shard_with_other_data_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "day_0"
    log.write_bytes(criteo_lines(100))
    job = config(format="criteo-tsv", path=str(log), limit=0, timeout_s=20)
    before = PlannedData(job.data, job.run.seed)
    log.write_bytes(criteo_lines(100, seed=1))
    with served(job, f"unix:{tmp_path}/one.sock") as shard:
        ours = sharded(job, str(shard.address))
        with pytest.raises(InputError, match=r"^shard 0 \(unix:.*one.sock\) reads other data than the cacher: .*day_0"):
            Shards(ours, before.schema, before.identity, np.ones(26)).__enter__()
        other = dataclasses.replace(PlannedData(job.data, job.run.seed).identity, code="other")
        with pytest.raises(InputError, match=r"^shard 0 \(unix:.*one.sock\) runs other code than the cacher: .*other"):
            Shards(ours, before.schema, other, np.ones(26)).__enter__()


def test_a_job_that_sees_the_whole_log_has_no_shards(listen: str) -> None:
    flags = ("--data.format=synthetic", "--cacher.shards=2", "--oracle.horizon=log")
    code, said = refused_daemon("--listen", listen, *flags)
    assert (code, "expected oracle.horizon window, got log" in said) == (2, True), said
