"""`trainer eval` and `trainer predict`: the scores of the job that made the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

from bagpipe.config.rules import check_config
from bagpipe.config.sections import Config, DataConfig
from bagpipe.errors import InputError
from bagpipe.store.server.embedded import EmbeddedServer
from tests.system.programs import run_forked
from tests.system.resumed import JOB, Resumed
from trainer.metrics import METRICS, Scores
from trainer.scoring import as_it_is, evaluate

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

TRAINED = ["--data.eval_fraction", "0.2", "--eval.every", "6", "--eval.keep_best", "true", "--optim.ema_decay", "0.9"]
#: Of a program that scores: what describes the data, and the sizes of the cache.
SCORED = [*JOB[: JOB.index("--model.embedding_dim")], "--cache.rows", "500"]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    """A job that has ended, and whose store is gone."""
    folder = tmp_path_factory.mktemp("scored")
    with EmbeddedServer(folder / "server") as server:
        job = Resumed(folder=folder, arguments=["--store.url", server.url, *TRAINED])
        done = job.run()
        assert done.code == 0
    return job


def _score(job: Resumed, command: str, *more: str) -> tuple[int, str]:
    done = run_forked([command, *SCORED, "--checkpoint.dir", str(job.checkpoints), *more], job.folder)
    return done.code, done.err


def test_an_evaluation_alone_has_the_metrics_of_the_job(job: Resumed) -> None:
    trained = json.loads(job.result.read_text())
    out = job.folder / "eval.json"
    assert _score(job, "eval", "--data.eval_fraction", "0.2", "--result", str(out)) == (0, "")
    found = json.loads(out.read_text())
    assert found["step"] == trained["steps"]
    assert {name: found[name] for name in METRICS} == {name: trained[name] for name in METRICS}
    best = ["--checkpoint.resume", "best"]
    assert _score(job, "eval", "--data.eval_fraction", "0.2", "--result", str(out), *best) == (0, "")
    found = json.loads(out.read_text())
    (at_best,) = [item for item in trained["evaluations"] if item["step"] == trained["best_step"]]
    assert found["step"] == trained["best_step"]
    assert {name: found[name] for name in METRICS} == {name: at_best[name] for name in METRICS}


def test_averaged_weights_are_scored_on_request(tmp_path: Path) -> None:
    """They have the metrics of a job that evaluates with its averages."""
    with EmbeddedServer(tmp_path / "server") as server:
        averaged = Resumed(
            folder=tmp_path, arguments=["--store.url", server.url, *TRAINED, "--optim.ema_evaluate", "true"]
        )
        assert averaged.run().code == 0
    trained = json.loads(averaged.result.read_text())
    found = {}
    for averages in ("false", "true"):
        out = tmp_path / f"{averages}.json"
        flags = ["--optim.ema_decay", "0.9", "--optim.ema_evaluate", averages]
        assert _score(averaged, "eval", "--data.eval_fraction", "0.2", "--result", str(out), *flags) == (0, "")
        found[averages] = json.loads(out.read_text())
    assert {name: found["true"][name] for name in METRICS} == {name: trained[name] for name in METRICS}
    assert found["false"]["logloss"] != found["true"]["logloss"]


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_predictions_are_those_of_the_evaluation_in_the_order_of_the_data(suffix: str, job: Resumed) -> None:
    trained = json.loads(job.result.read_text())
    out = job.folder / os.fsdecode(b"scores\xe9%b" % suffix.encode())  # names of files need not be UTF-8
    assert _score(job, "predict", "--out", str(out)) == (0, "")
    with out.open("rb") as file:
        table = (pyarrow.parquet.read_table if suffix == ".parquet" else pyarrow.csv.read_csv)(file)
    assert table["example"].to_pylist() == list(range(3_000))
    held_out = table.slice(2_400)
    scores = Scores(logits=held_out["logit"].to_numpy(), labels=held_out["label"].to_numpy().astype(np.float64))
    assert METRICS["auc"].compute(scores) == trained["auc"]
    assert METRICS["logloss"].compute(scores) == pytest.approx(trained["logloss"], rel=1e-12)
    np.testing.assert_allclose(table["score"].to_numpy(), 1 / (1 + np.exp(-table["logit"].to_numpy())), rtol=1e-12)
    assert not [path.name for path in job.folder.iterdir() if path.name.endswith(".partial")]


@pytest.mark.parametrize(
    ("command", "more", "line"),
    [
        ("predict", [], "predict needs --out, the file of the scores, got none"),
        ("predict", ["--out", "scores.txt"], "--out must end with one of .parquet, .csv, got scores.txt"),
        ("eval", ["--checkpoint.resume", "7"], "has no whole checkpoint of step 7"),
        ("eval", ["--checkpoint.resume", "never"], "checkpoint.resume must be auto, best or a step number here"),
        ("eval", ["--data.schema", ""], "the data differs from that of the checkpoint: "),
    ],
)
def test_what_cannot_be_scored_gets_one_line(command: str, more: list[str], line: str, job: Resumed) -> None:
    code, err = _score(job, command, *more)
    assert code == 2
    assert err.startswith("error: ")
    assert line in err
    assert err.count("\n") == 1


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    done = run_forked(["eval", *SCORED, "--checkpoint.dir", str(tmp_path)], tmp_path)
    assert (done.code, done.error_line) == (2, f"error: checkpoint.dir {tmp_path} has no checkpoint of trained weights")


def test_a_topic_is_not_scored(tmp_path: Path) -> None:
    topic = ["--data.path", "kafka://host:9092/clicks", "--data.format", "criteo-tsv", "--data.eval_fraction", "0"]
    with pytest.raises(InputError, match="kafka://host:9092/clicks: a topic is for training: expected the files of"):
        evaluate([*topic, "--checkpoint.dir", str(tmp_path)])


def test_the_data_of_a_stream_is_scored_as_it_is() -> None:
    """The cacher that scoring starts checks the keys anew."""
    stream = DataConfig(
        path="days",
        format="criteo-tsv",
        eval_fraction=0.0,
        follow="age",
        follow_age_s=0.0,
        stream_wait_s=0.5,
        stream_idle_s=5.0,
        until="2026-11-26",
    )
    check_config(Config(data=stream))
    data = as_it_is(stream)
    check_config(Config(data=data))
    assert not data.is_stream
