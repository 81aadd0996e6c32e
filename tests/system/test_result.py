"""Outputs of a run: the result JSON, reproducible digests, the trace, and TensorBoard files."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import redis
import torch

from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from tests.system.jobs import change, run_job
from tests.system.programs import Done, await_gone, run_forked, torchrun
from tools.draw_trace import picture, read_tracks

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

SMALL = [
    "--data.limit", "1500", "--data.batch_size", "64", "--model.embedding_dim", "4", "--model.bottom_mlp", "6",
    "--model.top_mlp", "5", "--data.workers", "0", "--cache.rows", "3000", "--oracle.lookahead", "5",
]  # fmt: skip

#: Fields of the result, used by scripts: name, type (float includes int), whether it can be null.
FIELDS = {
    "steps": (int, False),
    "samples": (int, False),
    "seconds": (float, False),
    "samples_per_s": (float, False),
    "loss": (float, True),
    "auc": (float, True),
    "ne": (float, True),
    "rows_unique": (int, False),
    "rows_fetched": (int, False),
    "rows_written": (int, False),
    "evictions_waiting": (int, False),
    "hit_rate": (float, False),
    "exposed_embedding_s": (float, False),
    "step_s_p50": (float, True),
    "dense_digest": (str, False),
    "embedding_digest": (str, False),
    "peak_rss_bytes": (int, False),
}


def run(arguments: list[str], folder: Path) -> tuple[Done, dict[str, Any]]:
    result = folder / "result.json"
    done = run_forked([*SMALL, *arguments, "--result", str(result)], folder)
    assert (done.code, done.err) == (0, ""), done.err
    await_gone(done.mark)
    return done, json.loads(result.read_text(), parse_constant=pytest.fail)


def test_every_field_of_the_result(tmp_path: Path) -> None:
    done, result = run([], tmp_path)
    for name, (kind, _) in FIELDS.items():
        assert type(result[name]) is kind, name
    assert (result["steps"], result["samples"]) == (22, 1350), "the last, smaller batch is trained too"
    assert result["samples_per_s"] == pytest.approx(result["samples"] / result["seconds"])
    assert 0 < result["hit_rate"] < 1
    assert 0 < result["auc"] < 1
    assert 0 < result["ne"] < 2
    assert 0 < result["logloss"] < 1
    assert 0.5 < result["calibration"] < 2
    assert result["gauc"] is None
    assert result["metrics_left_out"] == {}
    assert 0 <= result["exposed_embedding_s"] <= result["seconds"]
    assert result["rows_fetched"] <= result["rows_unique"]
    assert 0 < result["rows_new"] < result["rows_unique"]
    assert "from the store" in done.out
    assert result["peak_rss_bytes"] > 50 << 20
    for name in ("dense_digest", "embedding_digest"):
        assert len(bytes.fromhex(result[name])) == 32
        assert result[name] in done.out
    assert "AUC" in done.out
    config = change(parse_config(SMALL, "test").config, store__url="memory://")
    end = run_job(config)
    assert (result["dense_digest"], result["embedding_digest"]) == end.digests
    assert (result["auc"], result["ne"]) == (end.auc, end.ne)
    assert result["loss"] == pytest.approx(sum(end.losses[:-1]) * 64 / 1350 + end.losses[-1] * 6 / 1350)


def test_a_result_without_the_digest_of_the_rows(tmp_path: Path) -> None:
    """Null, and nothing else differs. Without a digest no row is read again after training."""
    done, without = run(["--run.digest", "false"], tmp_path)
    assert without["embedding_digest"] is None
    assert "embedding digest not computed (run.digest = false)" in done.out
    end = run_job(change(parse_config(SMALL, "test").config, store__url="memory://"))
    assert without["dense_digest"] == end.digests[0]
    assert (without["auc"], without["rows_unique"]) == (end.auc, end.trained.progress.rows_unique)


def test_digests_by_hand(redis_servers: tuple[str, ...], namespace: str, tmp_path: Path) -> None:
    """Digests can be recomputed from the servers' hashes with redis-py and the documented format alone."""
    url = ",".join(redis_servers)
    _, result = run(["--store.url", url, "--store.namespace", namespace], tmp_path)
    rows: dict[tuple[bytes, int], bytes] = {}
    records = []
    for server in redis_servers:
        path = unquote(server.removeprefix("unix://"))
        with closing(redis.Redis(unix_socket_path=path, socket_timeout=60)) as client:
            records.append(client.hgetall(f"{namespace}:meta"))
            schema = json.loads(records[-1][b"schema"])
            names = [table["name"].encode() for table in schema["tables"]]
            for key in client.scan_iter(f"{namespace}:{{*}}"):
                for field, value in client.hgetall(key).items():
                    table, row_id = struct.unpack(">Iq", field)
                    rows[names[table], row_id] = value[:-8]  # row checksum
    assert all(records)
    digest = hashlib.sha256()
    for (name, row_id), record in sorted(rows.items()):
        digest.update(name + b"\0" + struct.pack("<q", row_id) + record)
    assert digest.hexdigest() == result["embedding_digest"]


