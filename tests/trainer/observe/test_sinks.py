from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from bagpipe.config.sections import Config, RunConfig
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from tests.cacher.daemons import free_port
from trainer.observe.sinks import open_reporter


def kinds(run: RunConfig, rank: int | None = None) -> list[str]:
    membership = None if rank is None else Membership(rank=rank, world_size=2, local_rank=rank)
    with open_reporter(Config(run=run), membership) as reporter:
        return [type(sink).__name__ for sink in reporter._sinks]


def test_a_rank_opens_what_the_configuration_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = RunConfig(log=str(tmp_path / "log"), tensorboard=str(tmp_path / "board"), metrics="127.0.0.1:0")
    assert kinds(RunConfig()) == ["StreamLines"]
    assert kinds(everything, rank=0) == ["Exporter", "LogFile", "TrackerSink", "StreamLines"]
    assert kinds(everything, rank=1) == ["Exporter"]
    assert kinds(RunConfig(), rank=1) == []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert kinds(RunConfig()) == ["Bar"]
    assert kinds(RunConfig(log_format="json")) == ["StreamLines"]


def test_the_ranks_of_a_host_have_ports_of_their_own() -> None:
    membership = Membership(rank=3, world_size=4, local_rank=1)
    for _ in range(20):
        port = free_port()
        with suppress(InputError):  # another process has the next port
            with open_reporter(Config(run=RunConfig(metrics=f"127.0.0.1:{port}")), membership) as reporter:
                assert [sink.port for sink in reporter._sinks] == [port + 1]  # type: ignore[attr-defined]
            return
    raise AssertionError("no two ports in a row are free")


def test_a_file_that_cannot_be_written_is_one_line_and_nothing_stays_open(tmp_path: Path) -> None:
    port = free_port()
    run = RunConfig(metrics=f"127.0.0.1:{port}", log=str(tmp_path / "none" / "log"))
    with pytest.raises(InputError, match=r"^run\.log: cannot write .*/none/log: No such file or directory$"):
        open_reporter(Config(run=run), None)
    assert kinds(RunConfig(metrics=f"127.0.0.1:{port}"))[0] == "Exporter", "the port is free again"
