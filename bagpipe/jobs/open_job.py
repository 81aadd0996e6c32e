"""`OpenJob`: the open parts of one rank's job.

    ranks, a store's URL ─> store ─> cache, dense part ─> checkpoints ─> engine

The store is read-only until the first batch of every rank has come, so earlier errors leave it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from bagpipe.dense.parallel.broadcast import HeldStage, RankBuffers
from bagpipe.errors import InputError
from bagpipe.jobs.arithmetic import arithmetic_of, unlike_ranks
from bagpipe.jobs.checkpoints import Checkpoints
from bagpipe.jobs.job import Job
from bagpipe.jobs.job_facts import JobFacts
from bagpipe.jobs.ranks import Ranks, check_same, state_shapes
from bagpipe.store.interface import Store
from bagpipe.store.open import open_store
from bagpipe.training.earlier_rows import KeptRows
from bagpipe.training.engine import Engine
from bagpipe.training.part import LoopPart
from bagpipe.training.row_decay import with_decay
from bagpipe.util.program import note

__all__ = ["OpenJob", "open_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenJob:
    """The open parts of a job.

    Attributes:
        job: what is open.
        ranks: of the job.
        store: the rows; its schema record is verified.
        checkpoints: of this rank, and its claim on the store's namespace.
        engine: trains.
        replicas: makes the buffers equal on all ranks; None on one rank and with stages.
        held: the stages and the ranks that hold them; empty on one rank and without stages.
        parts: the optional parts of the training loop.
        claim: claims the namespace, if that is not done; collective.
    """

    job: Job
    ranks: Ranks
    store: Store
    checkpoints: Checkpoints
    engine: Engine
    replicas: RankBuffers | None
    held: tuple[HeldStage, ...]
    parts: tuple[LoopPart, ...]
    claim: Callable[[], bool]

    def meet(self, call: str, step: int) -> None:
        """Wait until all ranks make the same call before the same batch.

        Raises:
            InputError: they make different calls, or one call before different batches.
            PeerError: another rank has failed, or is gone.
        """
        check_same(self.ranks, {"call": call, "batch": step}, "calls")

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends. Before its lanes end: some wait for those of other ranks."""
        if self.ranks.peers is not None:
            self.ranks.peers.report(error)


def open_job(job: Job, ranks: Ranks, stack: ExitStack) -> OpenJob:
    """Connect to the store, and make the cache, the dense part, the checkpoints and the engine.

    Args:
        job: what to open.
        ranks: of the job.
        stack: closes all parts in reverse order.

    Raises:
        InputError: the store cannot be used, another rank's model differs, or a checkpoint cannot be resumed.
        StoreError: the store failed.
    """
    store_config = job.store
    check_same(ranks, state_shapes(job.model), "models")
    store = stack.enter_context(
        open_store(
            store_config.url,
            namespace=store_config.namespace,
            schema=job.rows,
            buckets=store_config.buckets,
            timeout_s=store_config.timeout_s,
            durability=store_config.durability,
            client=store_config.client,
        )
    )
    store.check(reloads=bool(job.checkpoint.dir), resets=store_config.existing == "reset")
    cache = job.new_cache()
    job.bind(cache)
    made = job.make_dense(cache, ranks, stack)
    parts = with_decay(made.parts, cache, job.layout)
    if job.engine.rows_delay and job.checkpoint.dir:
        parts = (*parts, KeptRows(cache, ranks.rank))
    if cache.history.decaying and store_config.existing == "rows-only":
        raise InputError(
            "rows that decay need store.existing refuse or reset: rows of another job are at its steps, got rows-only"
        )
    facts = _facts(job, ranks)
    checkpoints = stack.enter_context(
        Checkpoints(
            job.checkpoint,
            store_config,
            ranks,
            facts,
            store,
            cache=cache,
            read_ahead=job.engine.read_ahead,
            timeout_s=job.peer_timeout_s,
            dense=made.dense,
            parts=parts,
            clears_refused=job.clears_refused,
        )
    )
    claim = partial(job.claim, ranks, store, checkpoints, cache)
    engine = Engine(
        layout=job.layout,
        cache=cache,
        store=store,
        dense=made.dense,
        prepare=job.prepare,
        settings=job.engine,
        row_steps=job.row_steps,
        trace=job.trace,
        peers=ranks.peers,
        claim=claim,
        recorder=checkpoints.recorder,
        known=checkpoints.known,
        wake=job.wake,
        await_batch=job.await_batch,
        earlier=checkpoints.earlier,
        parts=parts,
    )
    ranks.listen(engine.abort)
    return OpenJob(
        job=job,
        ranks=ranks,
        store=store,
        checkpoints=checkpoints,
        engine=engine,
        replicas=made.replicas,
        held=made.held,
        parts=parts,
        claim=claim,
    )


def _facts(job: Job, ranks: Ranks) -> JobFacts:
    facts = JobFacts(
        settings=job.settings,
        defaults=job.defaults,
        changeable=frozenset(job.checkpoint.change),
        rows=job.rows,
        identity=job.identity,
        world_size=ranks.world_size,
        arithmetic=tuple(ranks.gather(arithmetic_of(str(job.device)))),
    )
    unlike = unlike_ranks(facts.arithmetic)
    if unlike and ranks.is_first:
        note(unlike)
    return facts
