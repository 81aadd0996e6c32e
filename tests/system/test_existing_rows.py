"""Jobs on a namespace that another job has used: no rows are mixed, and every way out ends as described."""

from __future__ import annotations

import json
import signal
import uuid
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bagpipe.store.server.embedded import EmbeddedServer
from tests.data.files import criteo_lines
from tests.system.programs import Done, await_gone, run_forked
from tests.system.resumed import JOB, Resumed, digests
from tests.system.writes import client_of

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

#: The second job: other data order and rate, the same rows.
DAY_2 = ["--optim.rows_lr", "0.02", "--data.batch_size", "100"]


@dataclass(slots=True, kw_only=True)
class Namespace:
    """A namespace on a test's server, and jobs without checkpoints on it."""

    url: str
    folder: Path
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    def run(self, *more: str, dies_at: str = "") -> Done:
        self.result.unlink(missing_ok=True)
        own = ["--store.url", self.url, "--store.namespace", self.name, "--result", str(self.result)]
        return run_forked([*JOB, *own, *more], self.folder, {"BAGPIPE_CRASH_AT": dies_at} if dies_at else {})

    def content(self) -> list[bytes]:
        """Keys of the namespace."""
        with closing(client_of(self.url)) as client:
            keys: list[bytes] = client.keys(f"{self.name}:*")
            return sorted(keys)

    def continued(self) -> bool:
        value: bool = json.loads(self.result.read_text())["continued"]
        return value


@pytest.fixture
def used(server: EmbeddedServer, tmp_path: Path) -> Namespace:
    return Namespace(url=server.url, folder=tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Final numbers of the job on a namespace of its own."""
    folder = tmp_path_factory.mktemp("alone")
    done = run_forked([*JOB, "--result", str(folder / "result.json")], folder)
    assert (done.code, done.err) == (0, "")
    return digests(folder / "result.json")


def test_a_bad_row_leaves_no_rows_for_the_mended_file(used: Namespace, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.tsv", tmp_path / "bad.tsv"
    lines = criteo_lines(600).splitlines(keepends=True)
    good.write_bytes(b"".join(lines))
    bad.write_bytes(b"".join([*lines[:400], b"not\ta\trow\n", *lines[401:]]))
    data = ["--data.schema", "", "--data.format", "criteo-tsv", "--data.batch_size", "50", "--cache.rows", "5000"]
    done = used.run(*data, "--data.path", str(bad), "--oracle.lookahead", "1")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "bad.tsv" in done.err
    assert used.content() == []
    done = used.run(*data, "--data.path", str(good))
    assert (done.code, done.err) == (0, "")
    alone = Namespace(url=used.url, folder=tmp_path)
    assert alone.run(*data, "--data.path", str(good)).code == 0
    assert digests(used.result) == digests(alone.result)


@pytest.mark.parametrize("dies_at", ["", "after-write-back:5"])
def test_rows_of_an_earlier_job_are_refused_or_removed(dies_at: str, used: Namespace, expected: object) -> None:
    died = used.run(dies_at=dies_at)
    if dies_at:
        assert died.code == -signal.SIGKILL
        await_gone(died.mark)
    before = used.content()
    done = used.run()
    assert done.code == 2
    assert done.err.count("\n") == 1
    end = r"has not recorded its end" if dies_at else "finished after 22 steps, dense digest "
    assert end in done.err
    assert "set store.existing to rows-only (train them with a fresh dense part) or reset (delete them)" in done.err
    assert used.content() == before
    done = used.run("--store.existing", "reset")
    assert (done.code, done.err) == (0, "")
    assert digests(used.result) == expected
    assert not used.continued()


def test_a_reset_takes_a_used_another_schema(used: Namespace, expected: object) -> None:
    other = ["--model.embedding_dim", "6", "--store.buckets", "32", "--optim.rows", "adam"]
    assert used.run(*other).code == 0
    done = used.run()
    assert done.code == 2
    assert "delete its rows with store.existing=reset" in done.err
    assert used.run("--store.existing", "reset").code == 0
    assert digests(used.result) == expected
    assert not [key for key in used.content() if b"{8}" in key]


@pytest.mark.parametrize(
    "deaths",
    [
        ("", "before-begin", "after-commit:2"),
        pytest.param(("after-acquire", "after-begin", "before-manifest:2"), marks=pytest.mark.slow),
    ],
)
def test_rows_only_is_the_same_with_and_without_checkpoints(
    deaths: tuple[str, ...], server: EmbeddedServer, tmp_path: Path
) -> None:
    """Day 1's rows under a fresh dense part: without checkpoints, with them, and killed and resumed."""
    rows_only = ["--store.existing", "rows-only", *DAY_2]
    day_1 = Namespace(url=server.url, folder=tmp_path)
    assert day_1.run().code == 0
    assert day_1.run(*rows_only).code == 0
    assert day_1.continued()
    for dies_at in deaths:
        day_1_again = Namespace(url=server.url, folder=tmp_path)
        assert day_1_again.run().code == 0
        folder = tmp_path / f"dies at {dies_at}"
        folder.mkdir()
        job = Resumed(folder=folder, namespace=day_1_again.name, arguments=["--store.url", server.url, *rows_only])
        if dies_at:
            assert job.run(dies_at=dies_at).code == -signal.SIGKILL
        assert job.run().code == 0
        assert digests(job.result) == digests(day_1.result), dies_at


def test_a_trained_checkpoint_removes_rows_of_another_job_only_if_told_to(
    server: EmbeddedServer, tmp_path: Path, expected: object
) -> None:
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url])
    assert job.run("--run.steps", "11").code == 0
    other = Namespace(url=server.url, folder=tmp_path)
    assert other.run().code == 0
    job.namespace = other.name
    for existing in ("refuse", "rows-only"):
        done = job.run("--store.existing", existing)
        assert done.code == 2
        assert "set store.existing to reset (delete them), or use another" in done.err
    assert job.run("--store.existing", "reset").code == 0
    assert digests(job.result) == expected
