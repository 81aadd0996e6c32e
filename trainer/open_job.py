"""`TrainerJob`: the open parts of one rank of the training program.

    cacher, store server ─> model ─> bagpipe.jobs.open_job: store, cache, dense part, checkpoints, engine ─> JobSession

Rank 0 starts the services that the configuration does not name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from bagpipe.cache.row_cache import RowCache
from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import Config
from bagpipe.dense.executor import SplitExecutor
from bagpipe.dense.parallel.broadcast import share_model
from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.jobs.job import Job, MakeDense, RankDense
from bagpipe.jobs.open_job import OpenJob, open_job
from bagpipe.jobs.ranks import Ranks
from bagpipe.jobs.session import JobSession
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.trace import Trace
from bagpipe.training.current_rows import CurrentRows
from bagpipe.training.dense import DensePart
from bagpipe.training.part import LoopPart
from bagpipe.training.row_steps import row_steps_of
from bagpipe.training.staged_dense import StagedDense
from bagpipe.training.verification import Verification
from trainer.assembly import BuiltModel, build_dense, build_parts, build_training_model, engine_settings
from trainer.cache_size import batch_size_of, num_caches_of
from trainer.devices import check_memory, free_bytes, memory_need
from trainer.evaluation import EvaluationRecord, Evaluator
from trainer.groups import feature_number
from trainer.held_out import HeldOutBatches
from trainer.inputs import InputMaker
from trainer.metrics import metric_key
from trainer.observe.reporter import Reporter
from trainer.orders import within_orders
from trainer.services import Services, open_services
from trainer.settings import changeable_settings, default_settings, result_settings
from trainer.shards import open_shards
from trainer.stages import open_stages
from trainer.tasks import Tasks

__all__ = ["TrainerJob", "job_of", "open_trainer_job"]

#: Connection timeout for a cacher that the job has started itself; long enough for a busy machine.
OWN_CACHER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJob:
    """One rank of the training program, open.

    Attributes:
        source: batches from the cacher.
        built: what is trained.
        session: trains it.
        evaluator: scores its held-out examples.
    """

    source: RemoteBatches
    built: BuiltModel
    session: JobSession
    evaluator: Evaluator

    @property
    def open(self) -> OpenJob:
        """The open parts of the session's job."""
        return self.session.job

    @property
    def verification(self) -> Verification | None:
        """Of the first batches; None: they are not compared."""
        return next((part for part in self.open.parts if isinstance(part, Verification)), None)

    def skipped_rows(self) -> int:
        """Malformed rows skipped in training and in the evaluation after it."""
        own = self.evaluator.skipped_rows if self.built.config.eval.every else 0  # else the source has counted them
        return self.source.skipped_rows() + own

    def batches(self) -> Generator[RankBatch, None, None]:
        """Training batches, from the start of the job."""
        checkpoints = self.open.checkpoints
        batches = self.source.batches(
            "train",
            self.built.spec,
            max_steps=self.built.config.run.steps,
            first_batch=checkpoints.first_batch,
            reader_state=checkpoints.reader_state,
            known_rows=checkpoints.resume_point.known_rows,
        )
        orders = None if self.built.stages is None else self.built.stages.orders
        if orders is None:
            return batches
        return within_orders(batches, orders, self.built.config.pipeline, checkpoints.first_batch)


def open_trainer_job(
    config: Config, ranks: Ranks, stack: ExitStack, reporter: Reporter, trace: Trace | None = None
) -> TrainerJob:
    """Connect to the cacher, build the model and open its job.

    Args:
        config: the job, on this rank's device.
        ranks: its ranks.
        stack: of what is opened; emptied into the session's.
        reporter: told what is done.
        trace: records every action.

    Raises:
        InputError: the data cannot be opened, the model cannot be built, or the store cannot be used.
    """
    services = open_services(config, ranks, stack, reporter.phase)
    reporter.phase("connecting to the cacher")
    source = held_out = stack.enter_context(_remote_batches(config, services, ranks))
    if config.eval.every:
        # A phase ends the one before: evaluations during training have a connection of their own.
        held_out = stack.enter_context(_remote_batches(config, services, ranks, suffix="-eval"))
    group = feature_number(source.schema, config.eval.group) if config.eval.group else None
    tasks = Tasks.of(source.schema)
    metric_key(config.eval.metric, tasks)
    reporter.phase("building the model")
    built = build_training_model(config, source.schema, ranks.world_size)
    if built.spec.grows:
        fewest = min(ranks.gather(built.spec.num_slots))
        built = dataclasses.replace(built, spec=dataclasses.replace(built.spec, num_slots=fewest))
    _check_memory(built, ranks.world_size)
    if ranks.rank:
        # The models are equal now. Dropout masks must differ between ranks.
        torch.manual_seed(config.run.seed + ranks.rank)
    record = EvaluationRecord()
    # With several ranks a row is in the cache of any of them, so evaluations read what all have written.
    rows = CurrentRows() if config.eval.every and ranks.world_size == 1 else None
    reporter.phase("connecting to the store")
    parts = (record, *filter(None, [rows]))
    job = open_job(job_of(built, source, services.store_url, parts, trace), ranks, stack)
    if job.checkpoints.origin:
        reporter.phase("started from other weights", **job.checkpoints.origin["takings"])
    if (resumed := job.checkpoints.resume_point.checkpoint) is not None and job.checkpoints.resumed_from is not None:
        epoch = (resumed.manifest.reader_state or {}).get("epoch")
        reporter.phase("resumed", checkpoint=str(resumed.folder), checkpoint_step=resumed.manifest.step, epoch=epoch)
    session = JobSession(job, stack.pop_all())
    batches = HeldOutBatches(held_out, built.eval_spec, max_steps=config.eval.batches)
    evaluator = Evaluator(config.eval, session, batches, record, reporter, group, rows, tasks=tasks)
    return TrainerJob(source=source, built=built, session=session, evaluator=evaluator)


