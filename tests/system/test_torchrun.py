"""`torchrun … -m trainer` as a user runs it: the command line, Ctrl-C, a restart, and a killed launcher."""

from __future__ import annotations

import json
import os
import re
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from bagpipe.store.server.embedded import EmbeddedServer
from tests.data.files import criteo_lines
from tests.system.clicks import write_clicks, write_schemas
from tests.system.jobs import change
from tests.system.programs import Done, await_gone, torchrun
from tests.system.resumed import SIX_TABLES
from tests.system.test_ranks import digests_of, run_to_the_end
from tests.system.writes import Writes

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

JOB = [
    "--data.schema", SIX_TABLES, "--data.limit", "3000", "--data.batch_size", "128", "--data.workers", "0",
    "--model.embedding_dim", "4", "--model.bottom_mlp", "6", "--model.top_mlp", "5", "--oracle.lookahead", "5",
    "--cache.rows", "500",
]  # fmt: skip
#: A job with endless data.
ENDLESS = [*JOB, "--data.epochs", "1000000", "--data.eval_fraction", "0"]


def direct_digests(arguments: list[str], url: str, **values: object) -> tuple[str, str]:
    config: Config = parse_config(arguments, "test").config
    config = change(config, cache__rows=0, store__url=url, store__namespace=uuid.uuid4().hex, **values)
    return digests_of(run_to_the_end(config, 2))


def stopped_by_ctrl_c(flags: list[str], store_url: str, writes: Writes, namespace: str, folder: Path) -> dict[str, Any]:
    """The result of two ranks on endless data, interrupted while they train; they exit cleanly."""
    result = folder / "out.json"
    store = ["--store.url", store_url, "--store.namespace", namespace, "--result", str(result)]
    with torchrun([*flags, *store], forked=folder) as program:
        writes.wait(200)
        program.interrupt_group()
        done = program.finish()
    await_gone(done.mark)
    assert done.code == 1, "torchrun's own, whatever its ranks return"
    assert not [line for line in done.err.splitlines() if line.startswith("error:")]
    stopped: dict[str, Any] = json.loads(result.read_text())
    assert stopped["stopped"] is True
    assert stopped["steps"] > 0
    return stopped


def test_ctrl_c_stops_all_ranks_cleanly(server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path) -> None:
    # The scale multiplies before the ranks' sums and is divided out after them; the expected job has no scale.
    flags = [*ENDLESS, "--run.loss_scale", "1024"]
    stopped = stopped_by_ctrl_c(flags, server.url, writes, namespace, tmp_path)
    expected = direct_digests(ENDLESS, server.url, run__steps=stopped["steps"])
    assert (stopped["dense_digest"], stopped["embedding_digest"]) == expected


def test_two_stages_on_two_ranks_equal_the_serial_reference(tmp_path: Path) -> None:
    result = tmp_path / "out.json"
    stages = ["--pipeline.schedule", "pipeoptim", "--pipeline.stages", "2", "--pipeline.microbatches", "4"]
    checked = ["--run.dtype", "float64", "--run.verify", "9", "--result", str(result)]
    with torchrun([*JOB, *stages, *checked], forked=tmp_path) as program:
        done = program.finish()
    await_gone(done.mark)
    assert done.code == 0, done.err
    assert "note: run.verify: the first 9 batches against the serial reference: largest relative" in done.err
    verified = json.loads(result.read_text())["verified"]
    assert verified["batches"] == 9
    assert max(verified[name] for name in ("loss", "gradients", "weights")) <= verified["tolerance"] == 1e-12


def broken_in_the_first_attempt(tmp_path: Path, factory: str, *, restarts: int) -> Done:
    """A job whose model fails at rank 1 in the first attempt."""
    result = tmp_path / "out.json"
    clicks, schemas = write_clicks(tmp_path / "clicks.parquet", num_examples=100), write_schemas(tmp_path)
    data = ["--data.path", str(clicks), "--data.format", "parquet", "--data.schema", str(schemas["everything"])]
    sizes = ["--data.batch_size", "12", "--cache.rows", "200", "--model.embedding_dim", "4"]
    model = ["--model.factory", f"tests.system.factory:{factory}"]
    arguments = [*data, *sizes, *model, "--result", str(result)]
    with torchrun(arguments, f"--max-restarts={restarts}", forked=tmp_path) as program:
        done = program.finish()
    await_gone(done.mark)
    return done


