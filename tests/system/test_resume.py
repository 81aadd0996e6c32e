"""Killed, stopped and refused jobs that are started again: the same digests, or one clear error line."""

from __future__ import annotations

import json
import re
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from bagpipe.checkpoint import codec
from bagpipe.checkpoint.manifest import FORMAT_VERSION
from bagpipe.store.server.embedded import EmbeddedServer
from tests.effort import some_of
from tests.store.nodes import await_true
from tests.system.programs import Program, await_gone, run_forked, run_program
from tests.system.resumed import JOB, Resumed, digests
from tests.system.writes import Writes, client_of

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

ENDLESS = ["--data.epochs", "1000000", "--data.eval_fraction", "0"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Final numbers of the uninterrupted job without checkpoints."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = run_forked([*JOB, "--result", str(folder / "result.json")], folder)
    assert (done.code, done.err) == (0, "")
    return digests(folder / "result.json")


@pytest.fixture
def job(server: EmbeddedServer, tmp_path: Path) -> Resumed:
    """A job before its first start, on a server that outlives its starts."""
    return Resumed(folder=tmp_path, arguments=["--store.url", server.url])


@pytest.mark.parametrize(
    ("point", "resumed_from"),
    [
        ("after-fetch:3", [None]),  # the dying thread can be ahead of or behind the checkpoint thread
        ("mid-write-back:14", [None, 5, 10]),
        ("after-dense-copy:2", [None, 5]),
        pytest.param("after-rotation:2", [None, 5], marks=pytest.mark.slow),
        ("after-checkpoint-data:2", [5]),
        ("before-manifest:3", [5]),
        pytest.param("after-manifest:3", [10], marks=pytest.mark.slow),
        ("mid-commit:2", [10]),
        ("after-commit:2", [10]),
    ],
)
def test_a_killed_job_resumes(point: str, resumed_from: list[int | None], job: Resumed, expected: object) -> None:
    died = job.run(dies_at=point)
    assert died.code == -signal.SIGKILL
    await_gone(died.mark)
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == expected
    assert job.resumed_from() in resumed_from


def test_a_killed_job_with_half_rows_resumes(server: EmbeddedServer, tmp_path: Path) -> None:
    """Stochastic rounding does not depend on the start of the job."""
    half = ["--cache.dtype", "bfloat16"]
    done = run_forked([*JOB, *half, "--result", str(tmp_path / "uninterrupted.json")], tmp_path)
    assert (done.code, done.err) == (0, "")
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *half])
    assert job.run(dies_at="after-commit:2").code == -signal.SIGKILL
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == digests(tmp_path / "uninterrupted.json")
    assert job.resumed_from() == 10


