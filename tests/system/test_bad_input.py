"""Invalid user input: exit code 2, one line that names the problem and its place, and an untouched store."""

from __future__ import annotations

import gzip
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import redis

from bagpipe.store.server.embedded import EmbeddedServer
from data.columnar_writer import write_columnar
from data.criteo import CriteoSource
from tests.data.files import criteo_line, criteo_lines
from tests.system.programs import Done, await_gone, run_forked, run_program

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

SMALL = [
    "--data.batch_size", "16", "--model.embedding_dim", "4", "--model.bottom_mlp", "4", "--model.top_mlp", "4",
    "--data.format", "criteo-tsv", "--data.workers", "0", "--cache.rows", "5000",
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server of this module alone: tests compare its whole content."""
    with EmbeddedServer(tmp_path_factory.mktemp("untouched")) as server:
        yield server


def client_of(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, socket_timeout=60)


def content(server: EmbeddedServer) -> dict[bytes, bytes]:
    """Every key and its value."""
    with closing(client_of(server)) as client:
        return {key: client.dump(key) for key in client.keys("*")}


@pytest.fixture(scope="module")
def good_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "good.tsv"
    path.write_bytes(criteo_lines(64))
    return path


@pytest.fixture(scope="module")
def trained(server: EmbeddedServer, good_file: Path, tmp_path_factory: pytest.TempPathFactory) -> EmbeddedServer:
    """The server with a trained namespace `kept`."""
    arguments = [*SMALL, "--data.path", str(good_file), "--store.url", server.url, "--store.namespace", "kept"]
    done = run_forked(arguments, tmp_path_factory.mktemp("trained"))
    assert (done.code, done.err) == (0, "")
    return server


def assert_refused(done: Done, pattern: str, server: EmbeddedServer, before: dict[bytes, bytes]) -> None:
    assert done.code == 2, done.err
    assert re.fullmatch(f"error: {pattern}", done.error_line), done.err
    assert content(server) == before
    await_gone(done.mark)


# ---- data ------------------------------------------------------------------------------------------------------------

LINE = criteo_line()
FILES: list[tuple[str, bytes, str]] = [
    # name, content, message after "FILE"
    ("few.tsv", criteo_lines(3) + LINE.rsplit(b"\t", 1)[0] + b"\n", r":4: expected 40 tab-separated columns, got 39"),
    ("many.tsv", criteo_lines(3) + LINE + b"\ta\n", r":4: expected 40 tab-separated columns, got 41"),
    ("dense.tsv", criteo_line(dense="x") + b"\n", r":1: expected an integer .* in I1 \(column 2\), got 'x'"),
    ("label.tsv", LINE + b"\n" + criteo_line(label="7") + b"\n", r":2: expected label 0 or 1 in column 1, got '7'"),
    ("hex.tsv", criteo_line(sparse="zz") + b"\n", r":1: expected a hexadecimal id .* in C1 \(column 15\), got 'zz'"),
    ("crlf.tsv", criteo_lines(5).replace(b"\n", b"\r\n"), r":1: expected the line to end in LF, got CRLF line ends.*"),
    ("nul.tsv", criteo_lines(2) + LINE.replace(b"a", b"\0", 1) + b"\n", r":3: expected text, got a NUL byte .*"),
    ("empty.tsv", b"", r": .*empty.*|: .*no rows.*"),
    (
        "cut.tsv.gz",
        gzip.compress(criteo_lines(4000), mtime=0)[:-2000],
        r":1: expected the end of the gzip stream, got a file cut short .*",
    ),
    ("nogzip.tsv.gz", b"this is no gzip file", r":1: expected 40 tab-separated columns, got 1"),
]


@pytest.mark.parametrize(("name", "data", "pattern"), FILES, ids=[name for name, _, _ in FILES])
def test_bad_files(name: str, data: bytes, pattern: str, trained: EmbeddedServer, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    before = content(trained)
    done = run_forked([*SMALL, "--data.path", str(path), "--store.url", trained.url], tmp_path)
    assert_refused(done, re.escape(str(path)) + f"(?:{pattern})", trained, before)


def test_a_flipped_byte_of_a_converted_file(trained: EmbeddedServer, tmp_path: Path) -> None:
    text, path = tmp_path / "day.tsv", tmp_path / "day.parquet"
    text.write_bytes(criteo_lines(200))
    write_columnar(CriteoSource.at(str(text)), str(path))
    flipped = bytearray(path.read_bytes())
    chunk = pq.read_metadata(path).row_group(0).column(20)
    flipped[chunk.dictionary_page_offset + chunk.total_compressed_size - 1] ^= 1  # the last of the values
    path.write_bytes(flipped)
    before = content(trained)
    arguments = ["--data.path", str(path), "--data.format", "parquet", "--store.url", trained.url]
    pattern = re.escape(f"{path}: row group 0 is damaged: ") + ".*checksum.*"
    assert_refused(run_forked([*SMALL, *arguments], tmp_path), pattern, trained, before)


def test_ids_out_of_range(trained: EmbeddedServer, tmp_path: Path) -> None:
    path, schema = tmp_path / "ids.tsv", tmp_path / "schema.toml"
    path.write_bytes(LINE + b"\n" + criteo_line(sparse="b") + b"\n")
    schema.write_text("[tables.C3]\nrows = 11\n")
    before = content(trained)
    arguments = ["--data.path", str(path), "--data.schema", str(schema), "--store.url", trained.url]
    pattern = re.escape(f"{path}:2: expected ids of table 'C3' in [0, 11), got 11 (b)")
    assert_refused(run_forked([*SMALL, *arguments], tmp_path), pattern, trained, before)


@pytest.mark.parametrize("place", ["training", "held out"])
def test_a_bad_line_after_good_batches(place: str, trained: EmbeddedServer, tmp_path: Path) -> None:
    """A bad line in the held-out part ends the job instead of shrinking the evaluation. Earlier batches are trained."""
    lines = criteo_lines(200).split(b"\n")[:-1]
    number = 100 if place == "training" else 195
    lines[number] = b"bad"
    path = tmp_path / "late.tsv"
    path.write_bytes(b"\n".join(lines) + b"\n")
    result = tmp_path / "result.json"
    arguments = ["--data.path", str(path), "--data.eval_fraction", "0.1", "--result", str(result)]
    done = run_forked([*SMALL, *arguments, "--store.url", "memory://"], tmp_path)
    assert done.code == 2
    assert done.error_line == f"error: {path}:{number + 1}: expected 40 tab-separated columns, got 1"
    assert not result.exists()


# ---- configuration ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments added to those of a valid job, and the expected message."""

    name: str
    arguments: list[str]
    pattern: str
    environment: dict[str, str] = field(default_factory=dict)


CASES = [
    Case(
        name="unknown flag",
        arguments=["--cache.row", "5"],
        pattern=r"unknown option --cache\.row; did you mean --cache\.rows\?",
    ),
    Case(
        name="missing configuration file",
        arguments=["--config", "/nowhere/x.toml"],
        pattern=r"--config: cannot read /nowhere/x\.toml: No such file or directory",
    ),
    Case(name="missing data file", arguments=["--data.path", "/nowhere/x.tsv"], pattern=r".*/nowhere/x\.tsv.*"),
    Case(
        name="result folder",
        arguments=["--result", "/nowhere/out.json"],
        pattern=r"--result: folder /nowhere does not exist",
    ),
    Case(
        name="trace folder",
        arguments=["--run.trace", "/nowhere/t.json"],
        pattern=r"run\.trace: folder /nowhere does not exist",
    ),
    Case(
        name="tensorboard is a file",
        arguments=["--run.tensorboard", "/dev/null/x"],
        pattern=r"run\.tensorboard: expected a folder, /dev/null is not a folder",
    ),
    Case(
        name="job folder is a file",
        arguments=["--run.dir", "/dev/null"],
        pattern=r"run\.dir: expected a folder, /dev/null is not a folder",
    ),
    Case(
        name="cache too small",
        arguments=["--cache.rows", "100"],
        pattern=r"batch 0 needs \d+ unique rows but cache\.rows is 100: .*",
    ),
    Case(
        name="world size",
        arguments=[],
        environment={"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
        pattern=r"WORLD_SIZE is set, so MASTER_ADDR is expected in the environment; start with torchrun",
    ),
    Case(
        name="a rank too many",
        arguments=[],
        environment={"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        pattern=r"expected RANK in the environment to be a number from 0 to 1, got '2'; start with torchrun",
    ),
    Case(
        name="memory that ranks cannot share",
        arguments=["--store.url", "memory://"],
        environment={"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        pattern=r"store\.url is memory://, which is private to one process; 2 ranks need a server: .*",
    ),
    Case(
        name="no such factory",
        arguments=["--model.factory", "tests.system.factory:nothing"],
        pattern=r"model\.factory: module 'tests\.system\.factory' has no function 'nothing'",
    ),
    Case(
        name="no such factory module",
        arguments=["--model.factory", "nowhere:build"],
        pattern=r"model\.factory: no module 'nowhere' on the path",
    ),
    Case(
        name="factory of something else",
        arguments=["--model.factory", "tests.system.factory:returns_no_module"],
        pattern=r"model\.factory: expected 'tests\.system\.factory:returns_no_module' to return a module, got str",
    ),
    Case(
        name="factory for other columns",
        arguments=["--model.factory", "tests.system.factory:build"],
        pattern=r"table 'goods' reads feature 'items', the data has .*",
    ),
    Case(
        name="no CUDA",
        arguments=["--run.device", "cuda"],
        pattern=r"run\.device is cuda, but this machine has no usable CUDA device|.*CPU.*",
    ),
    Case(
        name="a daemon",
        arguments=["--cacher.url", "localhost:1", "--cacher.timeout_s", "0.5"],
        pattern=r"the cacher at localhost:1 was not reached within 0\.5 s: .*Connection refused",
    ),
    Case(
        name="checkpoints in a file",
        arguments=["--checkpoint.dir", "/proc/self/stat/x"],
        pattern=r"checkpoint\.dir: expected a folder, /proc/\S+/stat is not a folder",
    ),
    Case(
        name="rows of another type",
        arguments=["--cache.dtype", "float64"],
        pattern=r"--cache\.dtype float64 needs run\.dtype float64, got float32",
    ),
    Case(name="bad store URL", arguments=["--store.url", "http://x"], pattern=r"store\.url must begin with .*"),
    Case(
        name="unreachable store",
        arguments=["--store.url", "unix:///nowhere/store.sock"],
        pattern=r"store unix:///nowhere/store\.sock: cannot be reached: .*",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bad_configuration(case: Case, trained: EmbeddedServer, good_file: Path, tmp_path: Path) -> None:
    before = content(trained)
    # The case's own flags stand last and take precedence.
    arguments = [*SMALL, "--data.path", str(good_file), "--store.url", trained.url, "--store.namespace", "new"]
    done = run_forked([*arguments, *case.arguments], tmp_path, case.environment)
    assert_refused(done, case.pattern, trained, before)


def test_unknown_key_in_a_file(trained: EmbeddedServer, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("[data]\nlimit = 10\n\n[cache]\nrow = 5\n")
    pattern = re.escape(f"{config}:5: unknown key cache.row; did you mean cache.rows?")
    before = content(trained)
    done = run_forked(["--config", str(config), "--store.url", trained.url], tmp_path)
    assert_refused(done, pattern, trained, before)


# ---- store -----------------------------------------------------------------------------------------------------------

RECORDS = [
    # flags that differ from the namespace's record; the error names both values
    (["--optim.rows", "adam"], r".*'kept'.*optimizer.*(adagrad.*adam|adam.*adagrad).*"),
    (["--model.embedding_dim", "8"], r".*'kept'.*dim.*(4.*8|8.*4).*"),
    (["--run.seed", "3"], r".*'kept'.*seed.*(0.*3|3.*0).*"),
    (["--run.dtype", "float64"], r".*'kept'.*dtype.*(float32.*float64|float64.*float32).*"),
    (["--store.buckets", "32"], r".*'kept'.*buckets.*(64.*32|32.*64).*"),
]


@pytest.mark.parametrize(("flags", "pattern"), RECORDS, ids=[flags[0] for flags, _ in RECORDS])
def test_another_record(
    flags: list[str], pattern: str, trained: EmbeddedServer, good_file: Path, tmp_path: Path
) -> None:
    before = content(trained)
    arguments = ["--data.path", str(good_file), "--store.url", trained.url, "--store.namespace", "kept"]
    assert_refused(run_forked([*SMALL, *arguments, *flags], tmp_path), pattern, trained, before)


def test_another_schema(trained: EmbeddedServer, tmp_path: Path) -> None:
    before = content(trained)
    arguments = ["--data.format", "synthetic", "--data.limit", "100", "--model.name", "wide-deep"]
    done = run_forked([*SMALL, *arguments, "--store.url", trained.url, "--store.namespace", "kept"], tmp_path)
    assert_refused(done, r".*'kept'.*", trained, before)


def with_setting(server: EmbeddedServer, name: str, value: str, run: Callable[[], Done]) -> Done:
    with closing(client_of(server)) as client:
        (before,) = client.config_get(name).values()
        client.config_set(name, value)
        try:
            return run()
        finally:
            client.config_set(name, before)


def test_an_evicting_server(trained: EmbeddedServer, good_file: Path, tmp_path: Path) -> None:
    before = content(trained)
    arguments = [*SMALL, "--data.path", str(good_file), "--store.url", trained.url, "--store.namespace", "new"]
    done = with_setting(
        trained,
        "maxmemory",
        "1000000000",
        lambda: with_setting(trained, "maxmemory-policy", "allkeys-lru", lambda: run_forked(arguments, tmp_path)),
    )
    assert_refused(done, r"store unix://.* drops rows when full: .*allkeys-lru.*noeviction.*", trained, before)


def test_a_server_with_a_password(server: EmbeddedServer, good_file: Path, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "guarded") as guarded:
        with closing(client_of(guarded)) as client:
            client.config_set("requirepass", "open sesame")
            arguments = [*SMALL, "--data.path", str(good_file), "--store.url"]
            without = run_forked([*arguments, guarded.url], tmp_path)
            wrong = run_forked([*arguments, f"{guarded.url}?password=guess"], tmp_path)
            right = run_forked([*arguments, f"{guarded.url}?password=open%20sesame"], tmp_path)
            assert client.dbsize() > 1, "the one with the password trained"
    for done in (without, wrong):
        assert done.code == 2
        assert re.match(r"error: store unix://.*store\.sock.*: user or password refused", done.error_line)
        assert "guess" not in done.err
    assert (right.code, right.err) == (0, "")


def test_an_unresponsive_server(good_file: Path, tmp_path: Path) -> None:
    """The server accepts connections but never answers within the deadline."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        arguments = ["--data.path", str(good_file), "--store.url", url, "--store.timeout_s", "0.2"]
        done = run_forked([*SMALL, *arguments], tmp_path)
    assert done.code == 2
    assert re.match(rf"error: store {url}: no answer within store\.timeout_s = 0\.2 s", done.error_line)


# ---- skipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", [[], ["--eval.every", "2"], ["--eval.every", "2", "--eval.batches", "1"]])
def test_skipped_rows_are_counted(evaluation: list[str], tmp_path: Path) -> None:
    """Bad lines in the training and held-out parts are counted, and the rest trains as if they were absent."""
    lines = criteo_lines(100).split(b"\n")[:-1]
    for number in (0, 1, 40, 70, 97):
        lines[number] = b"bad\tline"
    path, result = tmp_path / "some.tsv", tmp_path / "result.json"
    path.write_bytes(b"\n".join(lines) + b"\n")
    arguments = ["--data.path", str(path), "--data.bad_rows", "skip", "--data.eval_fraction", "0.1", *evaluation]
    done = run_forked([*SMALL, *arguments, "--store.url", "memory://", "--result", str(result)], tmp_path)
    assert (done.code, done.err) == (0, "")
    value = json.loads(result.read_text())
    assert (value["samples"], value["skipped_rows"]) == (86, 5)


# ---- fresh interpreters ----------------------------------------------------------------------------------------------


def test_a_fresh_interpreter_prints_one_line(trained: EmbeddedServer, tmp_path: Path) -> None:
    """Import-time warnings of torchrec and its dependencies do not reach the user."""
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"bad\n")
    before = content(trained)
    done = run_program([*SMALL, "--data.path", str(path), "--store.url", trained.url])
    assert_refused(done, re.escape(f"{path}:1: expected 40 tab-separated columns, got 1"), trained, before)
    done = run_program(["--data.bach_size", "7"])
    assert (done.code, done.error_line.partition(";")[0]) == (2, "error: unknown option --data.bach_size")
