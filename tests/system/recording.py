"""In-process jobs with checkpoints: real oracle, engines, recorders, files and recovery, over a store in memory.

Each call of `Recorded.run` is one start of the job: it recovers, restores and trains on. It can be ended at any batch.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.dense_state import load_of_rank, restore_random_state
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.manifest import Part
from bagpipe.checkpoint.publisher import Publisher
from bagpipe.checkpoint.recorder import Recorder
from bagpipe.checkpoint.recovery import recover
from bagpipe.checkpoint.writer import CheckpointPaths
from bagpipe.config.sections import Config
from bagpipe.dense.parallel.broadcast import share_stages
from bagpipe.errors import ChangedRowError, StoreError
from bagpipe.jobs.row_check import sums_of_checkpoint
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.stage.mesh import held_stages
from bagpipe.store.audit import stored_sums
from bagpipe.store.fencing.fence import Fence
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.local_peers import LocalPeers, local_peers
from bagpipe.training.dense import DensePart
from bagpipe.training.digest import dense_digest, embedding_digest
from bagpipe.training.engine import Engine, OnBatch
from bagpipe.training.part import LoopPart
from bagpipe.training.progress import Progress, RunResult
from cacher.planning import PlannedData
from tests.checkpoint.samples import empty_manifest
from tests.system.rank_threads import RankOrderSum, batches_of_rank, dense_of_rank
from trainer.assembly import BuiltModel, build_cache, build_dense, build_engine, build_parts, build_training_model

__all__ = ["Crash", "Recorded", "RecordedOutcome", "recorded"]


NUM_BUCKETS = 8


class Crash(Exception):
    """Simulated death of a process, raised in a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOutcome:
    """Final numbers of one start of the job."""

    digests: tuple[str, str]
    results: tuple[RunResult, ...]
    first_batch: int

    @property
    def totals(self) -> tuple[float, int, int]:
        """Loss sum, samples and batches of the whole job."""
        progress = [result.progress for result in self.results]
        losses = sum(float(each.loss_sum) for each in progress)
        return losses, sum(each.samples for each in progress), progress[0].steps


def _never(warning: str) -> None:
    raise AssertionError(warning)