def test_a_resume_on_another_processor_says_so(job: Resumed) -> None:
    """A fresh interpreter: torch chooses its kernels once in a process."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("torch has only one set of kernels for this processor")
    for step in ("7", "14"):
        here = job.run("--run.steps", step)
        assert (here.code, here.err) == (0, "")
    other = run_program(job.line(), {"ATEN_CPU_CAPABILITY": "default"})
    assert (other.code, job.resumed_from()) == (0, 14)
    assert "was made with CPU capability" in other.error_line
    assert "this job has 'DEFAULT': results are no longer bit-identical" in other.error_line


@pytest.mark.parametrize("point", some_of(["after-acquire", "mid-recovery", "before-begin", "after-begin"], {1, 3}))
def test_a_job_killed_in_its_recovery_resumes(point: str, job: Resumed, expected: object) -> None:
    job.run(dies_at="after-checkpoint-data:3")
    assert job.run(dies_at=point).code == -signal.SIGKILL
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == expected


@pytest.mark.parametrize("keys", some_of(["all", "a bucket", "checkpoint ids"], {1, 2}))
def test_a_store_that_lost_something_is_loaded_from_files(
    keys: str, server: EmbeddedServer, job: Resumed, expected: object
) -> None:
    job.run(dies_at="after-commit:3")
    with closing(client_of(server.url)) as client:
        names = {
            "all": "*",
            "a bucket": f"{job.namespace}:{{3}}*",
            "checkpoint ids": f"{job.namespace}:*:checkpoint_id",
        }[keys]
        client.delete(*client.keys(names))
    done = job.run()
    assert done.code == 0
    assert "buckets were loaded from the checkpoint's files" in done.error_line
    assert digests(job.result) == expected


def test_a_store_of_the_jobs_own_is_loaded_from_files(tmp_path: Path, expected: object) -> None:
    job = Resumed(folder=tmp_path)
    job.run(dies_at="after-commit:2")
    done = job.run()
    assert "8 of the store's 8 buckets were loaded" in done.error_line
    assert digests(job.result) == expected


def test_a_job_at_its_end_trains_nothing(job: Resumed, expected: object) -> None:
    for resumed_from in (None, 22):
        assert job.run().code == 0
        assert digests(job.result) == expected
        assert job.resumed_from() == resumed_from
    values = json.loads(job.result.read_text())
    assert (values["steps"], values["samples"], values["rows_fetched"]) == (22, 2700, 0)
    assert job.steps() == [20, 22]
    # The reader resumes at the checkpoint's step: no batch is read and discarded.
    for path in job.checkpoints.glob("*/*/manifest.json"):
        manifest = json.loads(path.read_text())
        assert manifest["parts"][0]["progress"]["reader_state"]["batch"] == manifest["step"]


def test_a_longer_run_of_the_same_job(job: Resumed, expected: object) -> None:
    assert job.run("--run.steps", "13").code == 0
    assert job.steps() == [10, 13]
    assert job.run().code == 0
    assert job.resumed_from() == 13
    assert digests(job.result) == expected


def test_an_earlier_checkpoint(job: Resumed, expected: object) -> None:
    """Also with another cache, lookahead and reader: results do not depend on them."""
    assert job.run("--checkpoint.keep", "99").code == 0
    other = ["--cache.rows", "2500", "--oracle.lookahead", "9", "--cache.prefetch_depth", "2", "--data.workers", "1"]
    again = ["--checkpoint.keep", "99", *other]
    assert job.run("--checkpoint.resume", "10", *again, dies_at="after-fetch:2").code == -signal.SIGKILL
    # A restart continues the new generation, not the checkpoints after the chosen one.
    assert job.run(*again).code == 0
    assert job.resumed_from() == 10
    assert digests(job.result) == expected
    done = job.run("--checkpoint.resume", "11")
    assert done.code == 2
    assert "has no whole checkpoint of step 11, it has steps 0, 5, 10, 15, 20, 22" in done.error_line


def test_a_broken_checkpoint_is_skipped(job: Resumed, expected: object) -> None:
    job.run(dies_at="after-commit:3")
    # The next checkpoint may have begun: the newest published one is damaged.
    newest = max(job.checkpoints.glob("*/*/manifest.json")).with_name("dense-0000.safetensors")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    done = job.run(dies_at="before-manifest:2")
    assert "the checkpoint of step 15 is broken and skipped" in done.err
    # It is in addition to the two that are kept: there is a second one to fall back to.
    assert job.steps() == [10, 15, 15]
    assert job.run().code == 0
    assert job.resumed_from() == 15
    assert digests(job.result) == expected


@pytest.mark.parametrize("number", some_of([signal.SIGTERM, signal.SIGINT], {0}))
def test_a_stopped_job_leaves_a_checkpoint(
    number: int, server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path
) -> None:
    job = Resumed(folder=tmp_path, namespace=namespace, arguments=["--store.url", server.url, *ENDLESS])
    with Program(job.line("--checkpoint.every", "200"), forked=tmp_path) as program:
        writes.wait(200)
        assert program.process is not None
        program.process.send_signal(number)
        done = program.finish()
    assert (done.code, done.err) == (130, "")
    stopped = json.loads(job.result.read_text())["steps"]
    assert job.steps()[-1] == stopped
    limit = ["--run.steps", str(stopped + 7)]
    assert job.run(*limit).code == 0
    assert job.resumed_from() == stopped
    ended = digests(job.result)
    assert run_forked([*JOB, *ENDLESS, *limit, "--result", str(job.result)], tmp_path).code == 0
    assert digests(job.result) == ended


@pytest.fixture(scope="module")
def after_400_steps(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Final numbers of 400 uninterrupted steps."""
    folder = tmp_path_factory.mktemp("steps")
    flags = ["--run.steps", "400", "--result", str(folder / "result.json")]
    assert run_forked([*JOB, *ENDLESS, *flags], folder).code == 0
    return digests(folder / "result.json")


