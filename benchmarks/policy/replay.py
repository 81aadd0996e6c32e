"""One cell of a comparison: a policy over a log, by the real planner or by a baseline.

The planner gets the unique rows of each batch in one table; nothing else influences evictions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CapacityError
from bagpipe.oracle.handles import DenseHandles
from bagpipe.oracle.lrfu import TICKS, LrfuClock
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import Planner, plans_of
from bagpipe.types.batch import Batch
from benchmarks.policy.logs import Log
from data.replay.baselines import BASELINES, run_baseline
from data.replay.next_use_file import NextUseFile

__all__ = ["HINDSIGHT", "LOG_ORACLE", "Cell", "replay"]

#: The planner with the number of uses of each row in the whole log, which no online policy knows. It bounds every
#: policy that ranks rows by rate of use.
HINDSIGHT = "hindsight"
#: The planner with each row's next use in the whole log (`OracleSpec.horizon` log), whatever its window.
LOG_ORACLE = "belady-log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Settings and outcome of one policy.

    Attributes:
        policy: of the oracle, a baseline, `HINDSIGHT` or `LOG_ORACLE`.
        lookahead: None for baselines.
        share: cache size as a share of the distinct rows; None: given in rows.
        rows_unique: unique rows, summed over batches.
        rows_fetched: rows read again after an eviction.
        ratio: `rows_fetched` over that of offline-belady.
        waiting: share of batches in which an insert waits for the update of the previous batch.
        error: why it could not be replayed.
    """

    policy: str
    batch_size: int
    lookahead: int | None
    share: float | None
    cache_rows: int
    rows_unique: int | None = None
    rows_fetched: int | None = None
    ratio: float | None = None
    waiting: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Rows read again after an eviction, unique rows, and the share of waiting batches; or the error."""

    rows_unique: int | None = None
    rows_fetched: int | None = None
    waiting: float | None = None
    error: str | None = None


def replay(log: Log, policy: str, lookahead: int | None, cache_rows: int, folder: Path) -> Outcome:
    """Run one policy. A batch that does not fit is the outcome's error."""
    try:
        if policy in BASELINES:
            counts = run_baseline(policy, log.batches, num_rows=log.num_rows, num_slots=cache_rows, folder=folder)
            return Outcome(rows_unique=counts.rows_unique, rows_fetched=counts.misses - log.distinct)
        return _by_planner(log, policy, lookahead or 1, cache_rows, folder)
    except CapacityError as error:
        return Outcome(error=str(error))


def _by_planner(log: Log, policy: str, lookahead: int, cache_rows: int, folder: Path) -> Outcome:
    spec = OracleSpec(
        table_rows=(log.num_rows,),
        features=(FeatureRef(feature=0, table=0),),
        num_slots=cache_rows,
        lookahead=lookahead,
        policy="belady-window" if policy in (HINDSIGHT, LOG_ORACLE) else policy,
        horizon="log" if policy == LOG_ORACLE else "window",
    )
    planner = Planner(spec)
    if policy == HINDSIGHT:
        _reveal(planner, log)
    misses = waiting = 0
    with ExitStack() as stack:
        batches = _batches(log)
        if policy == LOG_ORACLE:
            next_uses = stack.enter_context(NextUseFile(log.batches, log.num_rows, folder))
            batches = (replace(batch, next_use=next_uses[batch.index]) for batch in batches)
        for plan in plans_of(planner, batches):
            owner = plan.owners[0]
            misses += len(owner.fetch)
            waiting += owner.evict_waiting > 0
    return Outcome(
        rows_unique=log.batches.num_rows, rows_fetched=misses - log.distinct, waiting=waiting / len(log.batches)
    )


def _batches(log: Log) -> Iterator[Batch]:
    for number in range(len(log.batches)):
        rows = log.batches[number].astype(np.int64)
        yield Batch(
            index=number,
            dense=np.zeros((1, 0), dtype=np.float32),
            values=rows,
            lengths=np.array([[rows.shape[0]]], dtype=np.int32),
            labels=np.zeros(1, dtype=np.float32),
        )


class _StandingClock(LrfuClock):
    """Rows are worth what they were worth at first: uses add nothing."""

    def use(self, worth: NDArray[np.int32]) -> NDArray[np.int32]:
        return worth


def _reveal(planner: Planner, log: Log) -> None:
    """Set every row's worth to the logarithm of its uses in the whole log. (Reaches into the planner: not a policy.)"""
    uses = np.ones(log.num_rows, dtype=np.int32)
    for number in range(len(log.batches)):
        uses[log.batches[number]] += 1
    handles = planner._handles
    assert isinstance(handles, DenseHandles)
    planner._clock = _StandingClock(planner.spec.num_slots)
    scores = (TICKS * np.log2(uses)).astype(np.int32) + 1
    handles.remember(np.arange(log.num_rows), scores, [log.num_rows])
