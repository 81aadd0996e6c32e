"""Jobs that train on data while it grows: killed, stopped and resumed, with the numbers of the whole data."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from bagpipe.store.server.embedded import EmbeddedServer
from tests.data.brokers import broker
from tests.data.files import criteo_lines
from tests.store.nodes import await_true
from tests.system.programs import Program, await_gone, ranks_of, run_forked, torchrun
from tests.system.resumed import JOB, Resumed, digests

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

#: 2,700 rows in batches of 128: 21 whole ones and a last one of 12 examples.
ROWS = (600, 300, 900, 700, 200)
DATA = [
    "--data.format",
    "criteo-tsv",
    "--data.schema",
    "",
    "--data.limit",
    "0",
    "--data.eval_fraction",
    "0",
    "--cache.rows",
    "5000",
]
STREAM = ["--data.follow", "marker", "--data.stream_wait_s", "0.05"]


def add(folder: Path, number: int) -> None:
    """Write a day, in two parts, and mark it as complete."""
    lines = criteo_lines(ROWS[number], seed=number)
    with (folder / f"day_{number}").open("wb") as file:
        file.write(lines[:1000])
        file.flush()
        file.write(lines[1000:])
    (folder / f"_DONE.day_{number}").touch()


def growing(folder: Path, days: int) -> Path:
    folder.mkdir()
    for number in range(days):
        add(folder, number)
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Of a job that reads a folder of all days, without a cache."""
    folder = tmp_path_factory.mktemp("whole")
    data = ["--data.path", str(growing(folder / "days", 5)), *DATA, "--cache.rows", "0"]
    done = run_forked([*JOB, *data, "--result", str(folder / "whole.json")], folder)
    assert (done.code, done.err) == (0, "")
    return digests(folder / "whole.json")


@pytest.fixture
def job(server: EmbeddedServer, tmp_path: Path) -> Resumed:
    days = growing(tmp_path / "days", 1)
    return Resumed(folder=tmp_path, arguments=["--store.url", server.url, *DATA, "--data.path", str(days), *STREAM])


def test_a_folder_that_grows_trains_like_one_that_was_there(job: Resumed, expected: tuple[object, ...]) -> None:
    days = job.folder / "days"
    with Program(job.line(), forked=job.folder) as program:
        for number in (1, 2):
            add(days, number)
        # One is finished while the batches after it are trained, so day_2 is being read.
        await_true(lambda: 5 in job.steps(), "the first checkpoint")
        assert program.process is not None
        program.process.kill()
        await_gone(program.mark)
    resumed_from = max(job.steps())
    (days / "day_0").unlink()  # read, and before every position from now on
    with Program(job.line(), forked=job.folder) as program:
        add(days, 3)
        await_true(lambda: max(job.steps()) > resumed_from, "another checkpoint")
        assert program.process is not None
        program.process.send_signal(signal.SIGTERM)  # while it waits for more, or trains
        done = program.finish()
    assert (done.code, done.err) == (130, "")
    stopped = json.loads(job.result.read_text())
    assert stopped["stopped"]
    assert stopped["resumed_from"] == resumed_from
    assert stopped["steps"] in job.steps()
    with Program(job.line(), forked=job.folder) as program:
        add(days, 4)
        (days / "_END").touch()
        done = program.finish()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == expected
    assert json.loads(job.result.read_text())["steps"] == 22


def test_a_late_file_ends_the_job_and_it_goes_on_without_it(job: Resumed, expected: tuple[object, ...]) -> None:
    days = job.folder / "days"
    for number in (1, 2):
        add(days, number)
    with Program(job.line(), forked=job.folder) as program:
        await_true(lambda: 5 in job.steps(), "the first checkpoint")
        (days / "day_00").write_bytes(b"late\n")
        done = program.finish()
    assert done.code == 2
    assert done.error_line == (
        f"error: {days}/day_00: appeared after day_2 was read: files are read in the order of their names, so give "
        f"it a later name"
    )
    refused = job.run()
    assert refused.code == 2
    assert "expected the 2 files that the job has read before day_2, got 3" in refused.error_line
    (days / "day_00").unlink()
    for number in (3, 4):
        add(days, number)
    (days / "_END").touch()
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == expected


def test_ranks_wait_together_and_one_of_them_stops_all(server: EmbeddedServer, tmp_path: Path) -> None:
    whole = growing(tmp_path / "whole", 5)
    data = [*JOB, "--store.url", server.url, *DATA]
    result = tmp_path / "result.json"
    with torchrun([*data, "--data.path", str(whole), "--result", str(result)], forked=tmp_path) as program:
        assert program.finish().code == 0
    expected = digests(result)
    days = growing(tmp_path / "days", 1)
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *DATA, "--data.path", str(days), *STREAM])
    job.result.unlink()
    with torchrun(job.line(), forked=tmp_path) as program:
        for number in (1, 2):
            add(days, number)
        await_true(lambda: 5 in job.steps(), "the first checkpoint")
        os.kill(ranks_of(program)[0], signal.SIGTERM)  # the other rank waits for data too
        done = program.finish()
    assert json.loads(job.result.read_text())["stopped"], done.err
    for number in (3, 4):
        add(days, number)
    (days / "_END").touch()
    with torchrun(job.line(), forked=tmp_path) as program:
        done = program.finish()
    assert done.code == 0, done.err
    assert digests(job.result) == expected


def test_a_topic_trains_like_a_file_and_says_what_it_lost(
    server: EmbeddedServer, tmp_path: Path, expected: tuple[object, ...]
) -> None:
    lines = [line for number, rows in enumerate(ROWS) for line in criteo_lines(rows, seed=number).splitlines()]
    with broker() as kafka:
        kafka.send_round(lines[:1600], run=32)
        topic = ["--data.path", kafka.url(), "--data.kafka_run", "32", "--data.stream_wait_s", "0.05"]
        job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *DATA, *topic])
        with Program(job.line(), forked=tmp_path) as program:
            await_true(lambda: 5 in job.steps(), "the first checkpoint")
            assert program.process is not None
            program.process.kill()
            await_gone(program.mark)
        kafka.send_round(lines[1600:], run=32, first=1600)
        done = job.run("--data.stream_idle_s", "0.5")
        assert (done.code, done.err) == (0, "")
        assert digests(job.result) == expected
        steps = job.steps()
        kafka.send(0, [b"x" * 900_000] * 7)  # the broker keeps 5 MB of a partition
        done = job.run("--data.stream_idle_s", "0.5")
    assert done.code == 2
    assert done.error_line.startswith(
        f"error: {kafka.url()}, partition 0: expected offset 672, the lowest available is "
    )
    assert job.steps() == steps


def test_a_stream_starts_from_another_job(server: EmbeddedServer, tmp_path: Path) -> None:
    """Like a folder that was there; the same command goes on after a kill."""

    def job(name: str, days: int, *more: str) -> Resumed:
        (tmp_path / name).mkdir()
        path = growing(tmp_path / name / "days", days)
        (path / "_END").touch()
        return Resumed(
            folder=tmp_path / name, arguments=["--store.url", server.url, *DATA, "--data.path", str(path), *more]
        )

    first = job("first", 2)
    assert first.run().code == 0
    start = ["--checkpoint.start_from", str(first.checkpoints)]
    whole, stream = job("whole", 3, *start), job("stream", 3, *start, *STREAM)
    assert whole.run().code == 0
    assert stream.run(dies_at="after-checkpoint-data:2").code == -signal.SIGKILL
    done = stream.run()
    assert done.code == 0
    assert "this job starts from" not in done.err
    assert digests(stream.result) == digests(whole.result)
