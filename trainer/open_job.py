"""`OpenJob`: the open parts of one rank's job. Acquires all resources.

    cacher, store server ─> model ─> store ─> cache, dense part ─> checkpoints ─> engine

The store is read-only until the first batch is ready, so earlier errors leave it unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import Config
from bagpipe.dense.parallel.broadcast import HeldStage, share_model
from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.jobs.arithmetic import arithmetic_of, unlike_ranks
from bagpipe.jobs.checkpoints import Checkpoints
from bagpipe.jobs.job_facts import JobFacts, note
from bagpipe.jobs.ranks import Ranks, check_same, state_shapes
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.trace import Trace
from bagpipe.store.interface import Store
from bagpipe.store.open import open_store
from bagpipe.training.engine import Engine
from bagpipe.training.part import LoopPart
from trainer.assembly import BuiltModel, build_cache, build_dense, build_engine, build_parts, build_training_model
from trainer.devices import BatchSize, activation_bytes, check_memory, free_bytes, memory_need
from trainer.services import open_services
from trainer.settings import common_settings, result_settings
from trainer.stages import open_stages

__all__ = ["OpenJob", "open_job"]

#: Connection timeout for a cacher that the job has started itself; long enough for a busy machine.
OWN_CACHER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJob:
    """The open parts of a job.

    Attributes:
        source: batches from the cacher.
        built: what is trained.
        store: store of its rows, with a verified schema record.
        engine: the training engine.
        checkpoints: checkpoints of this rank.
        replicas: sums the dense gradients; None on one rank and with stages.
        held: the stages and the ranks that hold them; empty on one rank and without stages.
        parts: the optional parts of the training loop.
    """

    source: RemoteBatches
    built: BuiltModel
    store: Store
    engine: Engine
    checkpoints: Checkpoints
    replicas: DenseParallel | None
    held: tuple[HeldStage, ...]
    parts: tuple[LoopPart, ...]

    @property
    def spec(self) -> OracleSpec:
        """Oracle spec of the training data."""
        return self.built.spec

    def batches(self) -> Iterator[RankBatch]:
        """Training batches, from the start of the job."""
        checkpoints = self.checkpoints
        return self.source.batches(
            "train",
            self.spec,
            max_steps=self.built.config.run.steps,
            first_batch=checkpoints.first_batch,
            reader_state=checkpoints.reader_state,
        )


def open_job(config: Config, ranks: Ranks, stack: ExitStack, trace: Trace | None = None) -> OpenJob:
    """Connect to the cacher, build the model and connect to the store. Rank 0 starts services without a URL.

    Args:
        config: the job, on this rank's device.
        ranks: its ranks.
        stack: closes all parts in reverse order.
        trace: records every action.

    Raises:
        InputError: the data cannot be opened, the model cannot be built, or the store cannot be used.
    """
    services = open_services(config, ranks, stack)
    if not config.cacher.url:
        # The job's own cacher is never restarted.
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
    built = build_training_model(config, source.schema, ranks.world_size)
    _check_memory(built, ranks.world_size)
    if ranks.rank:
        # The models are equal now. Dropout masks must differ between ranks.
        torch.manual_seed(config.run.seed + ranks.rank)
    store = stack.enter_context(
        open_store(
            services.store_url,
            namespace=config.store.namespace,
            schema=built.rows,
            buckets=config.store.buckets,
            timeout_s=config.store.timeout_s,
            durability=config.store.durability,
        )
    )
    store.check(reloads=bool(config.checkpoint.dir), resets=config.store.existing == "reset")
    peers = ranks.peers
    held: tuple[HeldStage, ...] = ()
    cache = build_cache(built)
    replicas: DenseParallel | None = None
    if peers is None:
        dense = build_dense(built)
    else:
        check_same(ranks, state_shapes(built.converted.model), "models")
        model = built.converted.model
        held, links, reduce = open_stages(built.stages, peers)
        if built.stages is None:
            replicas = stack.enter_context(DenseParallel(model, peers.dense))
        else:
            share_model(model, peers.dense)
        dense = build_dense(built, rank=ranks.rank, links=links, reduce=reduce, replicas=replicas)
    parts = build_parts(built, dense)
    facts = _facts(built, source, ranks)
    unlike = unlike_ranks(facts.arithmetic)
    if unlike and ranks.is_first:
        note(unlike)
    checkpoints = stack.enter_context(
        Checkpoints(
            config.checkpoint,
            config.store,
            ranks,
            facts,
            store,
            cache=cache,
            read_ahead=config.cache.read_ahead,
            timeout_s=config.run.peer_timeout_s,
            dense=dense,
            parts=parts,
        )
    )
    engine = build_engine(
        built,
        store,
        cache=cache,
        dense=dense,
        parts=parts,
        trace=trace,
        peers=peers,
        claim=checkpoints.claim.take,
        recorder=checkpoints.recorder,
        known=checkpoints.known,
        wake=source.interrupt,
    )
    ranks.listen(engine.abort)
    return OpenJob(
        source=source,
        built=built,
        store=store,
        engine=engine,
        checkpoints=checkpoints,
        replicas=replicas,
        held=held,
        parts=parts,
    )


def _check_memory(built: BuiltModel, world_size: int) -> None:
    """Check that the cache fits in device memory beside the model."""
    config, parameters = built.config, [*built.converted.model.parameters()]
    num_examples = -(-config.data.batch_size // world_size)
    batch = BatchSize(
        num_ids=num_examples * len(built.data.features),
        read_ahead=config.cache.read_ahead,
        dense_bytes=sum(parameter.nbytes for parameter in parameters),
        activation_bytes=activation_bytes(parameters, num_examples),
    )
    device = config.run.device
    check_memory(memory_need(built.rows, config.cache.rows, batch), free_bytes(device), device)


def _facts(built: BuiltModel, source: RemoteBatches, ranks: Ranks) -> JobFacts:
    return JobFacts(
        settings=result_settings(built.config, built.data),
        # A checkpoint of an earlier version does not have the keys that were added since.
        defaults=common_settings(Config()),
        rows=built.rows,
        identity=source.identity,
        world_size=ranks.world_size,
        arithmetic=tuple(ranks.gather(arithmetic_of(built.config.run.device))),
    )
