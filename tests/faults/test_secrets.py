"""Passwords and secrets given in files appear nowhere else."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bagpipe.store.server.embedded import EmbeddedServer
from tests.cacher.daemons import Daemon, config
from tests.system.programs import await_gone, marked_processes, torchrun
from tests.system.test_torchrun import ENDLESS
from tests.system.writes import Writes, client_of

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

PASSWORD = "Xk3-open-sesame-9q"


def holders(folder: Path, word: str, *, but: Path) -> list[str]:
    """Files below a folder that contain a word."""
    files = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    return [str(file) for file in files if file.is_file() and file != but and word.encode() in file.read_bytes()]


def test_a_job_does_not_reveal_its_password(
    server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path
) -> None:
    """Two ranks, of which one learns the store's URL from the other. Interrupted, so that messages are printed."""
    with client_of(server.url) as client:
        client.config_set("requirepass", PASSWORD)
        job, made = tmp_path / "job.toml", tmp_path / "made"
        made.mkdir()
        job.write_text(f'[store]\nurl = "{server.url}?password={PASSWORD}"\nnamespace = "{namespace}"\n')
        files = ["--result", str(made / "out.json"), "--run.trace", str(made / "trace.json")]
        folders = ["--run.tensorboard", str(made / "board"), "--run.dir", str(made / "run")]
        with torchrun([*ENDLESS, "--config", str(job), *files, *folders]) as program:
            writes.wait(200)
            shown = marked_processes(program.mark)
            program.interrupt_group()
            done = program.finish()
        await_gone(done.mark)
    assert (made / "out.json").exists()
    assert len(shown) >= 4, "launcher, ranks, cacher"
    assert not [command for command in shown.values() if PASSWORD in command]
    assert PASSWORD not in done.out + done.err
    assert holders(tmp_path, PASSWORD, but=job) == []


def test_a_daemon_does_not_reveal_its_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    with Daemon(config(), "127.0.0.1:0", "--secret-file", str(secret), "--log-level", "debug") as daemon:
        assert PASSWORD not in Path(f"/proc/{daemon.process.pid}/cmdline").read_text()
        assert PASSWORD not in Path(f"/proc/{daemon.process.pid}/environ").read_text()
        assert daemon.end(signal.SIGTERM) == 0
    assert PASSWORD not in str(daemon.logs)
