"""One training job on one rank, from configuration to result. Everything is acquired here and nowhere else."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from bagpipe.cache.initial import TORCH_DTYPE
from bagpipe.cache.rows import RowCache
from bagpipe.client.remote import RemoteSteps
from bagpipe.config import Config
from bagpipe.digest import dense_digest, embedding_digest
from bagpipe.embedding import Converted, convert
from bagpipe.engine import Engine, EngineSettings, PhaseResult
from bagpipe.errors import InputError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.pipeline.stream import open_streams
from bagpipe.pipeline.trace import Trace
from bagpipe.schema import RowSchema
from bagpipe.store.embedded import EmbeddedServer
from bagpipe.store.interface import Store
from bagpipe.store.redis import RedisStore
from cacher.embedded import EmbeddedCacher
from trainer.inputs import InputMaker
from trainer.metrics import BinaryMetrics
from trainer.models import build_model
from trainer.optimizers import dense_optimizer
from trainer.progress import ProgressReporter
from trainer.result import Result, check_writable

__all__ = ["run_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a job is made of, all open."""

    config: Config
    source: RemoteSteps
    converted: Converted
    store: Store
    engine: Engine
    spec: OracleSpec


def run_job(config: Config, *, result_path: str = "") -> Result:
    """Train, evaluate, and digest.

    Raises:
        InputError: configuration, data or store cannot be used. Data that goes bad after a while is reported once the
            batches before it are trained and written back.
        StoreError, JobError: the job failed.
    """
    _check(config, result_path)
    torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    with ExitStack() as stack:
        trace = Trace() if config.run.trace else None
        parts = _open(config, stack, trace)
        start_s = time.monotonic()
        reporter = stack.enter_context(ProgressReporter(config.run.tensorboard))
        parts.engine.on_batch = reporter
        trained = parts.engine.train(parts.source.steps("train", parts.spec, max_steps=config.run.steps))
        seconds = time.monotonic() - start_s
        parts.engine.on_batch = None
        if trained.input_error is not None:
            raise trained.input_error
        metrics = BinaryMetrics()
        if config.data.eval_fraction and not trained.report.stopped:
            parts.engine.evaluate(parts.source.steps("eval", parts.spec), metrics.add)
        if trace is not None:
            trace.write(config.run.trace)
        result = _result(parts, trained, metrics, seconds)
        if result_path:
            result.write(result_path)
        return result


def _check(config: Config, result_path: str) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise InputError(f"one trainer rank is supported so far, torchrun started {world_size}")
    if config.cacher.url:
        raise InputError(f"cacher.url: a running cacher cannot be joined yet, leave it empty (got {config.cacher.url})")
    if config.run.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"run.device is {config.run.device}, but this machine has no usable CUDA device")
    for key, path in (("--result", result_path), ("run.trace", config.run.trace)):
        if path:
            check_writable(path, key)


def _open(config: Config, stack: ExitStack, trace: Trace | None) -> _Parts:
    credits = config.cache.prefetch_depth + 2
    source = stack.enter_context(EmbeddedCacher(config.data, config.run.seed, credits=credits))
    device = torch.device(config.run.device)
    converted = convert(build_model(source.schema, config.model), source.schema, device=device, dtype=config.run.dtype)
    schema = RowSchema(
        tables=converted.row_tables, optimizer=config.optim.rows, dtype=config.run.dtype, seed=config.run.seed
    )
    store = stack.enter_context(_store(config, schema, stack))
    store.check()
    cache = RowCache(schema, config.cache.rows, device)
    converted.bind(cache)
    engine = Engine(
        model=converted.model,
        layout=converted.layout,
        cache=cache,
        store=store,
        optimizer=dense_optimizer(converted.model.parameters(), config.optim),
        prepare=InputMaker(source.schema, device, TORCH_DTYPE[config.run.dtype]),
        settings=EngineSettings(
            prefetch_depth=config.cache.prefetch_depth,
            rows_lr=config.optim.rows_lr,
            eps=config.optim.eps,
        ),
        streams=open_streams(str(device)),
        trace=trace,
    )
    spec = OracleSpec(
        table_rows=tuple(table.rows for table in converted.row_tables),
        features=converted.features,
        num_slots=config.cache.rows,
        lookahead=config.oracle.lookahead,
        policy=config.oracle.policy,
    )
    return _Parts(config=config, source=source, converted=converted, store=store, engine=engine, spec=spec)


def _store(config: Config, schema: RowSchema, stack: ExitStack) -> Store:
    url = config.store.url
    if not url:
        folder = config.run.dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-"))
        url = stack.enter_context(EmbeddedServer(folder)).url
    return RedisStore(
        url,
        namespace=config.store.namespace,
        schema=schema,
        num_buckets=config.store.buckets,
        timeout_s=config.store.timeout_s,
    )


def _result(parts: _Parts, trained: PhaseResult, metrics: BinaryMetrics, seconds: float) -> Result:
    progress, report = trained.progress, trained.report
    return Result(
        steps=progress.steps,
        samples=progress.samples,
        seconds=seconds,
        samples_per_s=progress.samples / seconds,
        loss=float(progress.loss_sum) / progress.samples if progress.samples else None,
        auc=metrics.auc(),
        ne=metrics.normalised_entropy(),
        rows_unique=progress.rows_unique,
        rows_fetched=progress.rows_fetched,
        rows_written=progress.rows_written,
        hit_rate=progress.hit_rate,
        exposed_embedding_s=progress.exposed_s,
        step_s_p50=report.steps.quantile_s(0.5) if report.steps.count else None,
        dense_digest=dense_digest(parts.engine.model, parts.engine.optimizer),
        embedding_digest=embedding_digest(parts.store),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        skipped_rows=parts.source.skipped_rows(),
        stopped=report.stopped,
    )