@dataclass(slots=True, kw_only=True, eq=False)
class Recorded:
    """A job with checkpoints that can be started repeatedly.

    Attributes:
        config: of the job.
        root: folder of its checkpoints.
        name: of its store.
        every: batches between checkpoints.
        world_size: ranks.
        rows_only: no files: checkpoints only close logs.
        prepare: called with every engine before it trains; can return an `on_batch` (see `Engine.train`).
        change_batches: replaces a rank's batches.
        by_hand: steps of checkpoints made between two batches; the caller then walks the compute lane.
        run_ends: steps at which a start ends one run of the engine and begins the next.
        more_parts: makes further parts of a rank's loop, of its progress in the checkpoint that is resumed from.
        on_folder: called with a checkpoint's step before its folder is created.
        on_broken: called with a line about each checkpoint that is skipped; the default fails.
    """

    config: Config
    root: Path
    name: str
    every: int
    world_size: int = 1
    rows_only: bool = False
    prepare: Callable[[Engine], OnBatch | None] = lambda engine: None
    change_batches: Callable[[int, Iterator[RankBatch]], Iterator[RankBatch]] = lambda rank, batches: batches
    by_hand: Collection[int] = ()
    run_ends: Sequence[int] = ()
    more_parts: Callable[[int, Mapping[str, Any]], Sequence[LoopPart]] = lambda rank, carried: ()
    on_folder: Callable[[int], None] = lambda step: None
    on_broken: Callable[[str], None] = _never
    stores: list[MemoryStore] = field(default_factory=list)

    def run(self, *, crash_at: int | None = None, crash_rank: int = 0) -> RecordedOutcome:
        """Start the job. `crash_at`: raise Crash after so many batches of this start."""
        torch.set_num_threads(1)
        schema = PlannedData(self.config.data, self.config.run.seed).schema
        peers = local_peers(self.world_size)
        barrier = threading.Barrier(self.world_size, timeout=250)
        with ExitStack() as stack:
            folder = CheckpointFolder(self.root)
            generation = folder.new_generation()
            token = f"{generation}-{generation:032x}"
            built_models = [build_training_model(self.config, schema, self.world_size) for _ in peers]
            resumed = folder.newest(self.on_broken) or folder.publish(
                empty_manifest(generation, token, lineage=f"{generation:032x}", schema=built_models[0].rows)
            )
            stores = [stack.enter_context(self._open(built)) for built in built_models]
            self.stores = stores
            stores[0].claim(reloads=True)
            ledger = stack.enter_context(stores[0].ledger())
            rows = CheckpointRows(resumed.folder, resumed.manifest, built_models[0].rows)
            recover(
                stores[0],
                ledger,
                token=token,
                checkpoint=resumed.manifest,
                rows=rows,
                num_writers=self.world_size,
            )
            first_sums = sums_of_checkpoint(resumed.manifest, rows, NUM_BUCKETS)
            sums: list[RankOrderSum] = []
            ranks: list[_Rank] = []
            for peer, built, store in zip(peers, built_models, stores, strict=True):
                store.fence(Fence(token=token, writer=peer.rank, epoch=1))
                publisher = Publisher(
                    folder,
                    resumed,
                    replace(resumed.manifest, generation=generation, token=token, world_size=self.world_size),
                    built.rows,
                    rank=peer.rank,
                    ledger=ledger,
                    keep=100,
                    full_every=3,
                    timeout_s=60.0,
                )
                publisher.first_sums = first_sums
                cache, dense = build_cache(built), self._dense(built, peer, sums, barrier)
                carried = _progress_of(resumed, peer.rank)
                parts = (*build_parts(built, dense), *self.more_parts(peer.rank, carried))
                recorder = self._recorder(
                    folder,
                    generation,
                    resumed.manifest.step,
                    publisher,
                    rank=peer.rank,
                    cache=cache,
                    store=store,
                    dense=dense,
                    read_ahead=self.config.cache.read_ahead,
                    report=(lambda error, peer=peer: peer.report(error)) if self.world_size > 1 else None,
                )
                engine = build_engine(
                    built,
                    store,
                    cache=cache,
                    dense=dense,
                    parts=parts,
                    peers=peer if self.world_size > 1 else None,
                    claim=lambda: False,
                    recorder=recorder,
                    known=rows.contains,
                )
                _restore(dense, parts, resumed, peer.rank)
                on_batch = self.prepare(engine)
                if crash_at is not None and peer.rank == crash_rank:
                    on_batch = _Fuse(resumed.manifest.step + crash_at)
                ranks.append(
                    _Rank(
                        peer=peer,
                        built=built,
                        engine=engine,
                        recorder=recorder,
                        publisher=publisher,
                        on_batch=on_batch,
                    )
                )
            results = _together(ranks, barrier, lambda rank: self._train(rank, resumed))
            expected = sum((store.sum_changes() for store in stores), first_sums)
            if len(stored_sums(stores[0]).differing(expected)):
                raise ChangedRowError("the store does not hold the rows last written")
            return RecordedOutcome(
                digests=(
                    dense_digest(ranks[0].engine.dense.model, ranks[0].engine.dense.optimizer),
                    embedding_digest(stores[0]),
                ),
                results=tuple(results),
                first_batch=resumed.manifest.step,
            )

    def _open(self, built: BuiltModel) -> MemoryStore:
        return MemoryStore(built.rows, name=self.name, num_buckets=NUM_BUCKETS)

    def _recorder(
        self, folder: CheckpointFolder, generation: int, first_batch: int, publisher: Publisher, **more: Any
    ) -> Recorder:
        def publish(step: int, epoch: int, part: Part | None) -> None:
            if part is not None:
                publisher(step, epoch, part)

        def step_folder(step: int) -> Path:
            self.on_folder(step)
            return folder.step_folder(generation, step)

        paths = CheckpointPaths(generation=folder.generation_folder(generation), step=step_folder)
        return Recorder(
            every=self.every,
            first_batch=first_batch,
            paths=None if self.rows_only else paths,
            on_part=publish,
            **more,
        )

    def _dense(
        self, built: BuiltModel, peer: LocalPeers, sums: list[RankOrderSum], barrier: threading.Barrier
    ) -> DensePart:
        return build_dense(built) if self.world_size == 1 else dense_of_rank(built, peer, sums, barrier)

    def _train(self, rank: _Rank, resumed: Checkpoint) -> RunResult:
        first_batch, carried = resumed.manifest.step, _progress_of(resumed, rank.peer.rank)
        with ExitStack() as stack:
            stack.enter_context(rank.recorder)
            stack.callback(rank.publisher.close)
            for end in (*(end for end in self.run_ends if end > first_batch), None):
                batches = stack.enter_context(closing(self._batches(rank, first_batch)))
                changed = self.change_batches(rank.peer.rank, batches)
                if end is not None:
                    changed = itertools.islice(changed, end - first_batch)
                if self.by_hand or self.run_ends:
                    result, carried = self._train_in_steps(rank, changed, first_batch, carried)
                else:
                    result = rank.engine.train(
                        changed, first_batch=first_batch, carried=carried, on_batch=rank.on_batch
                    )
                first_batch = end or first_batch
        if rank.built.stages is not None and self.world_size > 1:
            held = held_stages(rank.built.stages.staged, rank.built.stages.mesh)
            share_stages(held, rank.engine.dense.optimizer, rank.peer.dense, rank.peer.gather)
        return result

    def _train_in_steps(
        self, rank: _Rank, batches: Iterator[RankBatch], first_batch: int, carried: Mapping[str, Any]
    ) -> tuple[RunResult, Mapping[str, Any]]:
        with rank.engine.train_in_steps(batches, first_batch=first_batch, carried=carried) as run:
            while True:
                if run.next_batch in self.by_hand:
                    run.checkpoint()
                if isinstance(rank.on_batch, _Fuse) and run.next_batch == rank.on_batch.at:
                    rank.peer.close()  # the lanes of the other ranks wait for this one
                    raise Crash
                if run.step() is None:
                    result = run.end()
                    return result, {**run.carried(), "loss_sum": result.progress.loss_sum.item()}

    def _batches(self, rank: _Rank, first_batch: int) -> Iterator[RankBatch]:
        spec = rank.built.spec
        if self.world_size == 1:
            return PlannedData(self.config.data, self.config.run.seed).batches("train", spec, first_batch=first_batch)
        return batches_of_rank(self.config, spec, "train", rank.peer.rank, first_batch=first_batch)


