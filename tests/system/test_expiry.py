"""Rows that expire: the store, caches, ranks and resumed jobs agree about which, and they begin anew."""

from __future__ import annotations

import itertools
import json
import signal
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.config.load import parse_config
from bagpipe.config.sections import Config
from bagpipe.oracle.lifetimes import LEAST_GAP
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowSchema
from data.formats import open_source
from data.loader import open_loader
from tests.system.jobs import change, run_job
from tests.system.plain_jobs import all_batches, plain_batch, plain_job, plain_tables
from tests.system.programs import run_forked, torchrun
from tests.system.rank_threads import run_ranks
from tests.system.reference import _ROW_OPTIMIZERS, PlainTable, row_state
from tests.system.resumed import JOB, Resumed, digests
from trainer.assembly import build_training_model

MakeConfig = Callable[..., Config]
Row = tuple[str, int]


def mortal(config: Config, limit: float = 6, **values: object) -> Config:
    return change(config, data__expire_after=limit, data__expire_unit="steps", data__expire_every=3, **values)


def log_of(config: Config) -> Iterator[tuple[Batch, set[Row]]]:
    """Each training batch and the rows that it uses, of a job whose rows do not expire."""
    plain = change(config, data__expire_after=0.0, data__expire_unit="examples", data__expire_every=1000)
    with open_loader(plain.data, seed=config.run.seed) as loader:
        features = loader.source.schema.features
        for batch in loader:
            offsets = batch.feature_offsets().tolist()
            yield (
                batch,
                {
                    (feature.table, i)
                    for number, feature in enumerate(features)
                    for i in batch.values[offsets[number] : offsets[number + 1]].tolist()
                },
            )


def walk(config: Config) -> Iterator[tuple[int, set[Row], set[Row]]]:
    """Each batch's number, the rows that begin in it, and those that were deleted before it; one by one."""
    last_use: dict[Row, int] = {}
    for batch, rows in log_of(config):
        now = batch.index
        gone = set()
        if now % config.data.expire_every == 0:
            gone = {
                row
                for row, then in last_use.items()
                if now - then > config.data.expire_after and now - then >= LEAST_GAP
            }
        for row in gone:
            del last_use[row]
        yield now, rows - last_use.keys(), gone
        last_use.update(dict.fromkeys(rows, now))


def live_rows(config: Config) -> tuple[set[Row], int]:
    """The rows that are alive at the end of the job, and how many were deleted."""
    alive: set[Row] = set()
    num_deleted = 0
    for _, born, gone in walk(config):
        alive = (alive - gone) | born
        num_deleted += len(gone)
    return alive, num_deleted


def test_the_store_has_the_live_rows(clicks: MakeConfig) -> None:
    config = mortal(clicks(eval_fraction=0.2))
    alive, num_deleted = live_rows(config)
    assert num_deleted > 50
    jobs = [run_job(change(config, cache__rows=rows)) for rows in (0, 60, 300)]
    assert len({job.digests for job in jobs}) == 1
    assert len({(job.auc, job.ne, job.losses) for job in jobs}) == 1
    for table, (ids, _) in jobs[0].rows.items():
        assert set(ids.tolist()) == {i for name, i in alive if name == table}


class Renewed:
    """Plain tables' row optimizer that gives rows their initial values before the batch in which they begin anew."""

    def __init__(self, optimizer: torch.optim.Optimizer, tables: Sequence[PlainTable], config: Config) -> None:
        self._optimizer = optimizer
        self._tables = tables
        self._births = [born for _, born, _ in walk(config)]
        self._next_batch = 1
        self.num_renewed = 0
        self.state = optimizer.state

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> None:
        self._optimizer.step()
        born = self._births[self._next_batch] if self._next_batch < len(self._births) else set()
        self._next_batch += 1
        (group,) = self._optimizer.param_groups
        for table, weight in zip(self._tables, group["params"], strict=True):
            ids = np.array(sorted(i for name, i in born if name == table.name), dtype=np.int64)
            if not len(ids):
                continue
            places = torch.from_numpy(np.searchsorted(table.ids, ids))
            weight.data[places] = table.weights[places]
            for value in self.state[weight].values():
                if len(value.shape) and len(value) == len(weight):
                    self.num_renewed += int((value[places].reshape(len(places), -1) != 0).any(dim=-1).sum())
                    value[places] = 0


def test_rows_that_begin_anew_equal_those_of_a_plain_loop(clicks: MakeConfig) -> None:
    config = mortal(change(clicks("sum", "dlrm", "adagrad"), cache__rows=60, run__dtype="float64"))
    built = build_training_model(config, open_source(config.data, config.run.seed).schema)
    batches = [plain_batch(batch, built.data) for batch in all_batches(config)]
    tables = plain_tables(built, batches, "float64")
    _, make = _ROW_OPTIMIZERS["adagrad"]
    found: list[Renewed] = []

    def make_rows(parameters: list[nn.Parameter]) -> Any:
        found.append(Renewed(make(parameters, lr=config.optim.rows_lr, eps=config.optim.eps), tables, config))
        return found[0]

    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        plain = plain_job(config, make_rows=make_rows)
    end = run_job(config)
    assert found[0].num_renewed > 20
    np.testing.assert_allclose(end.losses, plain.losses, rtol=1e-12, atol=1e-12)
    alive, _ = live_rows(config)
    for number, table in enumerate(plain.tables.tables):
        ids, records = end.rows[table.name]
        assert set(ids.tolist()) == {i for name, i in alive if name == table.name}
        expected = row_state(plain, "adagrad", number).numpy()[np.searchsorted(table.ids, ids)]
        np.testing.assert_allclose(records, expected, rtol=1e-12, atol=1e-12, err_msg=table.name)


