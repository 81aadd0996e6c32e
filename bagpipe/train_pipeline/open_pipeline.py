"""`OpenPipeline`: what a pipeline holds open: ranks, the store's server, an open job, its session, a planner.

ranks ─> store server, unless the user names a store ─> bagpipe.jobs.open_job ─> JobSession, planner
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from bagpipe.cache.auto_rows import auto_rows
from bagpipe.cache.row_cache import RowCache
from bagpipe.config.sections import CheckpointConfig, StoreConfig
from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.dense.precondition.optimizer import KfacOptimizer
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from bagpipe.jobs.job import Job, MakeDense, RankDense
from bagpipe.jobs.open_job import OpenJob, open_job
from bagpipe.jobs.ranks import Ranks, check_same, open_ranks
from bagpipe.jobs.session import JobSession
from bagpipe.lookahead.interface import BatchPlanner
from bagpipe.lookahead.select import select_planner
from bagpipe.oracle.plan import OracleSpec
from bagpipe.pipeline.trace import Trace
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.train_pipeline.initial_rows import InitialRows
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.user_batches import UserBatches
from bagpipe.training.engine import EngineSettings
from bagpipe.training.micro_lookups import MicroLookups
from bagpipe.training.part import LoopPart
from bagpipe.training.preconditioning import Preconditioning
from bagpipe.training.row_steps import row_steps_of
from bagpipe.training.weights import ResidentWeights
from bagpipe.training.whole_dense import WholeDense
from bagpipe.training.whole_kfac import whole_kfac
from bagpipe.types.model_inputs import device_of
from bagpipe.util.program import note
from bagpipe.util.redaction import redact
from bagpipe.util.temporary_folder import temporary_folder

__all__ = ["OpenPipeline", "open_pipeline"]

#: More micro-batches than a step ever has: gradients are then exchanged at its end.
_ANY_NUMBER = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPipeline:
    """The open parts of a pipeline.

    Attributes:
        session: the runs of the job; releases everything.
        planner: plans the batches of training.
        spec: of the planner.
    """

    session: JobSession
    planner: BatchPlanner
    spec: OracleSpec

    @property
    def job(self) -> OpenJob:
        """The job of the session."""
        return self.session.job

    @property
    def num_unwritten(self) -> int:
        """Updated rows in the cache that the store does not have."""
        return self.job.engine.cache.slots.num_dirty


def open_pipeline(
    model: ModelParts,
    options: Options,
    batches: UserBatches,
    initial: InitialRows,
    parts: tuple[LoopPart, ...] = (),
    trace: Trace | None = None,
) -> OpenPipeline:
    """Open everything.

    Args:
        model: what is trained.
        options: settings.
        batches: the user's batches.
        initial: rows to begin with.
        parts: further parts of the training loop.
        trace: records every action.

    Raises:
        InputError: the store cannot be used, or another rank's model or options differ.
    """
    membership = Membership.from_environment()
    _check_ranks(options, membership)
    with ExitStack() as stack:
        ranks = stack.enter_context(open_ranks(membership, timeout_s=options.peer_timeout_s, device=str(model.device)))
        stack.enter_context(ranks.reporting())
        _check_devices(ranks, model.device)
        scale = None if model.scaler is None else dataclasses.asdict(model.scaler.read())
        check_same(ranks, {**model.facts, **options.shared(), "grad_scaler": scale}, "models or options")
        spec = _spec(model, options, ranks)
        url = _store_url(options, ranks, stack)
        job = open_job(_job(model, options, batches, initial, spec, url, parts, trace), ranks, stack)
        planner = stack.enter_context(
            select_planner(
                spec,
                planner=options.planner,
                group=None if ranks.peers is None else ranks.peers.plans,
                uneven=options.uneven,
            )
        )
        return OpenPipeline(session=JobSession(job, stack.pop_all(), rescues_rows=True), planner=planner, spec=spec)


def _job(
    model: ModelParts,
    options: Options,
    batches: UserBatches,
    initial: InitialRows,
    spec: OracleSpec,
    store_url: str,
    parts: tuple[LoopPart, ...],
    trace: Trace | None,
) -> Job:
    """The job of a pipeline on this rank."""
    return Job(
        model=model.converted.model,
        layout=model.converted.layout,
        bind=model.converted.bind,
        rows=model.rows,
        device=model.device,
        num_slots=spec.slots_per_rank,
        grows=spec.grows,
        engine=EngineSettings(prefetch_depth=options.prefetch_depth, read_ahead=options.read_ahead),
        store=StoreConfig(
            url=store_url,
            namespace=options.namespace,
            timeout_s=options.timeout_s,
            durability=options.durability,
            existing=options.existing,
        ),
        checkpoint=CheckpointConfig(
            dir=options.checkpoint_dir,
            every=options.checkpoint_every,
            resume=options.resume,
            start_from=options.start_from,
            start_without=options.start_without,
            keep=options.keep,
            take_over=options.take_over,
        ),
        peer_timeout_s=options.peer_timeout_s,
        make_dense=_dense_maker(model, options, parts),
        prepare=batches.prepare,
        row_steps=row_steps_of(model.converted.layout, model.converted.optimizers),
        settings=model.facts,
        claim=initial.claim,  # the first run's only
        clears_refused=False,
        trace=trace,
    )


def _dense_maker(model: ModelParts, options: Options, parts: tuple[LoopPart, ...]) -> MakeDense:
    """Makes the dense part, and what it needs beside it."""

    def make(cache: RowCache, ranks: Ranks, stack: ExitStack) -> RankDense:
        microbatches, replicas = options.accumulate, None
        if ranks.peers is not None:
            # Ranks may have any numbers of micro-batches, and give some up: only the end of a step says that it is
            # there.
            backwards = 1 if microbatches == 1 else _ANY_NUMBER
            replicas = stack.enter_context(
                DenseParallel(model.converted.model, ranks.peers.dense, backwards_per_step=backwards)
            )
        optimizer, added, preconditioning = model.optimizer, parts, None
        if isinstance(optimizer, KfacOptimizer):
            if microbatches > 1:
                raise InputError(f"accumulate must be 1 with a KfacOptimizer, got {microbatches}")
            preconditioning = _preconditioning(optimizer, model.converted.model, ranks)
            optimizer, added = optimizer.release(), (*parts, preconditioning)
        if microbatches > 1:
            added = (*added, MicroLookups(cache, microbatches))
        dense = WholeDense(
            weights=ResidentWeights(model.converted.model, optimizer, replicas),
            executor=model.executor,
            skips_nonfinite=options.nonfinite == "skip" or model.scaler is not None,
            scale_holder=model.scaler,
            microbatches=microbatches,
            preconditioning=preconditioning,
        )
        return RankDense(dense=dense, parts=added, replicas=replicas)

    return make


def _preconditioning(optimizer: KfacOptimizer, model: nn.Module, ranks: Ranks) -> Preconditioning:
    """K-FAC of a model, whose layers the ranks share out."""
    group = None if ranks.peers is None else ranks.peers.dense
    kfac = whole_kfac(model, optimizer.settings, device_of(model), group)
    return Preconditioning({"model": kfac}, dict(model.named_parameters()))


def _spec(model: ModelParts, options: Options, ranks: Ranks) -> OracleSpec:
    """The specification of the plans. Collective."""
    table_rows = tuple(table.rows for table in model.converted.row_tables)
    if options.cache_rows == "auto":
        own = auto_rows(
            model.rows, model.device, table_rows, world_size=ranks.world_size, max_rows=options.cache_max_rows
        )
        num_slots: int = min(ranks.gather(own))
    else:
        num_slots = options.cache_rows
    return OracleSpec(
        table_rows=table_rows,
        features=model.converted.features,
        num_slots=num_slots,
        grows=options.cache_rows == "auto",
        lookahead=options.lookahead,
        world_size=ranks.world_size,
        assign="own" if ranks.world_size > 1 else "contiguous",
    )


def _check_ranks(options: Options, membership: Membership | None) -> None:
    if membership is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise InputError(
                f"torch.distributed has {dist.get_world_size()} ranks, but WORLD_SIZE is not in the environment, from "
                "which the pipeline knows its ranks: start with torchrun"
            )
        return
    if (options.store or "").startswith("memory:"):
        raise InputError(
            f"store is {redact(options.store or '')}, which is private to one process; "
            f"{membership.world_size} ranks need a server: leave store out, or name a server"
        )
    if options.store is None and membership.local_world_size < membership.world_size:
        raise InputError(
            "without store rank 0 starts a server for its own host, but the ranks are on several hosts: name a server "
            "that all reach, such as store=redis://host"
        )


def _check_devices(ranks: Ranks, device: torch.device) -> None:
    """Check that no two ranks have one CUDA device."""
    if device.type != "cuda":
        return
    used: dict[str, int] = {}
    for rank, name in enumerate(ranks.gather(str(torch.cuda.get_device_properties(device).uuid))):
        if name in used:
            raise InputError(
                f'ranks {used[name]} and {rank} use one CUDA device, GPU-{name}; each needs its own: device="cuda" '
                "takes that of LOCAL_RANK"
            )
        used[name] = rank


def _store_url(options: Options, ranks: Ranks, stack: ExitStack) -> str:
    """The store's URL. Without one, rank 0 starts a private server."""
    if options.store:
        return options.store
    url = None
    if ranks.is_first:
        folder = stack.enter_context(temporary_folder())
        server = stack.enter_context(EmbeddedServer(folder, durability=options.durability))
        note(f"store server: {server.description}")
        url = server.url
    found: str = ranks.share(url)
    return found
