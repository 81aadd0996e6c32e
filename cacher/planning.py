"""`PlannedData`: a data source with its plans, in the calling process. `service` serves it over gRPC.

    loader ──Batch──> planner's window (lookahead) ──CachePlan──> PlannedBatch ──for_rank──> RankBatch

Bad data ends the stream after all batches before it, whatever the lookahead. A batch that cannot fit the cache ends it
immediately, because the job cannot run as configured. The window of a stream is planned with the batches there are, if
none comes for a while.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

from bagpipe.config.sections import DataConfig
from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.capacity import capacity_error
from bagpipe.oracle.direct import DirectPlanner
from bagpipe.oracle.plan import CachePlan, OracleSpec
from bagpipe.oracle.planner import Planner, make_planner
from bagpipe.oracle.rank_batch import Phase, PlanSpan, RankBatch
from bagpipe.oracle.spec_check import check_spec
from bagpipe.types.batch import Batch
from bagpipe.util.programs import command_of
from cacher.identity import identity_of
from data.formats import check_test_source, open_eval_source, open_source
from data.loader import LookaheadLoader, open_loader
from data.next_use_source import told_source
from data.source import Source

__all__ = ["PlannedBatch", "PlannedData", "PlannedPhase"]

_LOG = logging.getLogger("cacher")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBatch:
    """A global batch and its plan for all ranks."""

    batch: Batch
    plan: CachePlan
    span: PlanSpan

    def for_rank(self, rank: int) -> RankBatch:
        """One rank's part. Each call cuts it out anew."""
        return RankBatch.of(self.batch, self.plan, rank, self.span)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WindowBatch:
    """A batch in the window.

    Attributes:
        read_start_ns: when its reading began.
        skipped_rows: malformed rows skipped up to its end.
    """

    batch: Batch
    read_start_ns: int
    skipped_rows: int


class PlannedPhase:
    """The planned batches of one phase, in order. An iterator; `close` stops the loader.

    Args:
        loader: begins at or before `first_batch`; at batch 0 if `planner` learns.
        planner: from `make_planner`.
        max_steps, first_batch: see `PlannedData.phase`.
        patience_s: plan with a shorter window if no batch comes for so long; None: wait for a full one.

    Attributes:
        spec: of the plans.
        skipped_rows: malformed rows up to the last batch yielded; at the end of the data, all of them.
    """

    def __init__(
        self,
        loader: LookaheadLoader,
        planner: Planner | DirectPlanner,
        *,
        max_steps: int = 0,
        first_batch: int = 0,
        patience_s: float | None = None,
    ) -> None:
        self.spec = planner.spec
        self.skipped_rows = 0
        self._loader = loader
        self._first_batch = first_batch
        self._next_batch = first_batch
        self._max_steps = max_steps
        self._planner = planner
        self._patience_s = patience_s
        self._is_stopped = False
        self._data_end: int | None = None  # number of batches in the data
        self._window: deque[_WindowBatch] = deque()
        self._batches = self._plan_all()

    def __iter__(self) -> PlannedPhase:
        return self

    def __next__(self) -> PlannedBatch:
        return next(self._batches)

    @property
    def num_features(self) -> int:
        """Of the data."""
        return len(self._loader.source.schema.features)

    @property
    def end(self) -> int | None:
        """Number of the first batch after the phase, once all batches have been yielded; else None.

        Stays None if reading was stopped or failed: the end of the iterator alone is not the end of the data.
        """
        if self._is_stopped:
            return None
        has_ended = self._data_end is not None and self._next_batch >= self._data_end
        return self._next_batch if has_ended or self._has_enough() else None

    def stop(self) -> None:
        """Yield nothing more and end as soon as possible. From any thread."""
        self._is_stopped = True
        self._loader.wake()

    def close(self) -> None:
        """Stop reading and planning. Idempotent."""
        self._batches.close()

    def _plan_all(self) -> Generator[PlannedBatch, None, None]:
        if self._is_stopped:
            return
        with self._loader:
            if self._has_enough():
                self.skipped_rows = self._skipped_before_first()
                return
            error = yield from self._fill()
            while self._window and not self._is_done():
                yield self._plan()
            if self._is_done():
                return
            # Includes those after the last good row.
            self.skipped_rows = self._loader.skipped_rows()
            if error is not None:
                raise error

    def _skipped_before_first(self) -> int:
        """Malformed rows before the first batch of a phase that was resumed after its last step."""
        while int(self._loader.state()["batch"]) < self._first_batch and not self._is_stopped:
            if next(self._loader, None) is None:
                break
        return self._loader.skipped_rows()

    def _fill(self) -> Generator[PlannedBatch, None, InputError | None]:
        """Read and plan while the data lasts. Returns None, or the error of bad data."""
        number = int(self._loader.state()["batch"])  # of the batch that is read next
        while not self._is_done():
            read_start_ns = time.monotonic_ns()
            if self._patience_s is not None:
                yield from self._plan_while_waiting(self._patience_s)
                if self._is_done():
                    return None
            try:
                batch = next(self._loader, None)
                if batch is None:
                    self._data_end = number
                    return None
                number = batch.index + 1
                if batch.index < self._first_batch:
                    if self._planner.learns:
                        self._planner.pass_over(batch)
                    continue
                if not self._push(batch):
                    return None
            except CapacityError:
                raise
            except InputError as error:
                return error
            skipped_rows = self._loader.skipped_rows()
            self._window.append(_WindowBatch(batch=batch, read_start_ns=read_start_ns, skipped_rows=skipped_rows))
            if self._planner.is_ready:
                yield self._plan()
        return None

    def _plan_while_waiting(self, patience_s: float) -> Generator[PlannedBatch, None, None]:
        """Return when the next batch is there, or the phase is done. Plan those in the window if it takes long."""
        while not self._loader.wait(patience_s) and not self._is_done():
            while self._window and not self._is_done():
                yield self._plan(more_follow=True)

    def _push(self, batch: Batch) -> bool:
        """Add a batch to the planner's window. False if it is too large but not wanted."""
        try:
            self._planner.push(batch)
        except CapacityError:
            if self._max_steps and batch.index >= self._max_steps:
                return False
            raise self._capacity_error(batch) from None
        return True

    def _capacity_error(self, batch: Batch) -> CapacityError:
        """The error of a batch that does not fit."""
        assert isinstance(self._planner, Planner), "direct mode has no capacity"
        return capacity_error(self._planner, batch, self._wanted(), held_out=self._loader.phase == "eval")

    def _wanted(self) -> Iterator[Batch]:
        """The rest of the batches, up to the last that is wanted."""
        while not self._is_stopped and (self._patience_s is None or self._loader.wait(0)):
            batch = next(self._loader, None)
            if batch is None or (self._max_steps and batch.index >= self._max_steps):
                return
            yield batch

    def _is_done(self) -> bool:
        return self._is_stopped or self._has_enough()

    def _has_enough(self) -> bool:
        return bool(self._max_steps) and self._next_batch >= self._max_steps

    def _plan(self, *, more_follow: bool = False) -> PlannedBatch:
        start_ns = time.monotonic_ns()
        plan = self._planner.plan(more_follow=more_follow)
        waiting = self._window.popleft()
        self._next_batch = plan.batch_index + 1
        self.skipped_rows = waiting.skipped_rows
        span = PlanSpan(read_start_ns=waiting.read_start_ns, plan_start_ns=start_ns, plan_end_ns=time.monotonic_ns())
        return PlannedBatch(batch=waiting.batch, plan=plan, span=span)


