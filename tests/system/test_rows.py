"""`python -m trainer rows`: reports and compactions of a real job, against its own log; jobs that go on from them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.config.load import parse_config
from bagpipe.oracle.lifetimes import LEAST_GAP
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema
from data.formats import open_source
from data.loader import open_loader
from tests.system.programs import Done, run_forked
from tests.system.resumed import SIX_TABLES, Resumed, digests
from tests.system.test_ranks import digests_of, run_to_the_end
from tests.system.test_resume_ranks import config_of, ranks_that_die

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

STEP, LIMIT = 15, 6
Row = tuple[str, int]


@pytest.fixture
def job(server: EmbeddedServer, tmp_path: Path) -> Resumed:
    """A job that has stopped after `STEP` batches."""
    job = timed_job(server, tmp_path)
    assert job.run("--run.steps", str(STEP)).code == 0
    return job


def timed_job(server: EmbeddedServer, folder: Path, *more: str) -> Resumed:
    """A job whose examples have times, which it does not read."""
    schema = folder / "timed.toml"
    schema.write_text(f'time = "when"\n{Path(SIX_TABLES).read_text()}')
    return Resumed(folder=folder, arguments=["--store.url", server.url, "--data.schema", str(schema), *more])


def rows(job: Resumed, *words: str, dies_at: str = "") -> Done:
    """Run ``trainer rows`` with the job's settings."""
    command, *flags = words
    environment = {"BAGPIPE_CRASH_AT": dies_at} if dies_at else {}
    return run_forked(["rows", command, *job.settings(*flags)], job.folder, environment)


def last_uses(job: Resumed, steps: int = STEP) -> tuple[dict[Row, int], list[int], list[float]]:
    """Found one by one: the last batch that used each row before the checkpoint; of each batch the examples before it,
    and the latest time of an example so far, in days.
    """
    config = parse_config(job.settings(), "test").config
    found: dict[Row, int] = {}
    examples, days = [0], [0.0]
    source = open_source(config.data, config.run.seed, wants_times=True)
    with open_loader(config.data, seed=config.run.seed, source=source) as loader:
        features = loader.source.schema.features
        for batch, _ in zip(loader, range(steps), strict=False):
            offsets = batch.feature_offsets().tolist()
            for number, feature in enumerate(features):
                for one in batch.values[offsets[number] : offsets[number + 1]].tolist():
                    found[feature.table, one] = batch.index
            examples.append(examples[-1] + batch.num_examples)
            assert batch.times_s is not None
            days.append(max(days[-1], int(batch.times_s.max()) / 86_400))
    return found, examples, days[1:]


def newest(job: Resumed) -> tuple[Checkpoint, CheckpointRows]:
    checkpoint = CheckpointFolder(job.checkpoints).newest(pytest.fail)
    assert checkpoint is not None
    schema = RowSchema.from_json(checkpoint.manifest.row_schema)
    return checkpoint, CheckpointRows(checkpoint.folder, checkpoint.manifest, schema)


def staying_of(last: dict[Row, int], steps: int = STEP) -> set[Row]:
    """Rows that a compaction with `LIMIT` keeps."""
    return {row for row, then in last.items() if steps - then <= LIMIT or steps - then < LEAST_GAP}


def names_of(found: CheckpointRows) -> set[Row]:
    return {(table.name, one) for number, table in enumerate(found.schema.tables) for one in found.ids(number).tolist()}


def test_a_report_counts_rows_by_table_and_age(job: Resumed) -> None:
    last, examples, days = last_uses(job)
    out = job.folder / "report.json"
    done = rows(job, "report", "--ages", "1500,250", "--json", str(out))
    assert (done.code, done.err) == (0, "")
    report = json.loads(out.read_text())
    assert report["ages"] == {"unit": "examples", "now": examples[-1], "limits": [250.0, 1500.0]}
    assert report["checkpoint"]["agrees"]
    assert report["checkpoint"]["buckets"] == report["store"]["buckets"] == report["store"]["logs"] == 8
    assert (report["checkpoint"]["step"], report["store"]["leftover_logs"]) == (STEP, 0)
    for table in report["tables"]:
        ages = np.array([examples[-1] - examples[then] for (name, _), then in last.items() if name == table["name"]])
        assert table["rows"] == table["checkpoint_rows"] == len(ages)
        assert table["record_bytes"] == len(ages) * 32 < table["server_bytes"]
        assert table["older"] == [np.count_nonzero(ages > 250), np.count_nonzero(ages > 1500)]
    lines = done.out.splitlines()
    assert lines[0].startswith(f"store.namespace '{job.namespace}', 8 buckets, rows of job ")
    assert "the store has as many rows, 8 of 8 buckets are at it" in lines[2]
    assert lines[-1].split()[:2] == ["all", f"{len(last):,}"]
    done = rows(job, "report", "--ages", "0.01", "--unit", "days", "--json", str(out))
    assert (done.code, done.err) == (0, "")
    older = sum(days[-1] - days[then] > 0.01 for then in last.values())
    assert 0 < older < len(last)
    report = json.loads(out.read_text())
    assert (report["ages"]["now"], sum(table["older"][0] for table in report["tables"])) == (days[-1], older)
    done = rows(job, "report", "--ages", "250", "--json", str(out), "--checkpoint.resume", "10")
    assert (done.code, done.err) == (0, "")
    report = json.loads(out.read_text())
    assert (report["checkpoint"]["step"], report["ages"]["now"]) == (10, examples[10])
    assert (report["checkpoint"]["agrees"], report["checkpoint"]["buckets"]) == (False, 0)
    store_alone = run_forked(["rows", "report", *job.arguments, "--store.namespace", job.namespace], job.folder)
    assert (store_alone.code, store_alone.out.splitlines()[-1].split()[1]) == (0, f"{len(last):,}")


