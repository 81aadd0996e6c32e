"""`PlannedData`: a data source with its plans, in the calling process. `service` serves it over gRPC.

    loader ──Batch──> planner's window (lookahead) ──CachePlan──> PlannedBatch ──for_rank──> RankBatch

With shards (`cacher.shards`) the loader leaves the ids' columns out where the shards' results have all of them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Generator, Mapping
from contextlib import closing, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.oracle.batch_indexer import BatchIndexer
from bagpipe.oracle.plan import OracleSpec, RowList
from bagpipe.oracle.planner import make_planner
from bagpipe.oracle.rank_batch import Phase, RankBatch
from bagpipe.oracle.shard import shard_features, shard_spec
from bagpipe.oracle.spec_check import check_spec
from bagpipe.util.programs import command_of
from cacher.identity import identity_of
from cacher.known_rows import known_rows as known_rows_of
from cacher.planned_phase import PlannedPhase
from cacher.shard_stream import ShardTask
from cacher.shards import Shards
from data.formats import check_test_source, open_eval_source, open_source
from data.loader import LookaheadLoader, open_loader
from data.narrowed import narrowed
from data.next_use_source import told_source
from data.row_stage import admitted_schema
from data.source import Source

__all__ = ["PlannedData"]

_LOG = logging.getLogger("cacher")


class PlannedData:
    """A data set and its plans. Also an in-process `bagpipe.oracle.rank_batch.BatchSource`.

    Args:
        config: of the data.
        seed: of the data order (and of synthetic data).
        folder: `checkpoint.dir`, where the rows are named with which jobs begin; empty: none.

    Attributes:
        schema: of the data.
        identity: what the plans depend on besides `config`.
        shards: that index its batches; None: there are none.

    Raises:
        InputError: the data cannot be opened.
    """

    def __init__(self, config: DataConfig, seed: int, folder: str = "") -> None:
        self._config = config
        self._folder = folder
        self._seed = seed
        source = open_source(config, seed)
        held_out = open_eval_source(config, source, seed)
        check_test_source(config, source, seed)
        files = [*source.files, *filter(None, [config.schema]), *(held_out.files if held_out is not None else ())]
        self.identity = identity_of(files, source.layout, full=config.identity == "full")
        self._sources: Mapping[Phase, Source] = {"train": source, "eval": held_out or source}
        self._skipped_rows: dict[Phase, int] = {}
        self.schema = admitted_schema(config, source.schema)
        self.shards: Shards | None = None

    @property
    def is_stream(self) -> bool:
        """The training data can grow: plans depend on when batches came, so no other process can make them again."""
        return self._config.is_stream

    def phase(
        self,
        phase: Phase,
        spec: OracleSpec,
        *,
        max_steps: int = 0,
        first_batch: int = 0,
        reader_state: Mapping[str, Any] | None = None,
        known_rows: str = "",
        fills_windows: bool = False,
    ) -> PlannedPhase:
        """The batches of a phase, planned for all ranks of `spec`. Any number of phases can run at a time.

        Args:
            phase: the training or the held-out examples.
            spec: what to plan for.
            max_steps: leave out the batches from this one on (planned as if all came); 0: none.
            first_batch: begin with this batch and empty caches.
            reader_state: of a batch before `first_batch`. Ignored if it is of other data or after `first_batch`, unless
                the data is a stream.
            known_rows: file of the rows that are there before batch 0, see `cacher.known_rows`; empty: there are none.
            fills_windows: plan as if all batches were there: the plans are a function of the data alone.

        Raises:
            InputError: `spec` cannot be planned for. Iterating: see `BatchSource`.
        """
        source, spec = self._told(phase, spec)
        sharded = None
        if self.shards is not None:
            sharded = self.shards.phase(phase, spec, first_batch=first_batch, reader_state=reader_state)
        indexer, window = (None, None) if sharded is None else (sharded.indexer, sharded.window)
        planner = make_planner(spec, indexer, window)
        if sharded is not None and sharded.is_narrow:
            source = narrowed(source, (), dense=True)
        known = known_rows_of(known_rows, self._folder, spec, self.schema) if phase == "train" else None
        loader = self._loader(phase, first_batch, None if planner.learns else reader_state, source, known)
        waits = self.is_stream and phase == "train" and not fills_windows
        return PlannedPhase(
            loader,
            planner,
            num_features=len(self.schema.features),
            max_steps=max_steps,
            first_batch=first_batch,
            patience_s=self._config.stream_wait_s if waits else None,
            shards=sharded,
        )

    def _told(self, phase: Phase, spec: OracleSpec) -> tuple[Source, OracleSpec]:
        """The source of a phase and its spec: only training with a cache, on annotated files, sees the whole log.

        Raises:
            InputError: the files are annotated for another training; or `spec` cannot be planned for.
        """
        check_spec(spec)
        source = self._sources[phase]
        if spec.horizon != "log":
            return source, spec
        is_asked = phase == "train" and spec.num_slots > 0
        told = told_source(source, self._config, self._seed) if is_asked else None
        if told is not None:
            return told, spec
        if is_asked:
            _LOG.warning(
                "oracle.horizon log: %s is not annotated (%s convert --next-use), so the window of %d batches is used",
                self._config.path or self._config.format,
                command_of("data"),
                spec.lookahead,
            )
        return source, dataclasses.replace(spec, horizon="window")

    def shard_task(
        self,
        phase: Phase,
        spec: OracleSpec,
        tables: Collection[int],
        *,
        next_batch: int,
        reader_state: Mapping[str, Any] | None,
        credits: int,
        with_lengths: bool,
        with_examples: bool,
    ) -> ShardTask:
        """What to index as a shard of another cacher, with a loader of the columns that it needs.

        Args:
            phase, spec, reader_state: as in `phase`.
            tables: of the shard.
            next_batch, credits, with_lengths, with_examples: see `ShardTask`.

        Raises:
            InputError: `spec` cannot be planned for.
        """
        check_spec(spec)
        features = shard_features(spec, tables)
        source = narrowed(self._sources[phase], features, dense=False)
        return ShardTask(
            loader=self._loader(phase, next_batch, reader_state, source),
            indexer=BatchIndexer(shard_spec(spec, tables, features)),
            next_batch=next_batch,
            credits=credits,
            with_lengths=with_lengths,
            with_examples=with_examples,
        )

    def ids_by_feature(self) -> NDArray[np.float64]:
        """float64 ``[num_features]``: ids of each feature in the first block of the data; equal ones if it is bad."""
        source = self._sources["train"]
        with suppress(InputError, StopIteration):
            block = next(source.blocks(source.segments()[0]))
            counts: NDArray[np.float64] = source.read(block).lengths.sum(axis=1, dtype=np.float64)
            return counts
        return np.ones(len(self.schema.features))

    def _loader(
        self,
        phase: Phase,
        first_batch: int,
        state: Mapping[str, Any] | None,
        source: Source | None = None,
        known: RowList | None = None,
    ) -> LookaheadLoader:
        """A loader that begins at `state` if that leads to `first_batch`, else at the first batch.

        Raises:
            InputError: the data is a stream, whose first batches can be gone, and `state` is of another one.
        """
        source = self._sources[phase] if source is None else source
        is_before = state is not None and type(state.get("batch")) is int and state["batch"] <= first_batch
        if self.is_stream and phase == "train":
            if first_batch and not is_before:
                raise InputError(f"a stream goes on from a position at or before batch {first_batch}, got {state}")
            return open_loader(self._config, seed=self._seed, phase=phase, source=source, state=state)
        if is_before:
            with suppress(InputError):  # the state of other data, or no reader state
                return open_loader(self._config, seed=self._seed, phase=phase, source=source, state=state, known=known)
        return open_loader(self._config, seed=self._seed, phase=phase, source=source, known=known)

    def batches(
        self,
        phase: Phase,
        spec: OracleSpec,
        *,
        max_steps: int = 0,
        first_batch: int = 0,
        reader_state: Mapping[str, Any] | None = None,
        known_rows: str = "",
        rank: int = 0,
    ) -> Generator[RankBatch, None, None]:
        """One rank's batches of a phase, see `BatchSource`. Closing the generator stops the loader."""
        asked = self.phase(
            phase,
            spec,
            max_steps=max_steps,
            first_batch=first_batch,
            reader_state=reader_state,
            known_rows=known_rows,
            fills_windows=spec.world_size > 1,  # each rank makes the plans for itself
        )
        with closing(asked) as batches:
            try:
                for batch in batches:
                    self._skipped_rows[phase] = batches.skipped_rows
                    yield batch.for_rank(rank)
            finally:
                self._skipped_rows[phase] = batches.skipped_rows

    def skipped_rows(self) -> int:
        """Malformed rows skipped so far: those up to the last batch yielded, of each phase."""
        return sum(self._skipped_rows.values())