def _remote_batches(config: Config, services: Services, ranks: Ranks, suffix: str = "") -> RemoteBatches:
    if not config.cacher.url:
        # The job's own cacher is never restarted.
        timeout_s = min(config.cacher.timeout_s, OWN_CACHER_TIMEOUT_S)
        config = dataclasses.replace(config, cacher=dataclasses.replace(config.cacher, timeout_s=timeout_s))
    return RemoteBatches(
        services.cacher_url,
        config,
        rank=ranks.rank,
        world_size=ranks.world_size,
        job_id=services.job_id + suffix,
        secret=services.secret,
    )


def job_of(
    built: BuiltModel,
    source: RemoteBatches,
    store_url: str,
    parts: tuple[LoopPart, ...] = (),
    trace: Trace | None = None,
) -> Job:
    """The job of a configuration.

    Args:
        built: what is trained.
        source: of its batches.
        store_url: of the rows.
        parts: of the training loop, besides those of `build_parts`.
        trace: records every action.
    """
    config = built.config
    return Job(
        model=built.converted.model,
        layout=built.converted.layout,
        bind=built.converted.bind,
        rows=built.rows,
        device=torch.device(config.run.device),
        num_slots=built.spec.slots_per_rank,
        grows=built.spec.grows,
        is_partial=bool(config.pipeline.partial_shares),
        kernels=config.run.kernels,
        engine=engine_settings(config),
        store=dataclasses.replace(config.store, url=store_url),
        checkpoint=dataclasses.replace(config.checkpoint, change=changeable_settings(config.checkpoint)),
        peer_timeout_s=config.run.peer_timeout_s,
        make_dense=_dense_maker(built, parts),
        prepare=InputMaker(built.data),
        row_steps=row_steps_of(built.converted.layout, built.converted.optimizers),
        settings=result_settings(config, built.data),
        # A checkpoint of an earlier version does not have the keys that were added since.
        defaults=default_settings(),
        identity=source.identity,
        trace=trace,
        wake=source.interrupt,
        await_batch=source.wait if config.data.is_stream else None,
    )


def _dense_maker(built: BuiltModel, more: tuple[LoopPart, ...]) -> MakeDense:
    """Makes the dense part: whole, or the stages of the rank. `more` are further parts of the training loop."""

    def make(cache: RowCache, ranks: Ranks, stack: ExitStack) -> RankDense:
        peers, model = ranks.peers, built.converted.model
        if peers is None:
            dense = build_dense(built)
            _keep_orders(dense, stack)
            return RankDense(dense=dense, parts=(*build_parts(built, dense), *more))
        stages = open_stages(built.stages, peers, built.config)
        replicas, shards = None, None
        if built.stages is not None:
            share_model(model, peers.dense)
        elif built.config.dense.shard == "none":
            replicas = stack.enter_context(
                DenseParallel(model, peers.dense, overlaps=not built.config.dense.is_chunked)
            )
        else:
            shards = stack.enter_context(open_shards(model, built.config.dense, peers, _compiled(built)))
        dense = build_dense(
            built,
            rank=ranks.rank,
            links=stages.links,
            reduce=stages.reduce,
            shares=stages.shares,
            replicas=replicas,
            shards=shards,
            groups=stages.groups,
            ranks=stages.ranks,
            layered=stages.layered if built.stages is not None else peers.dense,
        )
        _keep_orders(dense, stack)
        parts = (*build_parts(built, dense), *more)
        return RankDense(dense=dense, parts=parts, replicas=replicas or shards, held=stages.held)

    return make


def _compiled(built: BuiltModel) -> nn.Module | None:
    """The module that computes the whole dense part in compiled code; None: there is none."""
    executor = built.dense
    return executor.staged.stages[0].module if isinstance(executor, SplitExecutor) else None


def _keep_orders(dense: DensePart, stack: ExitStack) -> None:
    """Until the session ends."""
    if isinstance(dense, StagedDense) and dense.order_log is not None:
        stack.enter_context(dense.order_log)


def _check_memory(built: BuiltModel, world_size: int) -> None:
    """Check that the cache fits in device memory beside the model."""
    config, rows = built.config, built.spec.num_slots
    batch = batch_size_of(config, built.converted, built.data, world_size)
    need = memory_need(built.rows, rows, batch, num_caches=num_caches_of(config))
    key = "cache.max_rows" if built.spec.grows else "cache.rows"
    check_memory(need, free_bytes(config.run.device), config.run.device, key=key)
