"""Whole jobs of several ranks as threads of this process: real oracle, engines, exchange and store.

Jobs without stages sum dense gradients with `RankOrderSum` instead of `DenseParallel`, whose hooks would run in
autograd threads shared by all ranks.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bagpipe.config.sections import Config
from bagpipe.dense.parallel.broadcast import share_stages
from bagpipe.dense.parallel.stage_sums import StageSums
from bagpipe.errors import JobError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.stage.mesh import held_stages
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.local_peers import LocalPeers, local_peers
from bagpipe.training.dense import DensePart
from bagpipe.training.digest import dense_digest, embedding_digest
from bagpipe.training.engine import Engine
from bagpipe.training.part import LoopPart
from bagpipe.training.progress import RunResult
from cacher.planning import PlannedData
from data.formats import open_source
from data.loader import open_loader
from trainer.assembly import BuiltModel, build_dense, build_engine, build_parts, build_training_model
from trainer.precondition import layered_ranks
from trainer.shards import open_stage_shards, open_step_groups

__all__ = ["RankOrderSum", "RanksOutcome", "batches_of_rank", "dense_of_rank", "engine_of_rank", "run_ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOutcome:
    """Final numbers of a job of several ranks.

    Attributes:
        rows: per table name, ids in ascending order and their records.
        dense: parameters of rank 0 by name; all ranks' are equal.
        results: by rank.
        scores: logits of the held-out examples, by rank.
        rows_sent: row vectors and row gradients that crossed ranks.
    """

    dense_digest: str
    embedding_digest: str
    rows: dict[str, tuple[NDArray[np.int64], NDArray[Any]]]
    dense: dict[str, torch.Tensor]
    results: tuple[RunResult, ...]
    rows_sent: int
    scores: tuple[tuple[float, ...], ...]

    @property
    def digests(self) -> tuple[str, str]:
        return self.dense_digest, self.embedding_digest


class RankOrderSum:
    """`GradientSum` for ranks in threads: adds the gradients of all ranks in rank order."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], all_ranks: list[RankOrderSum], barrier: threading.Barrier
    ) -> None:
        self.parameters = parameters
        self.is_bad = False
        self._all_ranks = all_ranks
        self._barrier = barrier
        all_ranks.append(self)

    def reduce(self, *, is_bad: bool | None = None) -> bool:
        self.is_bad = bool(is_bad)
        self._barrier.wait()
        if any(rank.is_bad for rank in self._all_ranks):
            self._barrier.wait()
            return True
        sums = []
        for same in zip(*(rank.parameters for rank in self._all_ranks), strict=True):
            total = torch.zeros_like(same[0])
            for parameter in same:
                if parameter.grad is not None:
                    total = total + parameter.grad
            sums.append(total)
        self._barrier.wait()
        for parameter, total in zip(self.parameters, sums, strict=True):
            parameter.grad = total
        return False


def batches_of_rank(
    config: Config, spec: OracleSpec, phase: str, rank: int, *, first_batch: int = 0
) -> Iterator[RankBatch]:
    """Batches of one rank. Every rank plans on its own; all plans must be equal."""
    source = open_source(config.data, config.run.seed)
    with open_loader(config.data, seed=config.run.seed, phase=phase, source=source) as loader:  # type: ignore[arg-type]
        batches = (batch for batch in loader if batch.index >= first_batch)
        for batch, plan in plan_batches(batches, spec):
            yield RankBatch.of(batch, plan, rank)


