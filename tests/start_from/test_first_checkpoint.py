"""`checkpoint.start_from`: a day's job takes rows and dense part of the day before, and says what it does not take."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.dense_state import load
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.config.load import parse_config
from bagpipe.oracle.lifetimes import LEAST_GAP
from bagpipe.types.schema import UNBOUNDED_DEFAULT_ID, RowSchema
from data.loader import open_loader
from tests.system.clicks import write_clicks, write_schemas
from tests.system.programs import Done, run_forked
from trainer.export import export

pytestmark = pytest.mark.multiproc

#: Batches of a day: the days end with whole batches, as those of one job over both do.
DAY, BATCH = 120, 12

SMALL = [
    "--data.batch_size", str(BATCH), "--data.format", "parquet", "--data.workers", "0", "--data.eval_fraction", "0",
    "--model.embedding_dim", "4", "--model.bottom_mlp", "6", "--model.top_mlp", "5", "--cache.rows", "60",
    "--oracle.lookahead", "3", "--checkpoint.every", "4", "--store.url", "memory://",
]  # fmt: skip


def write_days(folder: Path) -> dict[str, Path]:
    """Two days of clicks, and both in one file."""
    whole = pq.read_table(write_clicks(folder / "clicks.parquet")).slice(0, 2 * DAY)
    for name, first, count in (("day0", 0, DAY), ("day1", DAY, DAY), ("both", 0, 2 * DAY)):
        pq.write_table(whole.slice(first, count), folder / f"{name}.parquet")
    return {name: folder / f"{name}.parquet" for name in ("day0", "day1", "both")}


def run(folder: Path, name: str, data: Path, *flags: str, dies_at: str = "") -> Done:
    """One start of a job with checkpoints in ``folder/name``."""
    paths = ["--data.path", str(data), "--data.schema", str(write_schemas(folder)["sum"])]
    own = ["--checkpoint.dir", str(folder / name), "--result", str(folder / f"{name}.json")]
    return run_forked([*SMALL, *paths, *own, *flags], folder, {"BAGPIPE_CRASH_AT": dies_at} if dies_at else {})


def result(folder: Path, name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return value


def digests(folder: Path, name: str) -> tuple[str, str]:
    value = result(folder, name)
    return value["dense_digest"], value["embedding_digest"]


STAGES = ("--pipeline.stages", "2", "--pipeline.microbatches", "2")

SETTINGS = {
    "adagrad": [],
    "adam, schedule, averages": [
        "--optim.rows", "adam", "--optim.rows_lr", "0.01", "--optim.dense", "adam", "--optim.dense_lr", "0.01",
        "--optim.schedule", "cosine", "--optim.schedule_length", "30", "--optim.warmup_steps", "14",
        "--optim.ema_decay", "0.9",
    ],
    "half rows, momentum, dropout, loss scale": [
        "--optim.rows", "rowwise_adagrad", "--optim.dense", "sgd", "--optim.momentum", "0.9",
        "--cache.dtype", "bfloat16", "--model.name", "finalmlp", "--model.dropout", "0.2", "--model.batch_norm", "true",
        "--run.nonfinite", "skip", "--run.autocast", "bfloat16", "--run.loss_scale", "4096",
        "--run.loss_scale_growth_interval", "7",
    ],
    "K-FAC": ["--optim.precondition", "kfac", "--optim.kfac_inverse_every", "4", "--optim.kfac_factor_every", "3"],
    "K-FAC in stages, inverses late": [
        "--optim.precondition", "kfac", "--optim.kfac_lag", "1", "--optim.kfac_inverse_every", "3",
        "--pipeline.schedule", "gpipe", *STAGES,
    ],
    "partial backwards": ["--pipeline.schedule", "gpipe", *STAGES, "--pipeline.backward_shares", "0.5,1,1"],
    "dropout in stages": [
        "--pipeline.schedule", "1f1b", *STAGES, "--model.name", "finalmlp", "--model.dropout", "0.2",
    ],
    "versions of weights, rows behind": [
        "--pipeline.schedule", "pipedream", *STAGES, "--pipeline.rows_delay", "1", "--cache.rows", "120",
        "--optim.ema_decay", "0.9",
    ],
    "predicted weights": ["--pipeline.schedule", "pipeoptim", *STAGES, "--optim.dense", "adam"],
    "a plateau": [
        "--optim.schedule", "plateau", "--optim.schedule_patience", "0", "--optim.schedule_factor", "0.5",
        "--eval.every", "5",
    ],
}  # fmt: skip
#: The others stand for the kinds.
SLOW = ("K-FAC", "dropout in stages", "predicted weights")


@pytest.mark.parametrize(
    "settings", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SETTINGS]
)
def test_two_days_are_one_job_over_both(tmp_path: Path, settings: str) -> None:
    """Bit for bit, also when the second day is killed and resumed."""
    flags, days = list(SETTINGS[settings]), write_days(tmp_path)
    if "--eval.every" in flags:
        flags += ["--data.eval_path", str(days["day0"])]
    for name, more in (("both", []), ("day0", [])):
        done = run(tmp_path, name, days[name], *flags, *more)
        assert (done.code, done.err) == (0, "")
    start = ["--checkpoint.start_from", str(tmp_path / "day0")]
    done = run(tmp_path, "day1", days["day1"], *flags, *start, dies_at="after-checkpoint-data:2")
    assert done.code not in (0, 2), done.err
    done = run(tmp_path, "day1", days["day1"], *flags, *start)
    assert done.code == 0, done.err
    assert "starts from" not in done.err
    assert digests(tmp_path, "day1") == digests(tmp_path, "both")
    assert result(tmp_path, "day1")["steps"] == DAY // BATCH
    assert result(tmp_path, "day1")["resumed_from"] is not None
    source = f"the checkpoint of step {DAY // BATCH} in {tmp_path / 'day0'}"
    assert result(tmp_path, "day1")["started_from"]["source"] == source


USES = ["--data.min_uses", "3", "--data.min_uses_by_table", "topic=1"]
AGES = ["--data.expire_after", "4", "--data.expire_unit", "steps", "--data.expire_every", "3"]


@pytest.mark.parametrize("flags", [USES, AGES, pytest.param([*USES, *AGES], marks=pytest.mark.slow)])
def test_rows_that_are_there_are_admitted_and_as_old_as_the_day(tmp_path: Path, flags: list[str]) -> None:
    """With a cache, killed and resumed, or with none: the same rows, which are those of the log."""
    days = write_days(tmp_path)
    assert run(tmp_path, "day0", days["day0"], *flags).code == 0
    start = [*flags, "--checkpoint.start_from", str(tmp_path / "day0"), "--checkpoint.keep", "1"]
    assert run(tmp_path, "direct", days["day1"], *start, "--cache.rows", "0").code == 0
    assert run(tmp_path, "day1", days["day1"], *start, dies_at="after-commit:2").code not in (0, 2)
    done = run(tmp_path, "day1", days["day1"], *start)
    assert done.code == 0, done.err
    assert result(tmp_path, "day1")["resumed_from"] > 0
    assert digests(tmp_path, "day1") == digests(tmp_path, "direct")
    items = {item["name"]: item["fate"] for item in result(tmp_path, "day1")["started_from"]["items"]}
    assert [items.get(name) for name in ("uses", "ages")] == ["new" if f in flags else None for f in (USES[0], AGES[0])]
    before, after = rows_of(tmp_path / "day0"), rows_of(tmp_path / "day1")
    assert after == rows_by_the_log(days["day1"], tmp_path, before, flags)
    assert before - after if AGES[0] in flags else before < after


def rows_of(folder: Path) -> set[tuple[str, int]]:
    """The rows of the newest checkpoint."""
    found = CheckpointFolder(folder).newest(pytest.fail)
    assert found is not None
    schema = RowSchema.from_json(found.manifest.row_schema)
    rows = CheckpointRows(found.folder, found.manifest, schema)
    return {(table.name, i) for number, table in enumerate(schema.tables) for i in rows.ids(number).tolist()}


def rows_by_the_log(data: Path, folder: Path, before: set[tuple[str, int]], flags: list[str]) -> set[tuple[str, int]]:
    """The rows after a day, batch by batch and use by use."""
    arguments = [*SMALL, "--data.path", str(data), "--data.schema", str(write_schemas(folder)["sum"])]
    arguments += ["--checkpoint.dir", str(folder)]
    config = parse_config(arguments, "trainer", ()).config
    uses = Counter[tuple[str, int]]()
    last = dict.fromkeys(before, -1)
    with open_loader(config.data, seed=config.run.seed) as loader:
        names = [feature.table for feature in loader.source.schema.features]
        for batch in loader:
            if AGES[0] in flags and batch.index % 3 == 0:
                # Row -1 is as old as batch 0, and used before it.
                old = {row for row, b in last.items() if batch.index - max(b, 0) > 4 and batch.index - b >= LEAST_GAP}
                kept = {row for row in old if row[1] == UNBOUNDED_DEFAULT_ID}
                last = {row: b for row, b in last.items() if row not in old - kept}
                uses = Counter({row: n for row, n in uses.items() if row not in old})
                before = before - (old - kept)
            offsets = batch.feature_offsets().tolist()
            used = [
                (name, i) for n, name in enumerate(names) for i in batch.values[offsets[n] : offsets[n + 1]].tolist()
            ]
            uses.update(used)
            least = {name: 3 if USES[0] in flags and name != "topic" else 1 for name in names}
            admitted = {row for row in used if row in before or row in last or uses[row] >= least[row[0]]}
            rare = {(name, UNBOUNDED_DEFAULT_ID) for name, _ in set(used) - admitted}
            last |= dict.fromkeys(admitted | rare, batch.index)
    return set(last)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of day 0."""
    folder = tmp_path_factory.mktemp("trained")
    days = write_days(folder)
    done = run(folder, "day0", days["day0"])
    assert (done.code, done.err) == (0, "")
    return folder