def test_a_job_restarted_after_a_kill_connects(tmp_path: Path) -> None:
    """The second attempt must not read the addresses of the first from the launcher's store."""
    done = broken_in_the_first_attempt(tmp_path, "dies_once", restarts=1)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out.json").read_text())["samples"] == 90
    assert "error: lost rank 1" in done.err


def error_lines(done: Done) -> list[str]:
    """The error lines of the ranks. No traceback comes before the launcher's report."""
    assert done.code == 1, "torchrun's own, whatever its ranks return"
    of_ranks, failed, _ = done.err.partition("torch/distributed/elastic/multiprocessing/api.py")
    assert failed, done.err
    assert "Traceback" not in of_ranks
    return [line for line in done.err.splitlines() if line.startswith("error:")]


def exit_codes(done: Done) -> list[str]:
    """Of all ranks that the launcher names."""
    return re.findall(r"exitcode  : (-?\d+)", done.err)


def test_an_error_of_one_rank_is_printed_once_by_rank_0(tmp_path: Path) -> None:
    done = broken_in_the_first_attempt(tmp_path, "refuses_once", restarts=0)
    assert error_lines(done) == ["error: rank 1: the third batch is not to our taste"]
    assert exit_codes(done) == ["2", "2"]


def bad_row(tmp_path: Path) -> tuple[list[str], str]:
    path = tmp_path / "day.tsv"
    path.write_bytes(criteo_lines(40) + b"bad\n" + criteo_lines(40))
    arguments = ["--data.path", str(path), "--data.format", "criteo-tsv", "--data.batch_size", "16"]
    return [*arguments, "--model.embedding_dim", "4"], f"error: {path}:41: expected 40 tab-separated columns, got 1"


def unknown_key(tmp_path: Path) -> tuple[list[str], str]:
    return ["--cache.rosw", "5"], "error: unknown option --cache.rosw; did you mean --cache.rows?"


def unwritable_on_rank_1(tmp_path: Path) -> tuple[list[str], str]:
    """Rank 1 is refused before it meets rank 0."""
    (tmp_path / "trace.rank1.json").mkdir()
    line = f"error: rank 1: run.trace: cannot write {tmp_path}/trace.rank1.json"
    return [*JOB, "--run.trace", str(tmp_path / "trace.json")], line


@pytest.mark.parametrize("make", [bad_row, unknown_key, unwritable_on_rank_1])
def test_a_refusal_is_printed_once(make: Callable[[Path], tuple[list[str], str]], tmp_path: Path) -> None:
    arguments, line = make(tmp_path)
    with torchrun(arguments, forked=tmp_path) as program:
        done = program.finish()
    await_gone(done.mark)
    (printed,) = error_lines(done)
    assert printed.startswith(line)
    # No rank waits for another to read its arguments: torchrun may end rank 1 before, once rank 0 has printed the line.
    allowed = [["2", "2"], ["-15", "2"]] if make is unknown_key else [["2", "2"]]
    assert sorted(exit_codes(done)) in allowed


def test_a_failure_is_printed_once(server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path) -> None:
    """Both ranks lose their store."""
    store = ["--store.url", server.url, "--store.namespace", namespace, "--store.timeout_s", "2"]
    with torchrun([*ENDLESS, *store], forked=tmp_path) as program:
        writes.wait(200)
        os.kill(server.process_id, signal.SIGKILL)
        done = program.finish()
    await_gone(done.mark)
    assert len(error_lines(done)) == 1
    assert exit_codes(done) == ["1", "1"]


def test_ranks_do_not_outlive_their_launcher(
    server: EmbeddedServer, writes: Writes, namespace: str, tmp_path: Path
) -> None:
    store = ["--store.url", server.url, "--store.namespace", namespace]
    with torchrun([*ENDLESS, *store], forked=tmp_path) as program:
        writes.wait(200)
        os.kill(program.pid, signal.SIGKILL)
        await_gone(program.mark)
        done = program.finish()
    assert "lost the job's key-value store, and with it rank 0 or its launcher" in done.err
