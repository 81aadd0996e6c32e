"""One training job on one rank, from configuration to result. Everything is acquired here and nowhere else.

    check ─> cacher process ─> trainee ─> store ─> engine ─> train ─> evaluate ─> Result

The store is only read until the first batch is about to be trained: whatever is wrong before leaves it untouched.
"""

from __future__ import annotations

import math
import os
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from bagpipe.client.remote import RemoteSteps
from bagpipe.config import Config
from bagpipe.digest import dense_digest, embedding_digest
from bagpipe.engine import Engine
from bagpipe.errors import InputError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.pipeline.trace import Trace
from bagpipe.progress import PhaseResult
from bagpipe.store.embedded import EmbeddedServer
from bagpipe.store.interface import Store
from bagpipe.store.open import open_store
from cacher.embedded import EmbeddedCacher
from trainer.assembly import Trainee, build_engine, build_trainee
from trainer.metrics import BinaryMetrics
from trainer.progress import ProgressReporter
from trainer.result import Result, check_folder, check_writable

__all__ = ["OpenJob", "check_supported", "open_job", "run_job"]

#: Lanes of the trace from the first to touch a batch to the last.
_TRACE_LANES = ("oracle", "data", "net-in", "copy", "compute", "net-out")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJob:
    """What a job is made of, all open.

    Attributes:
        source: steps from the cacher.
        trainee: what is trained.
        store: where its rows live; its schema record has been compared.
        engine: what trains it.
        continued: the namespace held a schema record already, so its rows are where training starts from.
    """

    source: RemoteSteps
    trainee: Trainee
    store: Store
    engine: Engine
    continued: bool

    @property
    def spec(self) -> OracleSpec:
        """What the cacher is asked to plan for."""
        return self.trainee.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsupported:
    """A configuration this version cannot run; refused rather than ignored."""

    words: str
    test: Callable[[Config], object]


_UNSUPPORTED = (
    _Unsupported(words="cacher.url: a running cacher cannot be joined yet", test=lambda c: c.cacher.url),
    _Unsupported(
        words="cache.dtype: rows of another type than run.dtype are not supported yet",
        test=lambda c: c.cache.dtype if c.cache.dtype not in ("run", c.run.dtype) else "",
    ),
    _Unsupported(
        words="pipeline.schedule: the dense part cannot be split into stages yet",
        test=lambda c: c.pipeline.schedule if c.pipeline.schedule != "none" else "",
    ),
    _Unsupported(
        words="pipeline.microbatches: batches cannot be split yet",
        test=lambda c: c.pipeline.microbatches if c.pipeline.microbatches != 1 else "",
    ),
    _Unsupported(words="checkpoint.dir: checkpoints cannot be written yet", test=lambda c: c.checkpoint.dir),
    _Unsupported(
        words="checkpoint.resume: a run cannot be resumed yet",
        test=lambda c: c.checkpoint.resume if c.checkpoint.resume not in ("auto", "never") else "",
    ),
)


def run_job(config: Config, *, result_path: str = "") -> Result:
    """Train, evaluate, and digest.

    Raises:
        InputError: configuration, data or store cannot be used. Data that goes bad after a while is reported once the
            batches before it are trained and written back.
        StoreError, JobError: the job failed.
    """
    _check(config, result_path)
    torch.set_num_threads(config.run.threads)
    with ExitStack() as stack:
        trace = Trace() if config.run.trace else None
        parts = open_job(config, stack, trace)
        start_s = time.monotonic()
        with ProgressReporter(config.run.tensorboard) as reporter:
            parts.engine.on_batch = reporter
            trained = parts.engine.train(parts.source.steps("train", parts.spec, max_steps=config.run.steps))
            parts.engine.on_batch = None
        seconds = time.monotonic() - start_s
        _raise_input_error(trained)
        metrics, stopped = _evaluate(parts, trained)
        if trace is not None:
            trace.write(config.run.trace, lanes=_TRACE_LANES)
        result = _result(parts, trained, metrics, seconds=seconds, stopped=stopped)
        if result_path:
            result.write(result_path)
        return result


def check_supported(config: Config) -> None:
    """Raise InputError for settings that are read but cannot be honoured yet."""
    for unsupported in _UNSUPPORTED:
        value = unsupported.test(config)
        if value:
            raise InputError(f"{unsupported.words}, leave it unset (got {value})")


def _check(config: Config, result_path: str) -> None:
    """Everything that can be refused before anything is opened."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise InputError(f"one trainer rank is supported so far, torchrun started {world_size}")
    check_supported(config)
    if config.run.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"run.device is {config.run.device}, but this machine has no usable CUDA device")
    for key, path in (("--result", result_path), ("run.trace", config.run.trace)):
        if path:
            check_writable(path, key)
    for key, path in (("run.tensorboard", config.run.tensorboard), ("run.dir", config.run.dir)):
        if path:
            check_folder(path, key)


def open_job(config: Config, stack: ExitStack, trace: Trace | None = None) -> OpenJob:
    """Start the cacher, build the model, connect to the store (an embedded one if no URL is given).

    Args:
        config: the job.
        stack: closes everything again, in reverse.
        trace: records every action.

    Raises:
        InputError: the data cannot be opened, the model cannot be built, or the store refuses us.
    """
    credits = config.cache.prefetch_depth + 2  # the steps a trainer has read and not trained, see Engine
    source = stack.enter_context(EmbeddedCacher(config.data, config.run.seed, credits=credits))
    trainee = build_trainee(config, source.schema)
    url = config.store.url
    if not url:
        folder = config.run.dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-"))
        url = stack.enter_context(EmbeddedServer(Path(folder))).url
    store = stack.enter_context(
        open_store(
            url,
            namespace=config.store.namespace,
            schema=trainee.rows,
            buckets=config.store.buckets,
            timeout_s=config.store.timeout_s,
        )
    )
    continued = store.check()
    engine = build_engine(trainee, store, trace)
    return OpenJob(source=source, trainee=trainee, store=store, engine=engine, continued=continued)


def _evaluate(parts: OpenJob, trained: PhaseResult) -> tuple[BinaryMetrics, bool]:
    """Metrics of the held-out examples, and whether the job was interrupted by then. Half an evaluation is none."""
    if trained.report.stopped or not parts.trainee.config.data.eval_fraction:
        return BinaryMetrics(), trained.report.stopped
    metrics = BinaryMetrics()
    evaluated = parts.engine.evaluate(parts.source.steps("eval", parts.spec), metrics.add)
    _raise_input_error(evaluated)
    stopped = evaluated.report.stopped
    return BinaryMetrics() if stopped else metrics, stopped


def _raise_input_error(phase: PhaseResult) -> None:
    if phase.input_error is not None:
        raise phase.input_error


def _result(parts: OpenJob, trained: PhaseResult, metrics: BinaryMetrics, *, seconds: float, stopped: bool) -> Result:
    progress, report = trained.progress, trained.report
    loss = float(progress.loss_sum) / progress.samples if progress.samples else math.nan
    return Result(
        steps=progress.steps,
        samples=progress.samples,
        seconds=seconds,
        samples_per_s=progress.samples / seconds,
        loss=loss if math.isfinite(loss) else None,
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
        stopped=stopped,
        continued=parts.continued,
    )