def recorded(config: Config, root: Path, *, every: int = 3, **values: Any) -> Recorded:
    """A new job with its own folder under `root` and its own store."""
    name = uuid.uuid4().hex
    return Recorded(config=config, root=root / name, name=name, every=every, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    peer: LocalPeers
    built: BuiltModel
    engine: Engine
    recorder: Recorder
    publisher: Publisher
    on_batch: OnBatch | None


@dataclass(frozen=True, slots=True)
class _Fuse:
    """An `on_batch` that raises Crash after a number of batches."""

    at: int

    def __call__(self, totals: Callable[[], Progress]) -> None:
        if totals().steps == self.at:
            raise Crash


def _together(ranks: list[_Rank], barrier: threading.Barrier, train: Callable[[_Rank], RunResult]) -> list[RunResult]:
    """Run one thread per rank and return their results. A crash ends all ranks and is raised."""
    results: dict[int, RunResult] = {}
    errors: list[BaseException] = []

    def work(rank: _Rank) -> None:
        try:
            results[rank.peer.rank] = train(rank)
        except BaseException as error:
            errors.append(error)
            rank.peer.close()
            barrier.abort()
            for other in ranks:
                other.publisher.close()

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank-{rank.peer.rank}") for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if isinstance(error, Crash | StoreError)), errors[0])
    return [results[number] for number in range(len(ranks))]


def _progress_of(resumed: Checkpoint, rank: int) -> Mapping[str, Any]:
    parts = resumed.manifest.parts
    return parts[rank].progress if parts else {}


def _restore(dense: DensePart, loop_parts: Sequence[LoopPart], resumed: Checkpoint, rank: int) -> None:
    parts = list(resumed.manifest.parts)
    if not parts:
        return
    state = load_of_rank(resumed.folder, [part.dense for part in parts], rank, is_staged=dense.is_staged)
    dense.restore(state)
    for loop_part in (dense, *loop_parts):
        loop_part.load_tensors(state.of_part(loop_part.name))
    restore_random_state(state.rng(), torch.device("cpu"))