@pytest.mark.parametrize("has_own_stores", some_of([False, True], {1}))
def test_a_second_start_is_refused_until_it_takes_over(
    has_own_stores: bool,
    server: EmbeddedServer,
    writes: Writes,
    namespace: str,
    tmp_path: Path,
    after_400_steps: object,
) -> None:
    """Also without a common store, whose fence ends the first job: then the folder's does."""
    job = Resumed(folder=tmp_path, namespace=namespace, arguments=["--store.url", server.url, *ENDLESS])
    with Program([*job.line(), "--checkpoint.every", "40"], forked=tmp_path) as first:
        writes.wait(500)
        assert first.process is not None
        first.process.send_signal(signal.SIGSTOP)  # so that it has trained fewer than 400 steps
        if has_own_stores:
            job.arguments = ENDLESS
        before = files(job.checkpoints)
        second = job.run("--run.steps", "400", "--checkpoint.every", "0")
        assert second.code == 2
        assert f"is in use by process {first.pid} on host" in second.error_line
        assert "take over with checkpoint.take_over=true" in second.error_line
        assert {path.split("/")[0] for path in files(job.checkpoints)} == {path.split("/")[0] for path in before}
        second = job.run("--run.steps", "400", "--checkpoint.take_over", "true")
        assert second.code == 0
        first.process.send_signal(signal.SIGCONT)
        done = first.finish()
    assert done.code == 1
    assert "taken over" in done.error_line
    assert digests(job.result) == after_400_steps


def content(server: EmbeddedServer) -> dict[bytes, bytes]:
    with closing(client_of(server.url)) as client:
        return {key: client.dump(key) for key in client.keys("*")}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def newer(job: Resumed) -> None:
    """A manifest written by a later version."""
    path = sorted(job.checkpoints.glob("*/*/manifest.json"))[-1]
    value = {name: item for name, item in json.loads(path.read_text()).items() if name != "checksum"}
    value["format_version"] = FORMAT_VERSION + 1
    path.write_text(json.dumps({**value, "checksum": codec._checksum(value)}))


def all_broken(job: Resumed) -> None:
    for path in job.checkpoints.glob("*/*/manifest.json"):
        path.write_text("{")


def nothing(job: Resumed) -> None:
    pass


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedServer, Resumed]]:
    """A finished job; no test may change it or its server."""
    folder = tmp_path_factory.mktemp("finished")
    with EmbeddedServer(folder / "server") as server:
        job = Resumed(folder=folder, arguments=["--store.url", server.url])
        assert job.run().code == 0
        yield server, job


@pytest.mark.parametrize(
    ("arguments", "change", "words"),
    [
        (["--model.embedding_dim", "8"], nothing, r"was made with table '\w+' dim 4, this job has 8"),
        (["--model.top_mlp", "9"], nothing, r"made with model\.top_mlp\[0\] 5, this job has 9"),
        (["--optim.rows_lr", "0.5"], nothing, r"made with optim\.rows_lr 0\.02, this job has 0\.5"),
        (["--data.batch_size", "64"], nothing, r"made with data\.batch_size 128, this job has 64"),
        (["--data.limit", "2000"], nothing, r"made with data\.limit 3000, this job has 2000"),
        (["--run.threads", "2"], nothing, r"made with run\.threads 1, this job has 2"),
        (["--pipeline.microbatches", "2"], nothing, r"made with pipeline\.microbatches 1, this job has 2"),
        (
            ["--checkpoint.resume", "never"],
            nothing,
            r"rows of job \w{8}, which finished after 22 steps, dense digest \w{8}",
        ),
        (
            ["--checkpoint.dir", "", "--checkpoint.every", "0"],
            nothing,
            r"name the folder of its checkpoints with check",
        ),
        ([], newer, f"has format version {FORMAT_VERSION + 1}, "),
        ([], all_broken, "none of its 2 checkpoints is whole"),
    ],
)
def test_an_incompatible_job_is_refused_without_changes(
    arguments: list[str],
    change: Callable[[Resumed], None],
    words: str,
    finished: tuple[EmbeddedServer, Resumed],
    tmp_path: Path,
) -> None:
    server, known = finished
    shutil.copytree(known.checkpoints, tmp_path / "checkpoints")
    job = Resumed(folder=tmp_path, arguments=known.arguments, namespace=known.namespace)
    change(job)
    before = content(server), files(job.checkpoints)
    done = job.run(*arguments)
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert re.search(words, last), last
    assert "Traceback" not in done.err
    assert (content(server), files(job.checkpoints)) == before