def run_ranks(
    config: Config,
    world_size: int,
    *,
    change_batches: Callable[[int, Iterator[RankBatch]], Iterator[RankBatch]] = lambda rank, batches: batches,
    train: Callable[[LocalPeers, Engine, Iterator[RankBatch]], RunResult] = lambda peer, engine, batches: engine.train(
        batches
    ),
    make_parts: Callable[[BuiltModel, DensePart], Sequence[LoopPart]] = build_parts,
) -> RanksOutcome:
    """Train, and evaluate if the configuration holds examples out.

    Args:
        config: the job.
        world_size: ranks.
        change_batches: replaces a rank's training batches.
        train: a rank's run over them.
        make_parts: further parts of a rank's loop.
    """
    torch.set_num_threads(config.run.threads)
    peers = local_peers(world_size)
    barrier = threading.Barrier(world_size, timeout=250)
    sums: list[RankOrderSum] = []
    name = f"ranks-{uuid.uuid4().hex}"
    schema = PlannedData(config.data, config.run.seed).schema
    with ExitStack() as stack:
        jobs = []
        for peer in peers:
            built = build_training_model(config, schema, world_size)
            store = stack.enter_context(MemoryStore(built.rows, name=name, num_buckets=8))
            dense = dense_of_rank(built, peer, sums, barrier)
            parts, claim = make_parts(built, dense), _claim(peer, store)
            engine = build_engine(built, store, dense=dense, peers=peer, parts=parts, claim=claim)
            jobs.append((peer, engine, built))
        results: list[RunResult | BaseException | None] = [None] * world_size
        scores: list[list[float]] = [[] for _ in peers]

        def work(peer: LocalPeers) -> None:
            _, engine, built = jobs[peer.rank]
            try:
                with closing(batches_of_rank(config, built.spec, "train", peer.rank)) as batches:  # type: ignore[type-var]
                    results[peer.rank] = train(peer, engine, change_batches(peer.rank, batches))
                if built.stages is not None:
                    held = held_stages(built.stages.staged, built.stages.mesh)
                    share_stages(held, engine.dense.optimizer, peer.dense, peer.gather)
                if config.data.eval_fraction:
                    with closing(batches_of_rank(config, built.eval_spec, "eval", peer.rank)) as batches:  # type: ignore[type-var]
                        engine.evaluate(batches, lambda logits, labels: scores[peer.rank].extend(logits.tolist()))
            except BaseException as error:
                results[peer.rank] = error
                peer.close()
                barrier.abort()

        threads = [threading.Thread(target=work, args=(peer,), name=f"rank-{peer.rank}") for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise next((error for error in errors if type(error) is JobError), errors[0])
        engines = [engine for _, engine, _ in jobs]
        digests = {dense_digest(engine.dense.model, engine.dense.optimizer) for engine in engines}
        assert len(digests) == 1, "the ranks' dense parts differ"
        store = engines[0].store
        return RanksOutcome(
            dense_digest=digests.pop(),
            embedding_digest=embedding_digest(store),
            rows={
                table.name: (ids, store.read(number, ids).rows.copy())
                for number, table in enumerate(store.schema.tables)
                for ids in [store.ids(number)]
            },
            dense={name: value.detach().clone() for name, value in engines[0].dense.model.state_dict().items()},
            results=tuple(result for result in results if isinstance(result, RunResult)),
            rows_sent=sum(sum(peer.rows_sent.values()) for peer in peers),
            scores=tuple(tuple(row) for row in scores),
        )


def engine_of_rank(
    built: BuiltModel,
    store: MemoryStore,
    peer: LocalPeers,
    all_ranks: list[RankOrderSum],
    barrier: threading.Barrier,
    **more: Any,
) -> Engine:
    """Engine of a rank in a thread; `more` as in `build_engine`."""
    dense = dense_of_rank(built, peer, all_ranks, barrier)
    return build_engine(built, store, dense=dense, peers=peer, **more)


def dense_of_rank(
    built: BuiltModel, peer: LocalPeers, all_ranks: list[RankOrderSum], barrier: threading.Barrier
) -> DensePart:
    """Dense part of a rank, with gradients summed over all ranks, or over the holders of each stage."""
    if built.stages is None:
        parameters = list(built.converted.model.parameters())
        replicas = RankOrderSum(parameters, all_ranks, barrier)
        return build_dense(built, rank=peer.rank, replicas=replicas, layered=peer.dense)
    mesh = built.stages.mesh
    held = held_stages(built.stages.staged, mesh)
    layered = layered_ranks(built.stages.staged, mesh) if built.config.optim.precondition == "kfac" else ()
    every = tuple(range(peer.world_size))
    groups = peer.open_stage_groups([*(stage.holders for stage in held), layered, every])
    links = peer.open_links(mesh.step.num_processes) if mesh.step.num_processes > 1 else None
    if built.config.dense.shard != "none":
        steps = open_step_groups(built.config.optim, held, peer)
        shares = open_stage_shards(built.converted.model, built.config.dense, held, groups, peer.rank, steps)
        found = {"groups": groups, "layered": groups.get(layered), "ranks": groups[every]}
        return build_dense(built, rank=peer.rank, links=links, shares=shares, **found)
    sums = StageSums(held, groups, rank=peer.rank)
    found = {"groups": groups, "layered": groups.get(layered), "ranks": groups[every]}
    return build_dense(built, rank=peer.rank, links=links, reduce=sums.reduce, **found)


def _claim(peer: LocalPeers, store: MemoryStore) -> Callable[[], bool]:
    return lambda: any(peer.gather(peer.rank == 0 and store.claim()))
