"""Our own runs: the trainer's parts over the shaped link, in steady state; reading, parsing and planning included.

rows of the sample in the store ──> cacher process, engine, fenced store over TCP ──on_batch──> Meter ──> held-out AUC
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import Config
from bagpipe.kernels.initialization import initial_weights
from bagpipe.store.interface import WriteRequest
from bagpipe.training.progress import Progress
from bagpipe.types.schema import RowSchema
from benchmarks.harness.fenced_store import FencedStore
from benchmarks.harness.job import open_engine
from benchmarks.peers.meter import LOSS_STEPS, Meter
from benchmarks.peers.sample import Sample
from cacher.embedded import EmbeddedCacher
from trainer.assembly import build_training_model
from trainer.metrics import BinaryMetrics

__all__ = ["run_ours"]


def run_ours(config: Config, sample: Sample, meter: Meter, *, fill_url: str) -> tuple[float | None, float, float]:
    """Train once over the data, and score the held-out examples.

    Args:
        config: of the job; its store is reached through the link.
        sample: its rows are written to the store before training.
        meter: records every step.
        fill_url: URL of the store's server past the link.

    Returns:
        Held-out AUC, mean loss of the first steps, hit rate.
    """
    first_losses: list[float] = []

    def on_batch(totals: Callable[[], Progress]) -> None:
        if meter.step() == LOSS_STEPS:
            progress = totals()
            first_losses.append(float(progress.loss_sum) / progress.samples)

    with ExitStack() as stack:
        cacher = stack.enter_context(EmbeddedCacher(config))
        assert cacher.pid is not None, "the cacher runs"
        meter.add_child("cacher", cacher.pid)
        source = stack.enter_context(RemoteBatches(cacher.url, config))
        built = build_training_model(config, source.schema)
        _fill(fill_url, built.rows, config.store.namespace, sample)
        engine = open_engine(built, source, stack)
        progress = engine.train(source.batches("train", built.spec), on_batch=on_batch).progress
        metrics = BinaryMetrics()
        engine.evaluate(source.batches("eval", built.eval_spec), metrics.add)
        meter.note_helper(cacher.pid)
        return metrics.quality().auc, first_losses[0], progress.hit_rate


def _fill(url: str, schema: RowSchema, namespace: str, sample: Sample) -> None:
    with FencedStore(url, schema=schema, namespace=namespace) as store:
        for number, table in enumerate(schema.tables):
            ids = sample.ids[number]
            rows = np.zeros((len(ids), schema.row_width(number)), np.float32)
            rows[:, : table.dim] = initial_weights(table, ids, seed=schema.seed).numpy()
            store.write_many([WriteRequest(table=number, ids=ids, rows=rows)])
