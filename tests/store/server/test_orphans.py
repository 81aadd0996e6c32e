"""Signals for the process that writes a log, and for no other."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagpipe.store.server.orphans import process_id_in, signal_writer


@pytest.mark.parametrize(
    ("text", "process_id"),
    [(b"123\n", 123), (b"", 0), (b"\n", 0), (b"-5", 0), (b"12 13", 0), (b"\xd9\xa3", 0), (b"9" * 5000, 0), (b"1e3", 0)],
)
def test_process_ids(text: bytes, process_id: int) -> None:
    assert process_id_in(text) == process_id


def test_only_the_writer_of_the_log_is_signalled(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, (tmp_path / "other").open("wb") as other:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        with subprocess.Popen(command, stdout=log) as writer:
            assert not signal_writer(writer.pid, other, signal.SIGTERM)
            assert not signal_writer(0, log, signal.SIGTERM)
            assert writer.poll() is None
            assert signal_writer(writer.pid, log, signal.SIGTERM)
        assert writer.returncode == -signal.SIGTERM
        assert not signal_writer(writer.pid, log, signal.SIGTERM), "it has ended"
