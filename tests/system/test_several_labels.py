"""Jobs with several labels and weights of examples: equal to a plain loop, to direct mode, on ranks, in stages."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from bagpipe.config.sections import Config, DataConfig
from bagpipe.errors import InputError
from bagpipe.store.server.embedded import EmbeddedServer
from data.columnar_writer import write_columnar
from data.formats import open_source
from data.loader import LookaheadLoader
from data.testing import read_all
from tests.system.jobs import change, largest_batch, run_job
from tests.system.plain_jobs import plain_job
from tests.system.programs import run_forked
from tests.system.resumed import JOB, Resumed, digests
from tests.system.staging import assert_equal_numbers, run_staged, staged
from tests.system.test_exactness import MakeConfig
from tests.system.test_optim_settings import check_ranks
from tests.system.test_plain_loop import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, that they are neither on nor off

WEIGHTS = (1.0, 0.25)


def plain_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Of two labels and weights: the mean over the examples."""
    total = torch.zeros((), dtype=torch.float64)
    for logit, target in zip(logits, targets, strict=True):
        for head, factor in enumerate(WEIGHTS):
            p, y = torch.sigmoid(logit[head]), target[head]
            total = total - factor * target[2] * (y * torch.log(p) + (1 - y) * torch.log(1 - p))
    return total / len(logits)


def job_of(clicks: MakeConfig, model: str, **data: Any) -> Config:
    keys = {"model__experts": 1} if model in ("mmoe", "ple") else {}
    return change(clicks("tasks", model, **data), run__dtype="float64", model__loss_weights=WEIGHTS, **keys)


@pytest.mark.parametrize("model", ["mmoe", "ple", "esmm"])
def test_losses_of_heads_equal_a_plain_loop(model: str, clicks: MakeConfig) -> None:
    """A cache changes no bit; two ranks, whose shares of the last batch differ, change the order of sums only."""
    config = job_of(clicks, model, limit=101)
    direct = run_job(change(config, cache__rows=0))
    assert_same(direct, plain_job(config, loss_of=plain_loss), config)
    cached = run_job(change(config, cache__rows=largest_batch(config), oracle__lookahead=8))
    assert (cached.digests, cached.losses) == (direct.digests, direct.losses)
    check_ranks(change(config, cache__rows=150), direct)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("model", ["mmoe", "esmm"])
def test_stages_have_the_same_loss(model: str, world_size: int, clicks: MakeConfig) -> None:
    config = job_of(clicks, model, limit=60)
    if world_size == 1:
        config = change(config, pipeline__microbatches=3)
        assert_equal_numbers(run_staged(config), run_staged(change(config, pipeline__microbatches=1)))
    else:
        assert_equal_numbers(run_staged(staged(config, "1f1b", 2), 2), run_staged(config))


#: Flags of a job with two labels and weights on synthetic data.
TASKS = ["--model.name=mmoe", "--model.experts=2", "--model.loss_weights=1,0.5", "--model.dropout=0.1"]


def tasks_job(folder: Path) -> list[str]:
    schema = folder / "tasks.toml"
    schema.write_text(
        'label = ["click", "buy"]\nexample_weight = "w"\n[synthetic]\nrows = 3000\ntables = 3\nlabel_rate = 0.4\n'
    )
    return ["--data.schema", str(schema), *TASKS]


@pytest.mark.redis
@pytest.mark.multiproc
def test_a_killed_job_resumes_and_scores_each_label(server: EmbeddedServer, tmp_path: Path) -> None:
    flags = [*tasks_job(tmp_path), "--data.eval_fraction=0.2", "--eval.every=6", "--eval.metric=auc@buy"]
    whole = tmp_path / "uninterrupted.json"
    done = run_forked([*JOB, *flags, "--result", str(whole)], tmp_path)
    assert (done.code, done.err) == (0, "")
    job = Resumed(folder=tmp_path, arguments=["--store.url", server.url, *flags])
    assert job.run(dies_at="after-commit:2").code == -signal.SIGKILL
    done = job.run()
    assert (done.code, done.err) == (0, "")
    assert digests(job.result) == digests(whole)
    results = [json.loads(path.read_text()) for path in (whole, job.result)]
    assert results[0]["tasks"] == results[1]["tasks"]
    assert results[0]["evaluations"] == results[1]["evaluations"]
    result = results[1]
    assert list(result["tasks"]) == ["click", "buy"]
    assert result["auc"] == result["tasks"]["click"]["auc"]
    assert result["evaluations"][0]["auc@buy"] is not None
    values = {item["step"]: item["auc@buy"] for item in result["evaluations"]}
    assert result["best_step"] == max(values, key=lambda step: values[step])
    check_predictions(job, result)


def check_predictions(job: Resumed, result: dict[str, Any]) -> None:
    """Scores of each label are those of the evaluation, and those of the same examples without labels and weights."""
    source = open_source(DataConfig(schema=str(job.folder / "tasks.toml")))
    batches = read_all(LookaheadLoader(source, batch_size=3_000))
    weights = np.concatenate([batch.example_weights for batch in batches if batch.example_weights is not None])
    write_columnar(source, str(job.folder / "whole.parquet"))
    whole = pyarrow.parquet.read_table(job.folder / "whole.parquet")
    pyarrow.parquet.write_table(whole.drop_columns(["click", "buy", "w"]), job.folder / "unlabelled.parquet")
    flags = [
        *JOB[: JOB.index("--model.embedding_dim")],
        "--cache.rows",
        "500",
        "--checkpoint.dir",
        str(job.checkpoints),
    ]
    tables = []
    for data in (
        ["--data.schema", str(job.folder / "tasks.toml")],
        ["--data.schema", "", "--data.path", str(job.folder / "unlabelled.parquet"), "--data.format", "parquet"],
    ):
        out = job.folder / "scores.parquet"
        done = run_forked(["predict", *flags, *data, "--out", str(out)], job.folder)
        assert (done.code, done.err) == (0, "")
        tables.append(pyarrow.parquet.read_table(out))
    table, unlabelled = tables
    names = [f"{kind}_{label}" for label in ("click", "buy") for kind in ("label", "logit", "score")]
    assert table.column_names == unlabelled.column_names == ["example", *names]
    assert table.num_rows == 3_000
    for label in ("click", "buy"):
        columns = [table[f"{kind}_{label}"].to_numpy()[2_400:] for kind in ("label", "logit", "score")]
        area = roc_auc_score(columns[0], columns[1], sample_weight=weights[2_400:])
        assert area == pytest.approx(result["tasks"][label]["auc"], abs=1e-9)
        loss = log_loss(columns[0], columns[2], sample_weight=weights[2_400:])
        assert loss == pytest.approx(result["tasks"][label]["logloss"], abs=1e-9)
        assert unlabelled[f"label_{label}"].null_count == 3_000
        assert unlabelled[f"logit_{label}"].equals(table[f"logit_{label}"])


def test_what_does_not_fit_gets_one_line(clicks: MakeConfig) -> None:
    config = clicks("tasks", "mmoe")
    for changes, line in (
        (
            {"model__name": "dlrm"},
            "model.name dlrm has one logit, and the data 2 labels, label, buy: expected mmoe, ple, esmm, or a "
            "model.factory",
        ),
        ({"model__loss_weights": (1.0,)}, "model.loss_weights must be 2 numbers, one for each logit, got 1"),
    ):
        with pytest.raises(InputError) as caught:
            run_job(change(config, **changes))
        assert str(caught.value) == line
    with pytest.raises(
        InputError, match=r"^model\.name esmm needs data with two labels, clicks and conversions, got label"
    ):
        run_job(clicks("sum", "esmm"))
