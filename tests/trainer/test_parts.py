"""The trainer's parts one by one; whole jobs are in tests/system."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from bagpipe.batch import Batch
from bagpipe.config import Config, ModelConfig, OptimConfig, PipelineConfig, RunConfig
from bagpipe.embedding import convert
from bagpipe.errors import InputError
from bagpipe.progress import Progress
from bagpipe.schema import DataSchema, Feature, Table
from trainer.inputs import InputMaker
from trainer.job import check_supported
from trainer.metrics import BinaryMetrics
from trainer.models import MODELS, build_model
from trainer.optimizers import dense_optimizer
from trainer.progress import ProgressReporter
from trainer.result import Result, check_folder, check_writable


def schema_of(*dims: int | None, dense: int = 2, weighted: bool = False) -> DataSchema:
    return DataSchema(
        label="y",
        dense=tuple(f"d{n}" for n in range(dense)),
        features=tuple(Feature(name=f"f{n}", table=f"t{n}", weighted=weighted) for n in range(len(dims))),
        tables=tuple(Table(name=f"t{n}", dim=dim, rows=10) for n, dim in enumerate(dims)),
    )


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_built_and_converted(name: str) -> None:
    schema = schema_of(None, None, None)
    converted = convert(build_model(schema, ModelConfig(name=name, embedding_dim=4)), schema)
    assert [table.name for table in converted.row_tables] == ["t0", "t1", "t2"]
    assert {table.dim for table in converted.row_tables} == {5 if name == "wide-deep" else 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ModelConfig(name="gpt"), "model.name must be one of dlrm"),
        (ModelConfig(factory="nothing"), "module:function"),
        (ModelConfig(factory="no_such_module:f"), "no module 'no_such_module'"),
        (ModelConfig(factory="trainer.models:no_such_function"), "no function 'no_such_function'"),
        (ModelConfig(factory="tests.trainer.test_parts:returns_no_module"), "return a module, got int"),
        (ModelConfig(name="wide-deep", top_mlp=()), "model.top_mlp"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(config: ModelConfig, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_model(schema_of(4), config)


def returns_no_module(schema: DataSchema, config: ModelConfig) -> int:
    return 3


def test_models_with_an_interaction_need_one_dimension() -> None:
    with pytest.raises(InputError, match=r"tables of one dimension, the schema has \[4, 8\]"):
        build_model(schema_of(4, 8), ModelConfig(name="dlrm"))
    build_model(schema_of(4, 8), ModelConfig(name="wide-deep"))


def test_inputs_carry_the_batch() -> None:
    batch = Batch(
        index=0,
        dense=np.zeros((2, 0), dtype=np.float32),
        values=np.array([7, 8, 9], dtype=np.int64),
        lengths=np.array([[1, 0], [0, 2]], dtype=np.int32),
        labels=np.array([1, 0], dtype=np.float32),
    )
    maker = InputMaker(schema_of(4, 4, dense=0, weighted=True), torch.device("cpu"), torch.float64)
    inputs = maker(batch)
    assert inputs.dense.tolist() == [[1.0], [1.0]]  # no dense columns: one constant
    assert inputs.dense.dtype == inputs.labels.dtype == torch.float64
    assert inputs.sparse.to_dict()["f1"].to_dense()[1].tolist() == [8, 9]
    assert inputs.sparse.weights().tolist() == [1.0, 1.0, 1.0]


def test_metrics_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=300), (rng.random(300) < 0.2).astype(np.float64)
    metrics = BinaryMetrics()
    for part in np.array_split(np.arange(300), 7):
        metrics.add(torch.from_numpy(logits[part]), torch.from_numpy(labels[part]))
    scores = 1 / (1 + np.exp(-logits))
    rate = labels.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert metrics.auc() == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert metrics.normalised_entropy() == pytest.approx(log_loss(labels, scores) / entropy, rel=1e-12)


@pytest.mark.parametrize("labels", [[0.0, 0.0], [1.0, 1.0], []])
def test_metrics_of_one_class_are_none(labels: list[float]) -> None:
    metrics = BinaryMetrics()
    metrics.add(torch.zeros(len(labels)), torch.tensor(labels))
    assert metrics.auc() is None
    assert metrics.normalised_entropy() is None
    assert BinaryMetrics().auc() is None


@pytest.mark.parametrize(("name", "kind"), [("sgd", "SGD"), ("adagrad", "Adagrad"), ("adam", "Adam")])
def test_dense_optimizers(name: str, kind: str) -> None:
    parameters = torch.nn.Linear(2, 1).parameters()
    optimizer = dense_optimizer(parameters, OptimConfig(dense=name, dense_lr=0.5, eps=1e-3))
    assert type(optimizer).__name__ == kind
    assert optimizer.defaults["lr"] == 0.5
    assert optimizer.defaults.get("eps", 1e-3) == 1e-3


def test_an_unknown_dense_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match=r"optim.dense must be one of sgd"):
        dense_optimizer([], OptimConfig(dense="lion"))


RESULT = Result(
    steps=3, samples=30, seconds=1.5, samples_per_s=20.0, loss=None, auc=0.5, ne=None, rows_unique=9, rows_fetched=1,
    rows_written=4, hit_rate=0.5, exposed_embedding_s=0.1, step_s_p50=None, dense_digest="d", embedding_digest="e",
    peak_rss_bytes=1, skipped_rows=2, stopped=False, continued=True,
)  # fmt: skip


def test_the_result_is_one_json_object(tmp_path: Path) -> None:
    RESULT.write(str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == dataclasses.asdict(RESULT)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_result_says_what_a_person_must_know() -> None:
    text = "\n".join(RESULT.lines())
    assert "AUC 0.50000" in text
    assert "2 malformed rows were skipped" in text
    assert "the namespace was there before" in text


def test_paths_are_checked_before_anything_is_trained(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "out.json"), "--result")
    check_folder(str(tmp_path / "new" / "deeper"), "run.dir")
    with pytest.raises(InputError, match=r"--result: folder .* does not exist"):
        check_writable(str(tmp_path / "gone" / "out.json"), "--result")
    with pytest.raises(InputError, match="--result: cannot write"):
        check_writable(str(tmp_path), "--result")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"run.dir: expected a folder"):
        check_folder(str(tmp_path / "file"), "run.dir")


def test_settings_of_later_versions_are_refused_not_ignored() -> None:
    check_supported(Config())
    with pytest.raises(InputError, match=r"pipeline.schedule"):
        check_supported(Config(pipeline=PipelineConfig(schedule="1f1b")))
    with pytest.raises(InputError, match=r"cache.dtype"):
        check_supported(
            Config(run=RunConfig(dtype="float64"), cache=dataclasses.replace(Config().cache, dtype="float32"))
        )


def test_progress_goes_to_tensorboard(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress(
        steps=1, samples=10, loss_sum=torch.tensor(5.0), rows_unique=4, rows_inserted=1, rows_fetched=1,
        rows_written=0, elapsed_s=2.0, exposed_s=0.5,
    )  # fmt: skip
    with ProgressReporter(str(tmp_path)) as reporter:
        reporter(lambda: progress)
    assert progress.hit_rate == 0.75
    assert [path.name.startswith("events.out.tfevents") for path in tmp_path.iterdir()] == [True]