def test_another_optimizer_and_model_take_what_fits(trained: Path) -> None:
    flags = [
        "--optim.rows", "adam", "--optim.dense", "adam", "--optim.ema_decay", "0.5", "--run.seed", "3",
        "--model.top_mlp", "7", "--checkpoint.start_without", "dense.over_arch.*", "--cache.dtype", "float16",
        "--checkpoint.start_from", f"{trained / 'day0'}@8",
    ]  # fmt: skip
    data = trained / "day1.parquet"
    done = run(trained, "other", data, *flags)
    assert done.code == 0, done.err
    items = {
        f"{item['kind']}.{item['name']}": (item["fate"], item.get("state", ""))
        for item in result(trained, "other")["started_from"]["items"]
    }
    assert items["rows.user"] == items["rows.items"] == ("taken", "adagrad: dropped, adam: new")
    dense = {name: fate for name, fate in items.items() if name.startswith("dense.")}
    assert {name for name, fate in dense.items() if fate == ("new", "new")} == {
        name for name in dense if name.startswith("dense.over_arch.")
    }
    assert {fate for name, fate in dense.items() if not name.startswith("dense.over_arch.")} == {
        ("taken", "adagrad: dropped, adam: new"), ("taken", ""),
    }  # fmt: skip
    jobs = {name: fate for name, (fate, _) in items.items() if name.startswith("job.")}
    assert jobs == {
        "job.average": "new", "job.schedule": "taken", "job.random": "new", "job.unseen rows": "new",
        "job.totals": "new", "job.data": "new",
    }  # fmt: skip
    assert f"this job starts from the checkpoint of step 8 in {trained / 'day0'} and takes:" in done.err
    assert "rows.user" in done.err


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_an_exported_model_is_taken_without_optimizer_state(trained: Path, form: str) -> None:
    out = trained / form
    export(["--checkpoint.dir", str(trained / "day0"), "--out", str(out), "--format", form])
    flags = ["--run.steps", "1", "--checkpoint.every", "0", "--checkpoint.start_from", str(out)]
    done = run(trained, f"from_{form}", trained / "day1.parquet", *flags)
    assert done.code == 0, done.err
    items = result(trained, f"from_{form}")["started_from"]["items"]
    # A buffer that is not in the state dict is the model's own.
    assert {item["fate"] for item in items if "state" in item} == {"taken"}
    theirs, ours = (CheckpointFolder(trained / name) for name in ("day0", f"from_{form}"))
    before, first = theirs.newest(pytest.fail), ours.at(0, pytest.fail)
    assert before is not None
    schema = RowSchema.from_json(first.manifest.row_schema)
    rows, taken = (CheckpointRows(at.folder, at.manifest, schema) for at in (before, first))
    for number, table in enumerate(schema.tables):
        ids = rows.ids(number)
        found = taken.read(number, ids).rows
        assert (found[:, : table.dim] == rows.read(number, ids).rows[:, : table.dim]).all()
        assert not found[:, table.dim :].any()
    dense, dense_taken = (load(at.folder, at.manifest.parts[0].dense).tensors for at in (before, first))
    for name, value in dense.items():
        if name.removeprefix("model.") in {item["name"] for item in items if "state" in item}:
            assert (dense_taken[name] == value).all(), name


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--model.embedding_dim", "6", "--model.bottom_mlp", "6"],
            r"does not fit this job: rows\.user: rows of 4 weights there, of 6 here \(\d+ such things, see above\)",
        ),
        (["--model.top_mlp", "7"], r"does not fit this job: dense\.over_arch\.\S+: float32 \[5, "),
        (
            ["--checkpoint.start_without", "rows.*,dense.*"],
            r"has nothing that fits this job: expected tables \['user', 'items', 'topic'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(trained: Path, flags: list[str], line: str) -> None:
    data = trained / "day1.parquet"
    done = run(trained, "refused", data, *flags, "--checkpoint.start_from", str(trained / "day0"))
    assert done.code == 2
    *table, error = done.err.splitlines()
    assert re.match(rf"error: checkpoint\.start_from {trained / 'day0'} {line}", error), error
    assert table[0].startswith("note: this job starts from")
    assert sum(text.startswith("  rows.") for text in table) == 3  # one line a table
    assert not (trained / "refused").exists()
