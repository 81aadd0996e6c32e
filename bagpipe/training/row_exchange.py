"""The exchange of rows and row gradients between ranks: `ExchangedRows` for training, `EvaluationExchange`.

X_PREPULL, X_PULL                    rows from their owners               lane pull
X_PUSH, X_PUSH_LATE, X_UPDATE_LATE   row gradients to their owners        lane push
X_NORM                               squared norm of those of all ranks   lane push, if it is limited
X_UPDATE                             rows that the next batch uses        lane compute
X_ACK                                every rank has written back          lane ack
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_exchange import Givers, RowExchange
from bagpipe.cache.row_transfer import WRITE_DEPTH
from bagpipe.distributed.interface import Peers
from bagpipe.oracle.handles import dense_sizes
from bagpipe.pipeline.interpret import Handler
from bagpipe.schedule.builders.prefetch_loop import READY_AFTER, declare_evaluation_exchange, declare_exchange
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.nonfinite import NonfiniteGuard
from bagpipe.training.part import Hook, InFlightBatch, LoopPart, LoopRun
from bagpipe.training.rows import RowStepsOfBatch

__all__ = ["EvaluationExchange", "ExchangedRows"]


class EvaluationExchange(LoopPart):
    """Rows travel to the ranks that use them. Nothing changes them, so all rows of a batch travel ahead.

    Args:
        cache: the rows that this rank owns.
        peers: the other ranks.
    """

    row_waits: tuple[str, ...] = ("0X_PREPULL",)

    def __init__(self, cache: RowCache, peers: Peers) -> None:
        self._cache = cache
        self._peers = peers
        self._run: LoopRun

    def declare(self, loop: LoopBuilder) -> None:
        declare_evaluation_exchange(loop)

    def handlers(self) -> Mapping[str, Handler]:
        return {"X_PREPULL": self.pull_all}

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.LOOKUP, when="before", call=self._begin)

    def start(self, run: LoopRun) -> None:
        self._run = run
        self._exchange = RowExchange(self._cache, self._peers)

    def pull_all(self, b: int) -> None:
        context = self._run.in_flight[b].context
        self._exchange.prepull(context)
        self._exchange.pull(context)

    def _begin(self, key: OpKey, b: int) -> None:
        self._exchange.begin(self._run.in_flight[b].context)


class ExchangedRows(EvaluationExchange):
    """Rows travel to the ranks that use them, their gradients to the owners, which update each row once.

    Args:
        cache: the rows that this rank owns.
        peers: the other ranks.
        row_steps: settings of a batch's updates.
        guard: looks at the gradients that other ranks have sent.
        clips: the norm of the gradients of rows is limited: the dense step needs it, and says by what factor.
        rows_delay: see `declare_exchange`.
        givers: of a batch, by rank: whether its backward reaches rows; None: all do.
    """

    row_waits = ("0X_PULL", "0X_PUSH")

    def __init__(
        self,
        cache: RowCache,
        peers: Peers,
        *,
        row_steps: RowStepsOfBatch,
        guard: NonfiniteGuard,
        clips: bool = False,
        rows_delay: int = 0,
        givers: Callable[[int], Givers] = lambda b: None,
    ) -> None:
        super().__init__(cache, peers)
        self._rows_delay = rows_delay
        self._clips = clips
        self._row_steps = row_steps
        self._guard = guard
        self._givers = givers
        # For unbounded tables a planner keeps hashes of ids, or nothing: it can take a new row for an old one.
        is_remembered = dense_sizes([table.rows for table in cache.schema.tables]) is not None
        self._plan_is_exact = is_remembered and not guard.skips and not cache.is_partial

    def declare(self, loop: LoopBuilder) -> None:
        declare_exchange(
            loop,
            write_depth=WRITE_DEPTH,
            skips=self._guard.skips,
            decays=bool(self._cache.history.decaying),
            clips=self._clips,
            rows_delay=self._rows_delay,
        )

    def handlers(self) -> Mapping[str, Handler]:
        return {
            **({"X_NORM": self.measure} if self._clips else {}),
            "X_PREPULL": lambda b: self._exchange.prepull(self._run.in_flight[b].context, b),
            "X_PULL": lambda b: self._exchange.pull(self._run.in_flight[b].context, b),
            "X_PUSH": self.push,
            "X_UPDATE": self.update,
            "X_PUSH_LATE": self.push_late,
            "X_UPDATE_LATE": self.update_late,
            "X_ACK": lambda b: self._peers.acknowledge(),
        }

    def hazards(self) -> Mapping[str, Callable[[int], int]]:
        return {READY_AFTER: self._ready_after}

    def _ready_after(self, b: int) -> int:
        exchange = self._run.in_flight[b].rank_batch.exchange
        assert exchange is not None, "the batch is planned for several ranks"
        return exchange.ready_after

    def _begin(self, key: OpKey, b: int) -> None:
        batch = self._run.in_flight[b]
        batch.groups = self._exchange.begin(batch.context)
        batch.row_steps = self._row_steps(b)

    def push(self, b: int) -> None:
        batch = self._run.in_flight[b]
        batch.groups = self._exchange.push(batch.context, self._givers(b))

    def update(self, b: int) -> None:
        batch = self._run.in_flight[b]
        if not batch.is_skipped:
            self._guard.watch(b, self._exchange.arrived())
            self._exchange.update(batch.context, batch.row_steps, batch.row_factor)

    def push_late(self, b: int) -> None:
        batch = self._run.in_flight[b]
        self._exchange.push_late(batch.groups, self._givers(b))
        batch.groups = ()

    def measure(self, b: int) -> None:
        batch = self._run.in_flight[b]
        batch.row_squares = self._exchange.squares(batch.context)

    def update_late(self, b: int) -> None:
        batch = self._run.in_flight[b]
        if not batch.is_skipped:
            self._guard.watch(b, self._exchange.arrived_late())
            self._exchange.update_late(batch.context, batch.row_steps, batch.row_factor)

    def was_written(self, batch: InFlightBatch, table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row was written, maybe by another rank: the plan tells, where it knows exactly what came before.

        A row that is planned is updated, so it is written when it leaves, unless its batch is skipped, it is frozen, or
        a partial backward does not reach it.
        """
        owner = batch.rank_batch.owner
        if not self._plan_is_exact or self._cache.schema.tables[table].is_frozen:
            return np.zeros(len(ids), dtype=np.bool_)
        rows = slice(int(owner.fetch.table_offsets[table]), int(owner.fetch.table_offsets[table + 1]))
        return np.isin(ids, owner.fetch.ids[rows][owner.fetch_new[rows]], invert=True)