def test_a_model_that_no_checkpoint_can_hold_is_refused_before_it_is_trained(
    server: EmbeddedServer, job: Resumed
) -> None:
    before = content(server)
    done = job.run("--model.factory", "tests.system.factory:counted")
    assert (done.code, done.error_line) == (
        2,
        "error: module 'counter' has extra state, which checkpoints cannot hold: use a buffer",
    )
    assert content(server) == before


def test_rows_of_a_job_without_checkpoints_are_refused(server: EmbeddedServer, job: Resumed) -> None:
    plain = [*JOB, "--store.url", server.url, "--store.namespace", job.namespace, "--result", str(job.result)]
    assert run_forked(plain, job.folder).code == 0
    before = content(server)
    done = job.run()
    assert done.code == 2
    assert "finished after 22 steps" in done.error_line
    assert content(server) == before
    assert not job.checkpoints.exists()


def test_a_disk_that_fills_up_ends_the_job_with_its_last_checkpoint_whole(
    server: EmbeddedServer, job: Resumed, expected: object
) -> None:
    limited = Program(job.line("--run.seed", "0"), prefix=["prlimit", "--fsize=50000"])
    with limited as program:
        done = program.finish()
    assert done.code == 1
    assert "a checkpoint cannot be written" in done.error_line
    assert job.run().code == 0
    assert digests(job.result) == expected


def test_resume_never_starts_a_new_job(server: EmbeddedServer, job: Resumed, expected: object) -> None:
    assert job.run().code == 0
    job.namespace = uuid.uuid4().hex
    assert job.run("--checkpoint.resume", "never").code == 0
    assert job.resumed_from() is None
    assert digests(job.result) == expected


def test_a_lost_row_invalidates_the_store(
    server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path
) -> None:
    """Rows vanish during the run: the job ends, and the next one does not trust the store."""
    job = Resumed(folder=tmp_path, namespace=namespace, arguments=["--store.url", server.url, *ENDLESS])
    with Program(job.line("--checkpoint.every", "40"), forked=tmp_path) as program:
        writes.wait(200)
        await_true(lambda: len([*job.checkpoints.glob("*/step-*/manifest.json")]) > 1, "a checkpoint after the first")
        delete_rows(server, job)
        done = program.finish()
    assert done.code == 1
    assert "was written, but is not in the store any more" in done.error_line
    done = job.run("--run.steps", "1")
    assert done.code == 0
    assert "8 of the store's 8 buckets were loaded" in done.err.splitlines()[-1]  # nothing is left to train


def test_rows_lost_between_two_starts_are_loaded_from_files(
    server: EmbeddedServer, job: Resumed, expected: object
) -> None:
    """Checkpoint ids and logs are right, but recovery counts the rows."""
    assert job.run("--run.steps", "11").code == 0
    delete_rows(server, job)
    done = job.run()
    assert done.code == 0
    assert "8 of the store's 8 buckets were loaded" in done.error_line
    assert digests(job.result) == expected


def delete_rows(server: EmbeddedServer, job: Resumed) -> None:
    with closing(client_of(server.url)) as client:
        client.delete(*(f"{job.namespace}:{{{bucket}}}" for bucket in range(8)))
