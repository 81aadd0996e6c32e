"""Rows that are created at their third use: the store, evaluations, caches and resumed jobs agree about which."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from bagpipe.config.sections import Config
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import UNBOUNDED_DEFAULT_ID
from data.loader import open_loader
from tests.system.jobs import change, run_job
from tests.system.programs import run_forked
from tests.system.resumed import JOB, Resumed, digests

MakeConfig = Callable[..., Config]
USES = ["--data.min_uses", "3", "--data.min_uses_by_table", "C1=1,C6=5"]


def uses_of(config: Config) -> dict[str, Counter[int]]:
    """Uses of every id in the training examples, by table, counted one by one."""
    config = change(config, data__min_uses=1, data__min_uses_by_table=())
    uses: dict[str, Counter[int]] = {}
    with open_loader(config.data, seed=config.run.seed) as loader:
        schema = loader.source.schema
        for batch in loader:
            offsets = batch.feature_offsets()
            for number, feature in enumerate(schema.features):
                ids = batch.values[offsets[number] : offsets[number + 1]].tolist()
                uses.setdefault(feature.table, Counter()).update(ids)
    return uses


@pytest.mark.parametrize("default_row", ["trained", "zero"])
def test_a_row_is_created_at_its_third_use(default_row: Literal["trained", "zero"], clicks: MakeConfig) -> None:
    """`user` and `items` take any id, `topic` has 9 rows, of which one more is the default row."""
    config = change(
        clicks(eval_fraction=0.2),
        data__min_uses=3,
        data__min_uses_by_table=("topic=30",),
        data__default_row=default_row,
    )
    cached, direct = run_job(change(config, cache__rows=300)), run_job(change(config, cache__rows=0))
    assert (cached.dense_digest, cached.embedding_digest) == (direct.dense_digest, direct.embedding_digest)
    assert (cached.auc, cached.ne) == (direct.auc, direct.ne)
    for table, uses in uses_of(config).items():
        least, default = (30, 9) if table == "topic" else (3, UNBOUNDED_DEFAULT_ID)
        expected = {row for row, count in uses.items() if count >= least}
        assert 0 < len(expected) < len(uses)
        expected |= {default} if default_row == "trained" else set()
        assert set(cached.rows[table][0].tolist()) == expected


def test_a_threshold_of_one_changes_nothing(clicks: MakeConfig) -> None:
    config = change(clicks(eval_fraction=0.2), cache__rows=300)
    plain = run_job(config)
    counted = run_job(change(config, data__min_uses=1, data__min_uses_by_table=("items=1",)))
    assert (plain.dense_digest, plain.embedding_digest, plain.auc) == (
        counted.dense_digest,
        counted.embedding_digest,
        counted.auc,
    )
    assert plain.built.rows.digest() == counted.built.rows.digest()


def test_rows_that_were_not_created_score_as_the_default_row(clicks: MakeConfig) -> None:
    """A threshold that no row reaches: one row a table is trained, and all held-out ids read it."""
    config = change(clicks(eval_fraction=0.2), data__min_uses=10_000, cache__rows=300)
    job = run_job(config)
    assert {len(ids) for ids, _ in job.rows.values()} == {1}
    whole = run_job(change(config, data__default_row="zero"))
    assert {len(ids) for ids, _ in whole.rows.values()} == {0}
    assert job.ne != whole.ne
    assert all(ne is not None and np.isfinite(ne) for ne in (job.ne, whole.ne))


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize("sketch", [False, True])
def test_a_killed_job_resumes(sketch: bool, server: EmbeddedServer, tmp_path: Path) -> None:
    uses = [*USES, "--data.use_counts", "sketch", "--data.sketch_cells", "64"] if sketch else USES
    done = run_forked([*JOB, *uses, "--result", str(tmp_path / "uninterrupted.json")], tmp_path)
    assert (done.code, done.err) == (0, "")
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *uses])
    assert job.run(dies_at="after-commit:2").code == -signal.SIGKILL
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == digests(tmp_path / "uninterrupted.json")
    assert job.resumed_from() == 10
    refused = job.run("--data.min_uses", "4")
    assert refused.code == 2
    assert "data.min_uses" in refused.error_line