@pytest.mark.parametrize(("world_size", "assign"), [(2, "contiguous"), (3, "locality")])
def test_ranks_agree_on_the_live_rows(world_size: int, assign: str, clicks: MakeConfig) -> None:
    config = mortal(change(clicks(eval_fraction=0.2), cacher__assign=assign), 5)
    alive, num_deleted = live_rows(config)
    assert num_deleted > 50
    jobs = [run_ranks(change(config, cache__rows=rows), world_size) for rows in (0, 40, 200)]
    assert len({job.digests for job in jobs}) == 1
    assert len({job.scores for job in jobs}) == 1
    for table, (ids, _) in jobs[0].rows.items():
        assert set(ids.tolist()) == {i for name, i in alive if name == table}


AGE = ["--data.expire_after", "4", "--data.expire_unit", "steps", "--data.expire_every", "3"]


@pytest.mark.redis
@pytest.mark.multiproc
@pytest.mark.parametrize("dies_at", ["after-commit:2", "mid-write-back:20", "after-manifest:3"])
def test_a_killed_job_resumes(dies_at: str, server: EmbeddedServer, tmp_path: Path) -> None:
    """Killed after a checkpoint, amid a change of the store, and between a manifest and its commit."""
    done = run_forked([*JOB, *AGE, "--result", str(tmp_path / "uninterrupted.json")], tmp_path)
    assert (done.code, done.err) == (0, "")
    deleted = json.loads((tmp_path / "uninterrupted.json").read_text())["rows_deleted"]
    assert deleted > 500
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *AGE])
    assert job.run(dies_at=dies_at).code == -signal.SIGKILL
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == digests(tmp_path / "uninterrupted.json")
    assert job.resumed_from()
    assert 0 < json.loads(job.result.read_text())["rows_deleted"] <= deleted


@pytest.mark.redis
@pytest.mark.multiproc
def test_a_job_that_ends_where_rows_expire_deletes_them_when_it_goes_on(server: EmbeddedServer, tmp_path: Path) -> None:
    """Unless patience ends it, whose next step is planned. Evaluations see what the store has."""
    config = parse_config([*JOB, *AGE], "test").config
    last, alive, before, after = 9, set[Row](), set[Row](), set[Row]()
    for _, born, gone in itertools.islice(walk(config), last + 1):
        before, after = alive, alive - gone
        alive = after | born
    assert len(after) < len(before)
    evaluated, ends = ["--eval.every", "9"], []
    for name, more, rows in (
        ("steps", ["--run.steps", "9"], before),
        ("patience", ["--eval.every", "3", "--eval.patience", "2", "--eval.min_delta", "5"], after),
    ):
        (tmp_path / name).mkdir()
        job = Resumed(folder=tmp_path / name, arguments=["--store.url", server.url, *AGE])
        assert job.run(*evaluated, *more).code == 0
        found = CheckpointFolder(job.checkpoints).at(last, pytest.fail)
        manifest = found.manifest
        stored = CheckpointRows(found.folder, manifest, RowSchema.from_json(manifest.row_schema))
        assert [stored.extent(table)[0] for table in range(6)] == [
            sum(name == table.name for name, _ in rows) for table in stored.schema.tables
        ]
        ends.append(json.loads(job.result.read_text())["evaluations"][-1]["ne"])
        assert job.run(*evaluated).code == 0
        ends.append(digests(job.result))
    assert (ends[0] != ends[2], ends[1]) == (True, ends[3])


@pytest.mark.redis
@pytest.mark.multiproc
def test_another_age_is_other_settings(server: EmbeddedServer, tmp_path: Path) -> None:
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, "--run.steps", "6", *AGE])
    assert job.run().code == 0
    refused = job.run("--data.expire_after", "5")
    assert refused.code == 2
    assert "data.expire_after" in refused.error_line


@pytest.mark.redis
@pytest.mark.multiproc
def test_evaluations_change_nothing_and_forget_rows(server: EmbeddedServer, tmp_path: Path) -> None:
    """One rank keeps rows between evaluations: the last one scores as it does without those before."""
    found = []
    direct, often = ["--cache.rows", "0", "--run.steps", "20"], ["--eval.every", "4", "--run.steps", "20"]
    for number, more in enumerate((direct, often, [*direct, *often])):
        result = tmp_path / f"{number}.json"
        store = ["--store.url", server.url, "--store.namespace", uuid.uuid4().hex]
        done = run_forked([*JOB, *AGE, *store, *more, "--result", str(result)], tmp_path)
        assert (done.code, done.err) == (0, "")
        values = json.loads(result.read_text())
        found.append((*digests(result), values["ne"], values["logloss"]))
    assert len(set(found)) == 1


@pytest.mark.redis
@pytest.mark.multiproc
def test_evaluations_between_steps_see_the_live_rows(server: EmbeddedServer, tmp_path: Path) -> None:
    """Two ranks, with and without a cache; at every third step rows expire, and ids that are scored were written."""
    found = []
    for number, cache in enumerate(("0", "500")):
        result = tmp_path / f"{number}.json"
        more = [
            "--store.url",
            server.url,
            "--store.namespace",
            uuid.uuid4().hex,
            "--cache.rows",
            cache,
            "--eval.every",
            "3",
        ]
        with torchrun([*JOB, *AGE, *more, "--result", str(result)], forked=tmp_path) as program:
            done = program.finish()
        assert done.code == 0, done.err
        values = json.loads(result.read_text())
        found.append((digests(result), [entry["ne"] for entry in values["evaluations"]]))
    assert found[0] == found[1]
    assert len(set(found[0][1])) > 5
