"""Signals and dying processes leave a consistent store and no orphans. Real processes throughout."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import redis

from bagpipe.config.load import parse_config
from bagpipe.store.server.embedded import EmbeddedServer
from tests.effort import some_of
from tests.system.jobs import run_job
from tests.system.programs import Done, Program, await_gone, marked_processes
from tests.system.resumed import SIX_TABLES
from tests.system.writes import Writes

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

#: Rows leave the small cache all the time, and the data does not end.
ENDLESS = [
    "--data.format", "synthetic", "--data.schema", SIX_TABLES, "--data.limit", "4000", "--data.epochs", "1000000",
    "--data.eval_fraction", "0", "--data.batch_size", "256", "--cache.rows", "1500", "--oracle.lookahead", "4",
    "--model.embedding_dim", "4", "--model.bottom_mlp", "4", "--model.top_mlp", "4",
]  # fmt: skip


def in_mid_run(arguments: list[str], folder: Path | None) -> Program:
    """A job in the middle of training: a fresh interpreter if `folder` is None, forked otherwise; see
    `Program.forked`.
    """
    return Program([*ENDLESS, *arguments], forked=folder)


@pytest.mark.parametrize("who", some_of(["SIGINT", "SIGTERM", "terminal"], {1, 2}))
def test_an_interrupted_job_keeps_what_it_trained(
    who: str, server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    arguments = ["--store.url", server.url, "--store.namespace", namespace]
    # A fresh interpreter, as in a terminal: from its first import to interpreter exit.
    with in_mid_run([*arguments, "--result", str(result)], None if who == "terminal" else tmp_path) as program:
        writes.wait(200)
        assert program.process is not None
        if who == "terminal":
            program.interrupt_group()
        else:
            program.process.send_signal(getattr(signal, who))
        done = program.finish()
    assert (done.code, done.err) == (130, "")
    await_gone(done.mark)
    stopped = json.loads(result.read_text())
    assert stopped["stopped"] is True
    assert stopped["steps"] > 0
    assert stopped["auc"] is None
    # All trained batches are in the server: an uninterrupted job of as many batches ends the same.
    limit = ["--run.steps", str(stopped["steps"])]
    uninterrupted = run_job(parse_config([*ENDLESS, *limit, "--store.url", "memory://"], "test").config)
    assert uninterrupted.dense_digest == stopped["dense_digest"]
    assert uninterrupted.embedding_digest == stopped["embedding_digest"]
    # A second start on the same namespace continues from the stored rows.
    more = run_job(parse_config([*ENDLESS, *arguments, "--run.steps", "2"], "test").config)
    assert more.trained.progress.rows_fetched > 0
    assert more.dense_digest != stopped["dense_digest"]


def embedded_client(folder: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(folder / "store.sock"), socket_timeout=60)


def test_ctrl_c_reaches_a_job_with_its_own_server(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the whole group, embedded server and cacher included; they outlive the trainer."""
    result, trace = tmp_path / "result.json", tmp_path / "tensorboard"
    arguments = ["--run.dir", str(tmp_path / "job"), "--result", str(result), "--run.tensorboard", str(trace)]
    with in_mid_run(arguments, tmp_path) as program:
        await_training(program)
        program.interrupt_group()
        done = program.finish()
    assert (done.code, done.err) == (130, "")
    assert json.loads(result.read_text())["steps"] > 0
    await_gone(done.mark)


def await_training(program: Program) -> None:
    """Wait until the embedded server of a job holds rows."""
    folder = Path(program.arguments[list(program.arguments).index("--run.dir") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    await_file(folder, "store.sock", program)
    with embedded_client(folder) as client:
        events = client.pubsub(ignore_subscribe_messages=True)
        client.config_set("notify-keyspace-events", "Kh")
        events.psubscribe("__keyspace@0__:bagpipe:{*")
        seen = 0
        while seen < 100:
            seen += events.get_message(timeout=250) is not None
        events.close()


def await_file(folder: Path, name: str, program: Program) -> None:
    """Wait until a server listens at a socket in `folder`. Each attempt waits on the process."""
    assert program.process is not None
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(folder / name))
                return
            except OSError:
                pass
        try:
            program.process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(program.finish().err)


def server_of(folder: Path) -> int:
    """Process id of a job's embedded server; servers overwrite their command line and environment."""
    with embedded_client(folder) as client:
        return int(client.info()["process_id"])


def descendants(program: Program, words: str) -> list[int]:
    return [pid for pid, command in marked_processes(program.mark).items() if words in command]


def test_nothing_is_left_of_a_killed_trainer(tmp_path: Path) -> None:
    """After kill -9, the cacher sees its socket close, its parser ends with it, and the server dies with its parent."""
    path = tmp_path / "clicks.tsv"
    line = b"\t".join([b"1", *[b"2"] * 13, *[b"%x" % number for number in range(26)]]) + b"\n"
    path.write_bytes(line * 20_000)
    arguments = ["--run.dir", str(tmp_path / "job"), "--data.format", "criteo-tsv", "--data.path", str(path)]
    arguments += ["--data.limit", "0", "--data.workers", "2", "--optim.rows_lr", "0.1", "--cache.rows", "0"]
    arguments += ["--data.schema", ""]
    with in_mid_run(arguments, tmp_path) as program:
        await_training(program)
        assert descendants(program, "cacher")
        assert len(descendants(program, "multiprocessing")) >= 2
        server = os.pidfd_open(server_of(tmp_path / "job"))
        try:
            assert program.process is not None
            program.process.kill()
            program.process.wait()
            await_gone(program.mark)
            assert select.select([server], [], [], 20)[0], "the embedded server outlives the job"
        finally:
            os.close(server)


def test_a_job_whose_cacher_dies_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with in_mid_run(["--run.dir", str(tmp_path / "job")], tmp_path) as program:
        await_training(program)
        (cacher,) = descendants(program, "-m cacher")
        os.kill(cacher, signal.SIGKILL)
        done = program.finish()
    assert done.code == 1
    # The other lines are multiprocessing's, about the parser pool of the killed process.
    assert re.search(r"^error: the cacher at unix:\S+ was not reached within 5 s", done.err, re.MULTILINE)
    assert "Traceback" not in done.err
    await_gone(done.mark)


def test_a_job_whose_server_dies_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with in_mid_run(["--run.dir", str(tmp_path / "job"), "--store.timeout_s", "5"], tmp_path) as program:
        await_training(program)
        os.kill(server_of(tmp_path / "job"), signal.SIGKILL)
        done = program.finish()
    assert done.code == 1
    assert re.match(r"error: (store )?unix://\S+/job/store.sock", done.error_line)
    await_gone(done.mark)


def interrupted_at_start(signal_number: signal.Signals, tmp_path: Path) -> Done:
    # One signal hits a forked process; the other a program from its first import to interpreter exit.
    forked = tmp_path if signal_number == signal.SIGINT else None
    with in_mid_run(["--run.dir", str(tmp_path / "job")], forked) as program:
        await_file(tmp_path / "job", "store.sock", program)
        assert program.process is not None
        program.process.send_signal(signal_number)
        return program.finish()


@pytest.mark.parametrize("number", some_of([signal.SIGINT, signal.SIGTERM], {1}))
def test_a_signal_before_training_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    done = interrupted_at_start(number, tmp_path)
    assert done.code == 130
    assert done.err in ("", "interrupted\n")
    assert not (tmp_path / "job" / "store.sock").exists()
    await_gone(done.mark)
