"""A store without memory and full disks: one line with the place and what to do, and nothing lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bagpipe.errors import EXIT_FAILED, InputError
from bagpipe.store.server.embedded import EmbeddedServer
from data.cli import main as data_main
from tests.harness.disk import SmallDisk
from tests.system.programs import run_forked
from tests.system.resumed import JOB, Resumed, digests
from tests.system.writes import client_of
from trainer.export import export

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

NO_ROOM = "No space left on device; free space there, or choose another place"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with ExitStack() as mounted:
        try:
            small = mounted.enter_context(SmallDisk(folder, num_bytes=1 << 20))
        except InputError as error:
            pytest.skip(str(error))
        yield small


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """A job that has ended, with checkpoints and a result."""
    job = Resumed(folder=tmp_path_factory.mktemp("finished"))
    done = job.run()
    assert (done.code, done.err) == (0, "")
    return job


def test_a_job_goes_on_when_its_store_has_memory_again(tmp_path: Path, finished: Resumed) -> None:
    with EmbeddedServer(tmp_path / "store") as server, client_of(server.url) as client:
        job = Resumed(folder=tmp_path, arguments=["--store.url", server.url])
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + (400 << 10))
        done = job.run()
        assert done.code == EXIT_FAILED
        # Memory is full at a write of rows (error: URL: OOM command …) or of records (error: store URL: command …).
        assert server.url in done.error_line
        assert "command not allowed when used memory > 'maxmemory'" in done.error_line
        assert "the server's memory is full: raise its maxmemory" in done.error_line
        client.config_set("maxmemory", 0)
        assert job.run().code == 0
    assert digests(job.result) == digests(finished.result)


def test_a_job_goes_on_when_its_checkpoints_have_room_again(tmp_path: Path, disk: SmallDisk, finished: Resumed) -> None:
    disk.fill(leave_bytes=100 << 10)
    with EmbeddedServer(tmp_path / "store") as server:
        job = Resumed(folder=disk.folder, arguments=["--store.url", server.url])
        command = [*job.settings(), "--result", str(tmp_path / "result.json")]
        done = run_forked(command, tmp_path)
        assert done.code == EXIT_FAILED
        assert f"({job.checkpoints}" in done.error_line
        assert "earlier checkpoints are intact; free space there, and the job resumes" in done.error_line
        disk.free()
        assert run_forked(command, tmp_path).code == 0
    assert digests(tmp_path / "result.json") == digests(finished.result)


@pytest.mark.parametrize(
    ("durability", "words"),
    [
        ("everysec", "MISCONF Errors writing to the AOF file: No space left on device; the server cannot write its"),
        ("always", "the job's own store server has ended ("),
    ],
)
def test_a_store_whose_disk_is_full_says_so(tmp_path: Path, disk: SmallDisk, durability: str, words: str) -> None:
    disk.fill(leave_bytes=200 << 10)
    run = disk.folder / "run"
    done = run_forked([*JOB, "--run.dir", str(run), "--store.durability", durability], tmp_path)
    assert done.code == EXIT_FAILED
    assert words in done.error_line
    assert str(run) in done.error_line
    assert "ree space" in done.error_line


def test_a_result_that_cannot_be_written_is_printed(tmp_path: Path, disk: SmallDisk, finished: Resumed) -> None:
    disk.fill(leave_bytes=4096)
    files = {key: disk.folder / key.strip("-.") for key in ("--run.log", "--run.trace", "--result")}
    flags = [text for key, path in files.items() for text in (key, str(path))]
    done = run_forked([*JOB, *flags, "--run.log_every_s", "0.01"], tmp_path)
    assert done.code == EXIT_FAILED
    dense, rows, *_ = digests(finished.result)
    assert f"dense digest     {dense}" in done.out
    assert f"embedding digest {rows}" in done.out
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    for key in ("--run.log", "--run.trace"):
        assert any(f"{key.strip('-')}: cannot write {files[key]}: {NO_ROOM}" in note for note in notes), notes
    error = f"error: cannot write {files['--result']}: {NO_ROOM}"
    assert done.err.splitlines() == [*notes, error]
    assert len(notes) == 2
    assert [json.loads(line)["event"] for line in files["--run.log"].read_text().splitlines()[:-1]]
    assert {path.name for path in disk.folder.iterdir()} <= {"ballast", files["--run.log"].name}


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_an_export_that_finds_no_room_leaves_nothing(disk: SmallDisk, finished: Resumed, form: str) -> None:
    disk.fill(leave_bytes=8192)
    out = disk.folder / "out"
    flags = ["--checkpoint.dir", str(finished.checkpoints), "--out", str(out), "--format", form]
    with pytest.raises(Exception, match=f"--out: cannot write {out}: {NO_ROOM}") as caught:
        export(flags)
    assert type(caught.value).__name__ == "JobError"
    assert [path.name for path in disk.folder.iterdir()] == ["ballast"]


def test_data_tools_that_find_no_room_leave_nothing(
    tmp_path: Path, disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.tsv"
    assert data_main(["synth", "--out", str(log), "--rows", "3000"]) == 0
    capsys.readouterr()
    disk.fill(leave_bytes=16 << 10)
    replay = [
        "replay",
        "--data.path",
        str(log),
        "--data.format",
        "criteo-tsv",
        "--cache_rows",
        "20000",
        "--lookahead",
        "2",
        "--policy",
        "lru",
    ]
    for command, name in (
        (["synth", "--rows", "3000", "--out"], "synth.tsv"),
        (["convert", str(log), "--format", "criteo-tsv"], "out.arrow"),
        (["convert", str(log), "--format", "criteo-tsv"], "out.parquet"),
        ([*replay, "--report"], "report.html"),
    ):
        path = disk.folder / name
        assert data_main([*command, str(path)]) == EXIT_FAILED, command
        assert capsys.readouterr().err == f"error: cannot write {path}: {NO_ROOM}\n"
        assert [path.name for path in disk.folder.iterdir()] == ["ballast"]
