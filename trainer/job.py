"""One training job on one rank, from configuration to result. Everything is acquired here and nowhere else.

    check ─> ranks ─> cacher, store server ─> trainee ─> store ─> engine ─> checkpoints ─> train ─> evaluate ─> Result

The store is only read until the first batch is about to be trained: whatever is wrong before leaves it untouched.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import Config
from bagpipe.dense.parallel.broadcast import HeldStage, share_model, share_stages
from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.distributed.membership import Membership
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.trace import Trace
from bagpipe.store.interface import Store
from bagpipe.store.open import open_store
from bagpipe.training.digest import dense_digest, embedding_digest
from bagpipe.training.engine import Engine
from bagpipe.training.progress import PhaseResult
from bagpipe.util.outputs import check_folder, check_writable
from trainer.assembly import Trainee, build_engine, build_trainee
from trainer.beginning import JobFacts, result_settings
from trainer.checkpoints import Checkpoints
from trainer.devices import (
    BatchSize,
    activation_bytes,
    check_device,
    check_memory,
    cuda_devices,
    free_bytes,
    memory_need,
)
from trainer.metrics import BinaryMetrics
from trainer.progress import ProgressReporter
from trainer.ranks import Ranks, check_same, common_settings, config_of_rank, open_ranks, path_of_rank
from trainer.result import Result
from trainer.services import open_services
from trainer.stages import check_ranks, has_losses, open_stages
from trainer.totals import RankTotals, combine, totals_of

__all__ = ["OpenJob", "open_job", "run_job"]

#: Lanes of the trace from the first to touch a batch to the last: before those that compute, and after; with several
#: ranks.
_TRACE_LANES = (("oracle", "data", "net-in", "copy"), ("net-out",))
_TRACE_LANES_OF_RANKS = (("oracle", "data", "net-in", "copy", "pull"), ("push", "net-out", "ack"))

#: How long a job tries to reach the cacher it has started: a connection on one machine, with a busy one in mind.
OWN_CACHER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJob:
    """What a job is made of, all open.

    Attributes:
        source: steps from the cacher.
        trainee: what is trained.
        store: where its rows live; its schema record has been compared.
        engine: what trains it.
        checkpoints: what it resumes from, and what it records.
        dense: sums the dense gradients; None on one rank, and with stages.
        held: the stages and who holds them; empty on one rank, and without stages.
        continued: the namespace held a schema record already, so its rows are where training starts from.
    """

    source: RemoteBatches
    trainee: Trainee
    store: Store
    engine: Engine
    checkpoints: Checkpoints
    dense: DenseParallel | None
    held: tuple[HeldStage, ...]
    continued: bool

    @property
    def spec(self) -> OracleSpec:
        """What the cacher is asked to plan for."""
        return self.trainee.spec


def run_job(config: Config, *, place: Membership | None = None, result_path: str = "") -> Result:
    """Train, evaluate, and digest. Every rank returns the same result; rank 0 writes it.

    Args:
        config: the job.
        place: which of its ranks this is; None for the only one.
        result_path: where rank 0 writes the result; empty: nowhere.

    Raises:
        InputError: configuration, data or store cannot be used. Data that goes bad after a while is reported once the
            batches before it are trained and written back.
        StoreError, JobError: the job failed. PeerError: another rank did.
    """
    own = config_of_rank(config, place)
    _check(own, place, result_path)
    torch.set_num_threads(own.run.threads)
    # torch's default, which some images change by a variable: no TF32, so that devices agree within rounding.
    torch.set_float32_matmul_precision("highest")
    with open_ranks(place, timeout_s=own.run.peer_timeout_s, device=own.run.device) as ranks, ExitStack() as stack:
        try:
            check_same(ranks, common_settings(config), "configurations")
            return _run(own, ranks, stack, result_path)
        except BaseException as error:
            # Before the stack unwinds: what this rank had started for others is gone then.
            ranks.report(error)
            raise


def _run(config: Config, ranks: Ranks, stack: ExitStack, result_path: str) -> Result:
    trace = Trace() if config.run.trace else None
    parts = open_job(config, ranks, stack, trace)
    checkpoints = parts.checkpoints
    carried = checkpoints.carried()
    start_s = time.monotonic()
    label = "train" if ranks.peers is None else f"train (rank 0 of {ranks.world_size})"
    with ExitStack() as shown:
        if ranks.is_first:
            reporter = ProgressReporter(
                config.run.tensorboard,
                label,
                shows_loss=has_losses(parts.trainee.stages, ranks.rank),
                samples=carried.get("samples", 0),
                streams=parts.engine.cache.streams,
            )
            parts.engine.on_batch = shown.enter_context(reporter)
        trained = parts.engine.train(_batches(parts), first_batch=checkpoints.first_batch, carried=carried)
        parts.engine.on_batch = None
    seconds = time.monotonic() - start_s
    _raise_input_error(trained)
    checkpoints.claim_if_resumed()
    if parts.dense is not None:
        parts.dense.share_buffers()
    if parts.held and ranks.peers is not None:
        share_stages(parts.held, parts.engine.optimizer, ranks.peers.dense, ranks.gather)
    metrics, stopped = _evaluate(parts, ranks, trained)
    if trace is not None:
        path = path_of_rank(config.run.trace, ranks.rank)
        trace.write(path, process=f"rank {ranks.rank}", lanes=_trace_lanes(parts, ranks))
    digest = dense_digest(parts.engine.model, parts.engine.optimizer)
    samples_before = carried.get("samples", 0)
    totals = totals_of(trained, seconds=seconds, dense_digest=digest, samples_before=samples_before)
    result = _result(parts, ranks, totals, metrics, stopped=stopped)
    if result_path and ranks.is_first:
        result.write(result_path)
    # Rank 0 ends the cacher and the store it started only when nobody uses them any more.
    ranks.gather(None)
    return result


def _batches(parts: OpenJob) -> Iterator[RankBatch]:
    checkpoints = parts.checkpoints
    return parts.source.batches(
        "train",
        parts.spec,
        max_steps=parts.trainee.config.run.steps,
        first_batch=checkpoints.first_batch,
        reader_state=checkpoints.reader_state,
    )


def _trace_lanes(parts: OpenJob, ranks: Ranks) -> tuple[str, ...]:
    before, after = _TRACE_LANES if ranks.peers is None else _TRACE_LANES_OF_RANKS
    pipeline = parts.engine.pipeline
    if pipeline is None:
        return (*before, "compute", *after)
    reduce = f"reduce{pipeline.process}"
    # The held-out examples are scored by the whole model, in the lane "compute".
    compute = (*pipeline.step.lanes_of(pipeline.process), "compute")
    return (*before, *compute, *((reduce,) if reduce in pipeline.step.program.lanes else ()), *after)


def _check(config: Config, place: Membership | None, result_path: str) -> None:
    """Everything that can be refused before anything is opened."""
    rank = place.rank if place is not None else 0
    check_ranks(config.pipeline, place.world_size if place is not None else 1)
    check_device(config.run.device, cuda_devices)
    if config.checkpoint.dir:
        check_folder(config.checkpoint.dir, "checkpoint.dir")
    files = {"--result": result_path if rank == 0 else "", "run.trace": path_of_rank(config.run.trace, rank)}
    for key, path in files.items():
        if path:
            check_writable(path, key)
    folders = {"run.tensorboard": config.run.tensorboard, "run.dir": config.run.dir} if rank == 0 else {}
    for key, path in folders.items():
        if path:
            check_folder(path, key)


def open_job(config: Config, ranks: Ranks, stack: ExitStack, trace: Trace | None = None) -> OpenJob:
    """Reach the cacher, build the model, connect to the store; what no URL names is started by rank 0.

    Args:
        config: the job, on this rank's device.
        ranks: its ranks.
        stack: closes everything again, in reverse.
        trace: records every action.

    Raises:
        InputError: the data cannot be opened, the model cannot be built, or the store refuses us.
    """
    services = open_services(config, ranks, stack)
    if not config.cacher.url:
        # Nobody will start a job's own cacher again.
        timeout_s = min(config.cacher.timeout_s, OWN_CACHER_TIMEOUT_S)
        config = dataclasses.replace(config, cacher=dataclasses.replace(config.cacher, timeout_s=timeout_s))
    source = stack.enter_context(
        RemoteBatches(
            services.cacher_url,
            config,
            credits=config.cache.read_ahead,
            rank=ranks.rank,
            world_size=ranks.world_size,
            job_id=services.job_id,
            secret=services.secret,
        )
    )
    trainee = build_trainee(config, source.schema, ranks.world_size)
    _check_memory(trainee, ranks.world_size)
    if ranks.rank:
        # The models are equal by now. Left alone, dropout would leave out the same places on every rank.
        torch.manual_seed(config.run.seed + ranks.rank)
    store = stack.enter_context(
        open_store(
            services.store_url,
            namespace=config.store.namespace,
            schema=trainee.rows,
            buckets=config.store.buckets,
            timeout_s=config.store.timeout_s,
            durability=config.store.durability,
        )
    )
    is_there = store.check(reloads=bool(config.checkpoint.dir))
    peers = ranks.peers
    held: tuple[HeldStage, ...] = ()
    dense = None
    if peers is None:
        engine = build_engine(trainee, store, trace)
    else:
        check_same(ranks, _shapes(trainee), "models")
        held, links, reduce = open_stages(trainee.stages, peers)
        engine = build_engine(trainee, store, trace, rank=ranks.rank, links=links, reduce=reduce)
        if trainee.stages is None:
            dense = stack.enter_context(DenseParallel(engine.model, engine.optimizer, peers.dense))
            engine.settle = dense.settle
        else:
            share_model(engine.model, peers.dense)
        engine.peers = peers
    checkpoints = stack.enter_context(Checkpoints(config, ranks, _facts(trainee, source, ranks), store))
    checkpoints.connect(engine)
    checkpoints.restore(engine)
    engine.wake = source.interrupt
    ranks.listen(engine.abort)
    return OpenJob(
        source=source,
        trainee=trainee,
        store=store,
        engine=engine,
        checkpoints=checkpoints,
        dense=dense,
        held=held,
        continued=is_there and not config.checkpoint.dir,
    )


def _check_memory(trainee: Trainee, world_size: int) -> None:
    """Whether the cache fits the device, beside the model that is there already."""
    config, parameters = trainee.config, [*trainee.converted.model.parameters()]
    num_examples = -(-config.data.batch_size // world_size)
    batch = BatchSize(
        num_ids=num_examples * len(trainee.data.features),
        read_ahead=config.cache.read_ahead,
        dense_bytes=sum(parameter.nbytes for parameter in parameters),
        activation_bytes=activation_bytes(parameters, num_examples),
    )
    device = config.run.device
    check_memory(memory_need(trainee.rows, config.cache.rows, batch), free_bytes(device), device)


def _facts(trainee: Trainee, source: RemoteBatches, ranks: Ranks) -> JobFacts:
    return JobFacts(
        settings=result_settings(trainee.config, trainee.data),
        rows=trainee.rows,
        identity=source.identity,
        world_size=ranks.world_size,
    )


def _shapes(trainee: Trainee) -> dict[str, Any]:
    """What must be equal for gradients to be summed element by element."""
    state = trainee.converted.model.state_dict()
    return {name: [str(value.dtype).removeprefix("torch."), *value.shape] for name, value in state.items()}


def _evaluate(parts: OpenJob, ranks: Ranks, trained: PhaseResult) -> tuple[BinaryMetrics, bool]:
    """Metrics of all held-out examples, at rank 0, and whether the job was interrupted by then. Half is none."""
    if trained.report.stopped or not parts.trainee.config.data.eval_fraction:
        return BinaryMetrics(), trained.report.stopped
    metrics = BinaryMetrics()
    evaluated = parts.engine.evaluate(parts.source.batches("eval", parts.trainee.eval_spec), metrics.add)
    _raise_input_error(evaluated)
    if evaluated.report.stopped:
        return BinaryMetrics(), True
    return metrics if ranks.peers is None else metrics.gathered(ranks.collect), False


def _raise_input_error(phase: PhaseResult) -> None:
    if phase.input_error is not None:
        raise phase.input_error


def _result(parts: OpenJob, ranks: Ranks, own: RankTotals, metrics: BinaryMetrics, *, stopped: bool) -> Result:
    """The job's result, the same at every rank; rank 0 alone reads the store and knows all scores."""
    totals = combine([RankTotals(**values) for values in ranks.gather(dataclasses.asdict(own))])
    found = None
    if ranks.is_first:
        quality = {"auc": metrics.auc(), "ne": metrics.normalised_entropy()}
        found = {**quality, "embedding_digest": embedding_digest(parts.store)}
        parts.checkpoints.check_rows()  # afterwards: what is gone now may have been gone for the digest
    return Result(
        **ranks.share(found),
        steps=totals.steps,
        samples=totals.samples,
        seconds=totals.seconds,
        samples_per_s=(totals.samples - totals.samples_before) / totals.seconds,
        loss=totals.loss,
        rows_unique=totals.rows_unique,
        rows_fetched=totals.rows_fetched,
        rows_written=totals.rows_written,
        hit_rate=totals.hit_rate,
        exposed_embedding_s=totals.exposed_s,
        step_s_p50=totals.step_s_p50,
        dense_digest=totals.dense_digest,
        peak_rss_bytes=totals.peak_rss_bytes,
        skipped_rows=parts.source.skipped_rows(),
        skipped_batches=totals.skipped_batches,
        loss_scale=totals.loss_scale,
        resumed_from=parts.checkpoints.resumed_from,
        checkpoints=parts.checkpoints.num_published,
        checkpoint_stall_s=totals.checkpoint_stall_s,
        stopped=stopped,
        continued=parts.continued,
    )
