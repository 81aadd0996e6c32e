"""Logs of every format and shape are read back with all their examples; malformed rows are counted."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from bagpipe.types.batch import Batch
from data.loader import open_loader
from tests.harness.fuzz.log import Column, Log, examples
from tests.harness.fuzz.log_drawing import draw_log
from tests.harness.fuzz.log_files import NAMED_COLUMNS, SHAPES, tables_of, write_log
from tests.harness.fuzz.space import config_of


def read(log: Log, folder: Path) -> tuple[list[Batch], int]:
    settings = {"data.batch_size": "16", "data.eval_fraction": "0", "data.bad_rows": "skip", "data.workers": "0"}
    config = config_of({**write_log(log, folder), **settings})
    with open_loader(config.data, seed=0, phase="train") as loader:
        return list(loader), loader.skipped_rows()


#: What a job tells a log: many examples, bad rows and extreme values among them.
SETTINGS = {"data.batch_size": "16", "data.epochs": "1", "data.bad_rows": "skip", "run.nonfinite": "skip"}
MODELS = (
    {"model.name": "dlrm"},
    {"model.name": "wide-deep"},
    {"model.name": "dlrm", "model.factory": "tests.system.factory:build"},
    {"model.name": "dlrm", "model.factory": "tests.system.staged_models:sequences"},
)


def first_log(form: str, shape: str) -> Log:
    """The first log drawn in that form and shape."""
    logs = (draw_log(Random(number), SETTINGS, MODELS[number % len(MODELS)]) for number in range(2000))
    return next(log for log in logs if (log.format, log.shape) == (form, shape))


@pytest.mark.parametrize(("form", "shape"), [(form, shape) for form in SHAPES for shape in SHAPES[form]])
def test_every_example_is_read(form: str, shape: str, tmp_path: Path) -> None:
    log = first_log(form, shape)
    batches, skipped = read(log, tmp_path)
    assert sum(batch.num_examples for batch in batches) == log.num_examples
    assert skipped == (0 if form == "synthetic" else log.num_bad)


@pytest.mark.parametrize("form", NAMED_COLUMNS)
def test_values_arrive_unchanged(form: str, tmp_path: Path) -> None:
    columns = (Column(name="a", table="a", law="distinct"), Column(name="b", table="b", bag="long", weighted=True))
    log = Log(
        format=form, shape="folder", seed=5, num_examples=40, num_bad=3, columns=columns, tables=tables_of(columns)
    )
    values = examples(log)
    batches, skipped = read(log, tmp_path)
    assert skipped == 3
    np.testing.assert_array_equal(np.concatenate([batch.labels for batch in batches]), values.labels)
    np.testing.assert_array_equal(np.concatenate([batch.dense for batch in batches]), values.dense)
    found = [batch.values[: batch.lengths[0].sum()].tolist() for batch in batches]
    assert [word for ids in found for word in ids] == [word for bag in values.bags["a"] for word in bag]


def test_ids_follow_their_laws() -> None:
    columns = tuple(
        Column(name=law, table=law, law=law, missing=0.0) for law in ("distinct", "equal", "hot", "uniform")
    )
    log = Log(format="parquet", shape="file", seed=1, num_examples=300, columns=columns, tables=tables_of(columns))
    ids = {name: [bag[0] for bag in bags] for name, bags in examples(log).bags.items()}
    assert len(set(ids["distinct"])) == 300
    assert len(set(ids["equal"])) == 1
    assert 1 < len(set(ids["hot"])) <= 40
    assert {-(2**63), -1, 2**63 - 1} <= set(ids["distinct"])
    assert examples(log).labels.tolist() == examples(log).labels.tolist()