def test_dense_digest_by_hand(clicks: Callable[..., Config]) -> None:
    end = run_job(clicks())
    digest = hashlib.sha256()
    for value in end.dense.values():
        digest.update(value.numpy().tobytes())
    for number in sorted(end.state):
        for name in sorted(end.state[number]):
            value = end.state[number][name]
            assert isinstance(value, torch.Tensor)
            digest.update(value.numpy().tobytes())
    assert digest.hexdigest() == end.dense_digest


def test_the_trace_can_be_read_and_has_every_lane(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    _, result = run(["--run.trace", str(trace)], tmp_path)
    value = json.loads(trace.read_text())
    events = value["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(lanes.values()) == ["oracle", "data", "net-in", "copy", "compute", "net-out"]
    spans = [event for event in events if event["ph"] == "X"]
    for span in spans:
        assert span["tid"] in lanes
        assert math.isfinite(span["ts"])
        assert span["dur"] >= 0
    names = {(lanes[span["tid"]], span["name"]) for span in spans}
    for lane, op in (
        ("oracle", "0X_PLAN"), ("data", "0X_READ"), ("net-in", "0X_FETCH"), ("copy", "0X_EVICT"), ("copy", "0X_INSERT"),
        ("compute", "0F"), ("compute", "0B"), ("compute", "0X_UPDATE"), ("compute", "0OPT"),
        ("net-out", "0X_WRITEBACK"),
    ):  # fmt: skip
        for batch in range(result["steps"]):
            assert (lane, f"{op}{batch}") in names
    # All processes share a clock: a batch is planned before it is read, and read before it is trained.
    first = {(lanes[span["tid"]], span["name"]): span for span in reversed(spans)}
    for batch in (0, 9, 21):
        planned, read, forward = (
            first[key]
            for key in (("oracle", f"0X_PLAN{batch}"), ("data", f"0X_READ{batch}"), ("compute", f"0F{batch}"))
        )
        assert planned["ts"] + planned["dur"] <= read["ts"] + read["dur"] <= forward["ts"]
    drawing = picture(read_tracks([trace]), first=9, batches=1)
    assert ">rank 0<" in drawing
    assert "0F9 (batch 9)" in drawing


def test_tensorboard_files_hold_the_end_of_the_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "board"
    _, result = run(["--run.tensorboard", str(folder)], tmp_path)
    events = EventAccumulator(str(folder))
    events.Reload()
    names = {"train/loss", "train/samples_per_s", "cache/hit_rate", "cache/exposed_share", "store/rows_fetched"}
    assert names <= set(events.Tags()["scalars"])
    last = events.Scalars("train/loss")[-1]
    assert last.step == result["steps"]
    assert last.value == pytest.approx(result["loss"], rel=1e-5)


@pytest.mark.parametrize("label", ["0", "1"])
def test_one_class_has_no_auc(label: str, tmp_path: Path) -> None:
    from tests.data.files import criteo_line

    path = tmp_path / "one.tsv"
    path.write_bytes((criteo_line() + b"\n") * 50 + (criteo_line(label=label) + b"\n") * 50)
    arguments = ["--data.format", "criteo-tsv", "--data.path", str(path), "--data.eval_fraction", "0.5"]
    _, result = run(arguments, tmp_path)
    assert (result["auc"], result["ne"]) == (None, None)
    assert result["samples"] == 50


def test_no_examples_held_out(tmp_path: Path) -> None:
    _, result = run(["--data.eval_fraction", "0"], tmp_path)
    assert (result["auc"], result["ne"], result["samples"]) == (None, None, 1500)


def test_non_finite_numbers_are_null(tmp_path: Path) -> None:
    """JSON has no NaN, so non-finite numbers of a diverged run are null."""
    rates = ["--optim.rows", "sgd", "--optim.rows_lr", "1e38", "--optim.dense_lr", "1e38"]
    _, result = run(["--run.steps", "1", *rates], tmp_path)
    assert result["loss"] > 0
    assert (result["auc"], result["ne"]) == (None, None)


def test_a_result_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("something older")
    run([], tmp_path)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_torchrun_with_one_process(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    with torchrun([*SMALL, "--result", str(result)], "--standalone", ranks=1, forked=tmp_path) as program:
        done = program.finish()
    assert done.code == 0, done.err
    await_gone(done.mark)
    config = change(parse_config(SMALL, "test").config, store__url="memory://")
    assert json.loads(result.read_text())["embedding_digest"] == run_job(config).embedding_digest