class PlannedData:
    """A data set and its plans. Also an in-process `bagpipe.oracle.rank_batch.BatchSource`.

    Args:
        config: of the data.
        seed: of the data order (and of synthetic data).

    Attributes:
        schema: of the data.
        identity: what the plans depend on besides `config`.

    Raises:
        InputError: the data cannot be opened.
    """

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        source = open_source(config, seed)
        held_out = open_eval_source(config, source, seed)
        check_test_source(config, source, seed)
        files = [*source.files, *filter(None, [config.schema]), *(held_out.files if held_out is not None else ())]
        self.identity = identity_of(files, source.layout, full=config.identity == "full")
        self._sources: Mapping[Phase, Source] = {"train": source, "eval": held_out or source}
        self._skipped_rows: dict[Phase, int] = {}
        self.schema = source.schema

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
            fills_windows: plan as if all batches were there: the plans are a function of the data alone.

        Raises:
            InputError: `spec` cannot be planned for. Iterating: see `BatchSource`.
        """
        source, spec = self._told(phase, spec)
        planner = make_planner(spec)
        loader = self._loader(phase, first_batch, None if planner.learns else reader_state, source)
        waits = self.is_stream and phase == "train" and not fills_windows
        patience_s = self._config.stream_wait_s if waits else None
        return PlannedPhase(loader, planner, max_steps=max_steps, first_batch=first_batch, patience_s=patience_s)

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

    def _loader(
        self, phase: Phase, first_batch: int, state: Mapping[str, Any] | None, source: Source | None = None
    ) -> LookaheadLoader:
        """A loader that begins at `state` if that leads to `first_batch`, else at the first batch.

        Raises:
            InputError: the data is a stream, whose first batches can be gone, and `state` is of another one.
        """
        source = source or self._sources[phase]
        is_before = state is not None and type(state.get("batch")) is int and state["batch"] <= first_batch
        if self.is_stream and phase == "train":
            if first_batch and not is_before:
                raise InputError(f"a stream goes on from a position at or before batch {first_batch}, got {state}")
            return open_loader(self._config, seed=self._seed, phase=phase, source=source, state=state)
        if is_before:
            with suppress(InputError):  # the state of other data, or no reader state
                return open_loader(self._config, seed=self._seed, phase=phase, source=source, state=state)
        return open_loader(self._config, seed=self._seed, phase=phase, source=source)

    def batches(
        self,
        phase: Phase,
        spec: OracleSpec,
        *,
        max_steps: int = 0,
        first_batch: int = 0,
        reader_state: Mapping[str, Any] | None = None,
        rank: int = 0,
    ) -> Generator[RankBatch, None, None]:
        """One rank's batches of a phase, see `BatchSource`. Closing the generator stops the loader."""
        asked = self.phase(
            phase,
            spec,
            max_steps=max_steps,
            first_batch=first_batch,
            reader_state=reader_state,
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
