"""`OpenPipeline`: what a pipeline holds open: ranks, store, checkpoints, planner, engine.

    ranks ─> store server, unless the user names a store ─> store ─> cache, dense part ─> checkpoints ─> planner, engine

The store is read-only until the first batch of every rank has come, so earlier errors leave it unchanged.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bagpipe.cache.row_cache import RowCache
from bagpipe.config.sections import CheckpointConfig, StoreConfig
from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from bagpipe.jobs.arithmetic import arithmetic_of
from bagpipe.jobs.checkpoints import Checkpoints
from bagpipe.jobs.job_facts import JobFacts
from bagpipe.jobs.ranks import Ranks, check_same, open_ranks, state_shapes
from bagpipe.kernels.select import select_kernels
from bagpipe.lookahead.interface import BatchPlanner
from bagpipe.lookahead.select import select_planner
from bagpipe.oracle.plan import OracleSpec
from bagpipe.store.interface import Store
from bagpipe.store.open import open_store
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.train_pipeline.initial_rows import InitialRows
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.user_batches import UserBatches
from bagpipe.training.accumulated_dense import AccumulatedDense, MicroLookups
from bagpipe.training.dense import WholeDense
from bagpipe.training.engine import Engine, EngineSettings
from bagpipe.training.part import LoopPart
from bagpipe.training.row_steps import row_steps_of

__all__ = ["OpenPipeline", "new_cache", "open_pipeline", "spec_of"]

#: More micro-batches than a step ever has: gradients are then exchanged at its end.
_ANY_NUMBER = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPipeline:
    """The open parts of a pipeline.

    Attributes:
        ranks: of the job.
        store: the rows.
        checkpoints: of this rank, and its claim on the store's namespace.
        planner: plans the batches of training.
        engine: trains.
        spec: of the planner.
        replicas: of the dense part on all ranks; None: there is one rank.
        claim: claims the namespace and writes initial rows, if that is not done; collective (`InitialRows.claim`).
    """

    ranks: Ranks
    store: Store
    checkpoints: Checkpoints
    planner: BatchPlanner
    engine: Engine
    spec: OracleSpec
    claim: Callable[[], bool]
    replicas: DenseParallel | None

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


def open_pipeline(
    model: ModelParts,
    options: Options,
    batches: UserBatches,
    initial: InitialRows,
    stack: ExitStack,
    parts: tuple[LoopPart, ...] = (),
) -> OpenPipeline:
    """Open everything.

    Args:
        model: what is trained.
        options: settings.
        batches: the user's batches.
        initial: rows to begin with.
        stack: closes all parts in reverse order.
        parts: further parts of the training loop.

    Raises:
        InputError: the store cannot be used, or another rank's model or options differ.
    """
    membership = Membership.from_environment()
    _check_ranks(options, membership)
    ranks = stack.enter_context(open_ranks(membership, timeout_s=options.peer_timeout_s, device=str(model.device)))
    stack.enter_context(ranks.reporting())
    _check_devices(ranks, model.device)
    scale = None if model.scaler is None else dataclasses.asdict(model.scaler.read())
    facts = {**model.facts, **options.shared(), **state_shapes(model.converted.model), "grad_scaler": scale}
    check_same(ranks, facts, "models or options")
    namespace = StoreConfig(
        url=_store_url(options, ranks, stack),
        namespace=options.namespace,
        timeout_s=options.timeout_s,
        durability=options.durability,
        existing=options.existing,
    )
    store = stack.enter_context(
        open_store(
            namespace.url,
            namespace=namespace.namespace,
            schema=model.rows,
            buckets=namespace.buckets,
            timeout_s=namespace.timeout_s,
            durability=namespace.durability,
        )
    )
    store.check(reloads=bool(options.checkpoint_dir), resets=options.existing == "reset")
    cache = new_cache(model, options)
    model.converted.bind(cache)
    peers = ranks.peers
    replicas = None
    if peers is not None:
        # Ranks may have any numbers of micro-batches, and give some up: only the end of a step says that it is there.
        backwards = 1 if options.accumulate == 1 else _ANY_NUMBER
        replicas = stack.enter_context(DenseParallel(model.converted.model, peers.dense, backwards_per_step=backwards))
    dense, dense_parts = _dense_part(model, options, cache, replicas)
    parts = (*parts, *dense_parts)
    checkpoints = stack.enter_context(
        Checkpoints(
            CheckpointConfig(
                dir=options.checkpoint_dir,
                every=options.checkpoint_every,
                resume=options.resume,
                keep=options.keep,
                take_over=options.take_over,
            ),
            namespace,
            ranks,
            JobFacts(
                settings=model.facts,
                rows=model.rows,
                world_size=ranks.world_size,
                arithmetic=tuple(ranks.gather(arithmetic_of(str(model.device)))),
            ),
            store,
            cache=cache,
            read_ahead=options.read_ahead,
            timeout_s=options.peer_timeout_s,
            dense=dense,
            parts=parts,
            clears_refused=False,
        )
    )
    claim = partial(initial.claim, ranks, store, checkpoints, cache)  # the first run's only
    engine = Engine(
        layout=model.converted.layout,
        cache=cache,
        store=store,
        dense=dense,
        prepare=batches.prepare,
        settings=EngineSettings(prefetch_depth=options.prefetch_depth, read_ahead=options.read_ahead),
        row_steps=row_steps_of(model.converted.layout, model.converted.optimizers),
        peers=peers,
        claim=claim,
        recorder=checkpoints.recorder,
        known=checkpoints.known,
        parts=parts,
    )
    ranks.listen(engine.abort)
    spec = spec_of(model, options, ranks.world_size)
    return OpenPipeline(
        ranks=ranks,
        store=store,
        checkpoints=checkpoints,
        planner=stack.enter_context(
            select_planner(
                spec, planner=options.planner, group=None if peers is None else peers.plans, uneven=options.uneven
            )
        ),
        engine=engine,
        spec=spec,
        replicas=replicas,
        claim=claim,
    )


def _dense_part(
    model: ModelParts, options: Options, cache: RowCache, replicas: DenseParallel | None
) -> tuple[WholeDense, tuple[LoopPart, ...]]:
    """The dense part, and what it needs beside it."""
    microbatches = options.accumulate
    settings: dict[str, Any] = {
        "model": model.converted.model,
        "optimizer": model.optimizer,
        "executor": model.executor,
        "skips_nonfinite": options.nonfinite == "skip" or model.scaler is not None,
        "replicas": replicas,
        "scale_holder": model.scaler,
    }
    if microbatches == 1:
        return WholeDense(**settings), ()
    return AccumulatedDense(microbatches=microbatches, **settings), (MicroLookups(cache, microbatches),)


def new_cache(model: ModelParts, options: Options) -> RowCache:
    """An empty cache for the rows of a model."""
    return RowCache(
        model.rows,
        options.cache_rows,
        model.device,
        prefetch_depth=options.prefetch_depth,
        kernels=select_kernels(model.rows, model.device, "auto"),
    )


def spec_of(model: ModelParts, options: Options, world_size: int) -> OracleSpec:
    """What the planner plans for."""
    return OracleSpec(
        table_rows=tuple(table.rows for table in model.converted.row_tables),
        features=model.converted.features,
        num_slots=options.cache_rows,
        lookahead=options.lookahead,
        world_size=world_size,
        assign="own" if world_size > 1 else "contiguous",
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
            f"store is {options.store}, which is private to one process; {membership.world_size} ranks need a server: "
            "leave store out, or name a server"
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
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-"))
        url = stack.enter_context(EmbeddedServer(Path(folder), durability=options.durability)).url
    found: str = ranks.share(url)
    return found