def test_a_job_goes_on_without_the_rows_that_a_compaction_left_out(job: Resumed, server: EmbeddedServer) -> None:
    last, _, _ = last_uses(job)
    staying = staying_of(last)
    assert 500 < len(staying) < len(last) - 500
    before, _ = newest(job)
    flags = ["compact", "--expire-after", str(LIMIT), "--unit", "steps"]
    dry = rows(job, *flags, "--dry-run")
    assert (dry.code, dry.err) == (0, "")
    assert f"all: {len(last) - len(staying):,} of {len(last):,} rows are older" in dry.out
    assert rows(job, *flags, dies_at="before-manifest").code == -signal.SIGKILL
    assert newest(job)[0] == before
    done = rows(job, *flags)
    assert (done.code, done.err) == (0, "")
    compacted, found = newest(job)
    assert (compacted.manifest.step, names_of(found)) == (STEP, staying)
    copy = dataclasses.replace(job, folder=job.folder / "copy", namespace=f"{job.namespace}-copy")
    shutil.copytree(job.checkpoints, copy.checkpoints)
    # Killed as soon as the store has the checkpoint's rows: those, and no others.
    assert job.run(dies_at="after-begin").code == -signal.SIGKILL
    with RedisStore(server.url, schema=found.schema, namespace=job.namespace, num_buckets=8) as store:
        for table in range(len(found.schema.tables)):
            ids = store.ids(table)
            assert ids.tolist() == found.ids(table).tolist()
            assert store.read(table, ids).rows.tobytes() == found.read(table, ids).rows.tobytes()
    for each in (job, copy):
        assert each.run().code == 0
        assert each.resumed_from() == STEP
    assert digests(job.result) == digests(copy.result)
    _, found = newest(job)
    assert names_of(found) > staying  # some begin anew
    assert json.loads(job.result.read_text())["steps"] > STEP


def test_a_job_of_two_ranks_goes_on_without_them(server: EmbeddedServer, tmp_path: Path) -> None:
    """A killed one: rows of its newest checkpoint were newer in caches than in the store, which has later ones, too."""
    job = timed_job(server, tmp_path, "--cacher.assign", "locality")
    ranks_that_die(job.settings(), "after-checkpoint-data:3")
    before, rows_before = newest(job)
    steps = before.manifest.step
    last, _, _ = last_uses(job, steps)
    assert (before.manifest.world_size, names_of(rows_before)) == (2, set(last))
    done = rows(job, "compact", "--expire-after", str(LIMIT), "--unit", "steps")
    assert (done.code, done.err) == (0, "")
    _, found = newest(job)
    assert names_of(found) == staying_of(last, steps) < set(last)
    for table in range(len(found.schema.tables)):
        ids = found.ids(table)
        assert found.read(table, ids).rows.tobytes() == rows_before.read(table, ids).rows.tobytes()
    copy = dataclasses.replace(job, folder=tmp_path / "copy", namespace=f"{job.namespace}-copy")
    shutil.copytree(job.checkpoints, copy.checkpoints)
    ours = run_to_the_end(config_of(job.settings()), 2)
    direct = run_to_the_end(config_of(copy.settings("--cache.rows", "0")), 2)
    assert digests_of(ours) == digests_of(direct)
    assert (ours[0]["resumed_from"], ours[0]["steps"]) == (steps, 22)


def test_data_and_jobs_that_cannot_be_followed_are_refused(job: Resumed) -> None:
    cases = {
        ("--data.batch_size", "64"): "was made with data.batch_size 128, this command has 64: expected the job's",
        ("--data.expire_after", "9"): "rows compact is for jobs without data.expire_after",
        ("--data.min_uses", "2"): "rows compact is for jobs without data.min_uses",
        ("--table", "C9=4"): "--table names table 'C9', the checkpoint has C1, C2",
        ("--checkpoint.resume", "10"): "takes the newest checkpoint: checkpoint.resume must be auto, got 10",
    }
    changed = job.folder / "six_tables.toml"
    changed.write_text((job.folder / "timed.toml").read_text() + "# edited\n")
    cases["--data.schema", str(changed)] = "the checkpoint at step 15 was made with other data: "
    before, _ = newest(job)
    for flags, line in cases.items():
        done = rows(job, "compact", "--expire-after", "3", *flags)
        assert (done.code, line in done.error_line) == (2, True), done.err
    assert newest(job)[0] == before
    assert len(list(job.checkpoints.iterdir())) == 1
