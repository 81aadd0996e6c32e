"""The scores of an exported model are those of `trainer predict`, with rows from files and from the job's store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagpipe.errors import InputError
from bagpipe.serving import Bags, Scorer, load
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import DataSchema
from tests.system.clicks import write_clicks, write_schemas
from tests.system.programs import run_forked
from trainer.export import export

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

BATCH = 12
MLP = ["--model.bottom_mlp", "6", "--model.top_mlp", "8", "--model.embedding_dim", "4"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A trained job, whose store still runs."""

    folder: Path
    data: list[str]
    clicks: pa.Table
    store_url: str
    namespace: str

    def program(self, *arguments: str) -> str:
        done = run_forked([*arguments], self.folder)
        assert done.code == 0, done.err
        return done.err

    def predicted(self, *arguments: str) -> np.ndarray:
        """Logits of `trainer predict`."""
        out = self.folder / "scores.parquet"
        checkpoints = ["--checkpoint.dir", str(self.folder / "checkpoints"), "--cache.rows", "400"]
        self.program("predict", *self.data, *checkpoints, "--out", str(out), *arguments)
        return pq.read_table(out)["logit"].to_numpy()

    def exported(self, name: str, *arguments: str) -> Path:
        out = self.folder / name
        export(["--checkpoint.dir", str(self.folder / "checkpoints"), "--out", str(out), *arguments])
        return out


def trained(folder: Path, server: EmbeddedServer, namespace: str, schema: str, arguments: Sequence[str]) -> Job:
    """A job on the second half of the log: ids that only the first half has are never trained."""
    log = pq.read_table(write_clicks(folder / "clicks.parquet"))
    pq.write_table(log.slice(150), folder / "trained.parquet")
    of_file = ["--data.format", "parquet", "--data.schema", str(write_schemas(folder)[schema])]
    sizes = ["--data.batch_size", str(BATCH), "--data.workers", "0"]
    job = Job(
        folder=folder,
        data=[*of_file, *sizes, "--data.path", str(folder / "clicks.parquet")],
        clicks=log,
        store_url=server.url,
        namespace=namespace,
    )
    own = ["--data.path", str(folder / "trained.parquet"), "--store.url", server.url, "--store.namespace", namespace]
    checkpoints = ["--checkpoint.dir", str(folder / "checkpoints"), "--checkpoint.every", "5", "--cache.rows", "200"]
    job.program(*of_file, *sizes, *own, *checkpoints, "--data.eval_fraction", "0", *arguments)
    return job


def bags_of(log: pa.Table, schema: DataSchema, scorer: Scorer) -> dict[str, Bags]:
    """The features of a log, as the reader makes them of its columns."""
    bags = {}
    for feature in schema.features:
        lists = [
            [] if value is None else value if isinstance(value, list) else [value]
            for value in log[feature.name].to_pylist()
        ]
        ids = np.array([row_id for each in lists for row_id in each], np.int64)
        table = schema.table(feature.table)
        weights: Any = None
        if feature.weighted:
            weights = np.array([w for each in log["item_weights"].to_pylist() for w in each], np.float32)
        bags[feature.name] = Bags(
            ids=scorer.rows.hashed(table.name, ids) if table.hash else ids,
            lengths=np.array([len(each) for each in lists]),
            weights=weights,
        )
    return bags


def scored(job: Job, scorer: Scorer) -> np.ndarray:
    """Logits of the whole log, in the batches of `trainer predict`."""
    logits = []
    for first in range(0, len(job.clicks), BATCH):
        part = job.clicks.slice(first, BATCH)
        numbers = np.stack([part[name].to_numpy() for name in scorer.manifest.data.dense], axis=1)
        bags = bags_of(part, scorer.manifest.data, scorer)
        logits.append(scorer.logits(bags, numbers)[0].double().numpy())
        np.testing.assert_allclose(scorer(bags, numbers), 1 / (1 + np.exp(-logits[-1])), rtol=1e-12)
    return np.concatenate(logits)


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        pytest.param("sum", ["--model.name", "dlrm", "--optim.rows", "adam"], marks=pytest.mark.slow),
        ("ragged", ["--model.name", "wide-deep", "--run.dtype", "float64", "--optim.rows_weight_decay", "0.1"]),
        pytest.param(
            "weighted and mean", ["--model.name", "dcnv2", "--cache.dtype", "float16"], marks=pytest.mark.slow
        ),
        ("mixed", ["--model.name", "deepfm", "--cache.dtype", "bfloat16", "--optim.ema_decay", "0.5"]),
        pytest.param("weighted", ["--model.name", "towers"], marks=pytest.mark.slow),
        pytest.param("mean", ["--model.name", "dcnv2-fuxictr", "--model.batch_norm", "true"], marks=pytest.mark.slow),
        pytest.param("sum", ["--model.name", "deepfm-fuxictr", "--model.dropout", "0.2"], marks=pytest.mark.slow),
        pytest.param(
            "sum",
            ["--model.name", "finalmlp", "--model.gate_mlp", "5", "--model.first_gate", "user,d0"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_exported_scores_have_the_bits_of_predictions(
    schema: str, arguments: list[str], tmp_path: Path, redis_server: EmbeddedServer, namespace: str
) -> None:
    job = trained(tmp_path, redis_server, namespace, schema, [*MLP, *arguments])
    averages = "--optim.ema_decay" in arguments
    expected = job.predicted(*(("--optim.ema_decay", "0.5", "--optim.ema_evaluate", "true") if averages else ()))
    folder = job.exported("export", *(("--averages",) if averages else ()))
    with load(folder, verify=True) as scorer:
        np.testing.assert_array_equal(scored(job, scorer), expected)
    if "--optim.rows_weight_decay" in arguments:
        with pytest.raises(InputError, match="decay while they rest"):
            load(folder, store_url=job.store_url, namespace=namespace)
        return
    with load(folder, store_url=job.store_url, namespace=namespace) as scorer:
        np.testing.assert_array_equal(scored(job, scorer), expected)
