"""Errors known before the first batch end a job before it. Errors of the evaluation leave the trained rows in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagpipe.store.server.embedded import EmbeddedServer
from tests.data.files import criteo_line, criteo_lines
from tests.store.clients import client_of
from tests.system.programs import await_gone, run_forked, torchrun

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

SMALL = [
    "--data.batch_size", "16", "--model.name", "deepfm", "--model.embedding_dim", "4", "--model.bottom_mlp", "4",
    "--model.top_mlp", "4", "--data.workers", "0", "--cache.rows", "5000",
]  # fmt: skip
CRITEO = [*SMALL, "--data.format", "criteo-tsv"]


def keys(server: EmbeddedServer, namespace: str) -> list[Any]:
    with client_of(server.url) as client:
        return list(client.keys(f"{namespace}:*"))


# ---- capacity --------------------------------------------------------------------------------------------------------


def test_a_cache_that_is_too_small_is_refused_once(
    redis_server: EmbeddedServer, namespace: str, tmp_path: Path
) -> None:
    """Needs grow inside one window. The refusal comes before the first batch, and the number it names is enough."""
    needs = [30, 30, 30, 31, 30, 32, 37, 30, 42, 45, 53, 30]
    lines = (
        criteo_line(sparse="a").replace(b"\ta", f"\t{number % (need - 25):x}".encode(), 1)
        for need in needs
        for number in range(32)
    )
    path = tmp_path / "growing.tsv"
    path.write_bytes(b"\n".join(lines) + b"\n")
    arguments = [
        *CRITEO, "--data.batch_size", "32", "--data.path", str(path), "--data.eval_fraction", "0", "--oracle.lookahead",
        "12", "--store.url", redis_server.url, "--store.namespace", namespace,
    ]  # fmt: skip
    done = run_forked([*arguments, "--cache.rows", "30"], tmp_path)
    assert (done.code, keys(redis_server, namespace)) == (2, [])
    refusal = "error: batch 3 needs 31 unique rows but cache.rows is 30: raise cache.rows to at least 53, "
    assert done.error_line.startswith(refusal)
    done = run_forked([*arguments, "--cache.rows", "53"], tmp_path)
    assert (done.code, done.err) == (0, "")


# ---- labels ----------------------------------------------------------------------------------------------------------


def write_labels(folder: Path, labels: list[float]) -> list[str]:
    """Arguments of a job over a file with these labels."""
    path, schema = folder / "clicks.parquet", folder / "clicks.toml"
    pq.write_table(pa.table({"y": labels, "user": [*range(len(labels))]}), path)
    schema.write_text('label = "y"\nsparse = ["user"]\n')
    return [*SMALL, "--data.format", "parquet", "--data.path", str(path), "--data.schema", str(schema)]


@pytest.mark.parametrize("label", [2.0, -1.0, 7.5])
def test_a_label_outside_the_range_is_refused_and_nothing_is_written(
    label: float, redis_server: EmbeddedServer, namespace: str, tmp_path: Path
) -> None:
    arguments = write_labels(tmp_path, [0.0, 1.0, label] * 20)
    done = run_forked([*arguments, "--store.url", redis_server.url, "--store.namespace", namespace], tmp_path)
    assert (done.code, keys(redis_server, namespace)) == (2, [])
    said = f"{tmp_path}/clicks.parquet: row 2 (from 0): expected a label in [0, 1] in column 'y', got {label}"
    assert done.error_line == f"error: {said}"


def test_labels_outside_the_range_are_skipped_and_counted(tmp_path: Path) -> None:
    arguments = write_labels(tmp_path, [0.0, 1.0, 7.5, 0.0, -1.0] * 20)
    result = tmp_path / "result.json"
    more = ["--data.bad_rows", "skip", "--store.url", "memory://", "--result", str(result)]
    done = run_forked([*arguments, *more], tmp_path)
    assert (done.code, done.err) == (0, "")
    value = json.loads(result.read_text())
    assert (value["samples"], value["skipped_rows"]) == (54, 40)


def test_soft_labels_have_a_result_without_auc(tmp_path: Path) -> None:
    arguments = write_labels(tmp_path, [number / 200 for number in range(200)])
    result = tmp_path / "result.json"
    done = run_forked([*arguments, "--store.url", "memory://", "--result", str(result)], tmp_path)
    assert (done.code, done.err) == (0, "")
    value = json.loads(result.read_text())
    assert value["auc"] is None
    assert value["ne"] > 0
    reason = "it needs labels 0 and 1, and 20 of 20 held-out labels are neither"
    assert value["metrics_left_out"] == {"auc": reason}
    assert f"AUC is left out: {reason}" in done.out


# ---- held-out data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_held_out_data_that_cannot_be_read_leaves_the_rows_and_a_result_without_metrics(
    ranks: int, redis_server: EmbeddedServer, namespace: str, tmp_path: Path
) -> None:
    """The file with the held-out rows is opened when all batches are trained."""
    folder, result = tmp_path / "days", tmp_path / "result.json"
    folder.mkdir()
    (folder / "day_0").write_bytes(criteo_lines(180))
    (folder / "day_1").write_bytes(criteo_lines(15) + b"bad\n" + criteo_lines(4))
    arguments = [
        *CRITEO, "--data.path", str(folder), "--data.eval_fraction", "0.1", "--result", str(result), "--store.url",
        redis_server.url, "--store.namespace", namespace,
    ]  # fmt: skip
    if ranks == 1:
        done = run_forked(arguments, tmp_path)
    else:
        with torchrun(arguments, ranks=ranks, forked=tmp_path) as program:
            done = program.finish()
    await_gone(done.mark)
    said = f"{folder}/day_1:16: expected 40 tab-separated columns, got 1"
    assert done.code == (2 if ranks == 1 else 1)  # the launcher's own
    assert f"error: {said}" in done.err
    value = json.loads(result.read_text())
    assert (value["samples"], value["auc"], value["ne"]) == (180, None, None)
    assert value["metrics_left_out"] == dict.fromkeys(["auc", "ne", "logloss", "calibration"], said)
    with client_of(redis_server.url) as client:
        rows = sum(client.hlen(key) for key in client.scan_iter(f"{namespace}:{{*}}"))
    assert rows == value["rows_written"] > 0
