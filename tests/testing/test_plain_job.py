"""The job without torchrec: cached equals direct, and direct equals a plain loop over all rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from bagpipe.kernels.initialization import initial_weights
from bagpipe.models.plain_dlrm import PlainDLRM
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, RowTable, Table

ROWS, EXAMPLES = 40, 16
SCHEMA = DataSchema(
    label="label",
    dense=("I1",),
    features=(Feature(name="f", table="f"), Feature(name="g", table="g")),
    tables=(Table(name="f", rows=ROWS), Table(name="g", rows=ROWS)),
)


def batches() -> list[Batch]:
    generator = np.random.default_rng(2)
    return [
        Batch(
            index=index,
            dense=generator.random((EXAMPLES, 1), np.float32),
            values=generator.integers(0, ROWS, 2 * EXAMPLES),
            lengths=np.ones((2, EXAMPLES), np.int32),
            labels=(generator.random(EXAMPLES) < 0.4).astype(np.float32),
        )
        for index in range(6)
    ]


def test_cached_equals_direct() -> None:
    ends = set()
    for cache_rows in (0, 32, 2 * ROWS):
        with PlainJob(PlainSettings(schema=SCHEMA, cache_rows=cache_rows, rows="adagrad")) as job:
            result = job.train(batches())
            ends.add((*job.digests(), float(result.progress.loss_sum)))
            logits, labels = job.score(batches()[:2])
            assert logits.shape == labels.shape == (2 * EXAMPLES,)
    assert len(ends) == 1


class Tables(nn.Module):
    """Both whole tables, as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(
            initial_weights(
                RowTable(name=name, dim=8, rows=ROWS, init_bound=ROWS**-0.5), np.arange(ROWS), seed=0, dtype="float64"
            )
            for name in "fg"
        )

    def forward(self, sparse: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[ids] for rows, ids in zip(self.rows, sparse, strict=True)], dim=1)


def test_direct_equals_a_plain_loop() -> None:
    settings = PlainSettings(schema=SCHEMA, dtype="float64")
    torch.manual_seed(settings.seed)
    tables = Tables()
    model = PlainDLRM(tables, num_dense=1, num_features=2, dim=8, bottom_mlp=(16,), top_mlp=(16,)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        sparse = torch.from_numpy(batch.values).view(2, EXAMPLES)
        logits = model(torch.from_numpy(batch.dense).double(), sparse).reshape(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels).double())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with PlainJob(settings) as job:
        job.train(batches())
        for number, rows in enumerate(tables.rows):
            ids = job.store.ids(number)
            np.testing.assert_allclose(job.store.read(number, ids).rows, rows.detach().numpy()[ids], rtol=0, atol=1e-12)
        theirs = {name: value for name, value in model.named_parameters() if not name.startswith("bags.")}
        for name, value in job.model.named_parameters():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-12)
