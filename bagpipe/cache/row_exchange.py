"""`RowExchange`: rows and row gradients between this rank's cache and the others', batch by batch.

    lane pull     early(b) ─> rows the batch before did not use      pull(b) ─> the others, once they are updated
    lane compute  begin(b) ─> forward, backward                      update(b) ─> rows whose gradients `push` brought
    lane push     push(b) ─> gradients the next batch waits for      push_late(b), update_late(b) ─> the rest

Every gradient goes to the row's owner, which sums the ranks' contributions in rank order and updates the row once. A
rank that uses no row of a run still takes part in its exchange, with nothing to give: all ranks make the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext, GroupContext
from bagpipe.cache.lookup import ActiveTableGroup, gradient_terms
from bagpipe.cache.row_exchange_plan import GroupExchange, PullPart, PushPart
from bagpipe.cache.rows import RowCache
from bagpipe.cache.slab import Scratch
from bagpipe.distributed.interface import Peers
from bagpipe.errors import JobError
from bagpipe.kernels.interface import Gradients, RowStep
from bagpipe.pipeline.stream import keep_for_current_stream

__all__ = ["RowExchange"]

#: Batches whose rows are held at once: the one being computed, and the next one's early rows.
_BATCHES_HELD = 2
_NOW, _LATE = 0, 1  # parts of `GroupContext.backward`


class RowExchange:
    """Moves one rank's share of every batch. Each lane's methods are called by that lane alone.

    Args:
        cache: the rows this rank owns.
        peers: the other ranks.
    """

    def __init__(self, cache: RowCache, peers: Peers) -> None:
        self._cache = cache
        self._peers = peers
        self._rows = [[self._row_scratch() for _ in cache.schema.tables] for _ in range(_BATCHES_HELD)]
        self._given = self._row_scratch()
        self._taken = [[self._scratch() for _ in cache.schema.tables] for _ in (_NOW, _LATE)]
        self._arrived: list[list[Tensor]] = [[], []]

    # ---- lane pull -----------------------------------------------------------------------------------------------

    def early(self, context: BatchContext) -> None:
        """Exchange the rows that the batch before does not touch.

        Raises:
            JobError: an owned row is not in its slot.
            PeerError: a rank is gone or silent.
        """
        for run in context.runs:
            exchange = _exchange(run)
            self._cache.slots.check(exchange.owned.rows, exchange.owned.slots)
            self._exchange_rows(context, run, exchange.early)

    def pull(self, context: BatchContext) -> None:
        """Exchange the rows that the batch before updated.

        Raises:
            PeerError: a rank is gone or silent.
        """
        for run in context.runs:
            self._exchange_rows(context, run, _exchange(run).pull)

    def _exchange_rows(self, context: BatchContext, run: GroupContext, part: PullPart) -> None:
        dim = run.run.dim
        given = self._given.take(sum(part.given), dim)
        self._cache.gather(part.slot_index, dim, given)
        taken = self._weights(context, run)[part.first : part.end]
        # As bytes: not every process group knows every type of half rows.
        self._peers.exchange("pull", taken.view(torch.uint8), given.view(torch.uint8), part.taken, part.given)

    def _weights(self, context: BatchContext, run: GroupContext) -> Tensor:
        """``[U, dim]``: where the run's rows arrive. The same memory whenever it is asked for the same batch."""
        return self._rows[context.batch_index % _BATCHES_HELD][run.run.index].take(run.num_rows, run.run.dim)

    # ---- lane compute --------------------------------------------------------------------------------------------

    def begin(self, context: BatchContext) -> None:
        """The rows are here: make the batch the one the embedding modules look up."""
        self._cache.begin(context, [self._weights(context, run) for run in context.runs])

    def arrived(self) -> Sequence[Tensor]:
        """Row gradients ``[n, dim]`` that the last `push` brought, by run."""
        return self._arrived[_NOW]

    def update(self, context: BatchContext, settings: RowStep) -> None:
        """Update the owned rows whose gradients the last `push` brought."""
        self._update(context, _NOW, settings)

    # ---- lane push -----------------------------------------------------------------------------------------------

    def push(self, context: BatchContext) -> tuple[ActiveTableGroup, ...]:
        """The backward is over: send the gradients of rows that the next batch uses. The runs, for `push_late`.

        Raises:
            JobError: backward did not reach a run that has rows.
            PeerError: a rank is gone or silent.
        """
        runs = self._cache.end(context)
        for run in runs:
            # A run without rows here may be without a gradient, if this rank's examples have no id of its tables.
            if not run.gradients and run.context.num_rows:
                raise JobError(
                    f"batch {context.batch_index}: the loss does not depend on the rows of tables number "
                    f"{run.context.run.first_table} to {run.context.run.end_table - 1}, so it is unknown whether other "
                    "ranks update them: leave such tables out of the model"
                )
        self._push(runs, _NOW)
        return runs

    def push_late(self, runs: Sequence[ActiveTableGroup]) -> None:
        """Send the other gradients.

        Raises:
            PeerError: a rank is gone or silent.
        """
        self._push(runs, _LATE)
        for run in runs:
            run.gradients.clear()

    def arrived_late(self) -> Sequence[Tensor]:
        """As `arrived`, of the last `push_late`."""
        return self._arrived[_LATE]

    def update_late(self, context: BatchContext, settings: RowStep) -> None:
        """Update the owned rows whose gradients the last `push_late` brought."""
        self._update(context, _LATE, settings)

    def _push(self, runs: Sequence[ActiveTableGroup], which: int) -> None:
        self._arrived[which] = []
        for run in runs:
            dim = run.context.run.dim
            part = _part(run.context, which)
            for vectors, weights in run.gradients:
                keep_for_current_stream(vectors)
                if weights is not None:
                    keep_for_current_stream(weights)
            if run.gradients:
                given = self._cache.kernels.sum(gradient_terms(run, which))
            else:
                given = torch.empty(0, dim, dtype=self._cache.dtype, device=self._cache.device)
            taken = self._taken[which][run.context.run.index].take(sum(part.taken), dim)
            self._peers.exchange("push", taken, given, part.taken, part.given)
            self._arrived[which].append(taken)

    def _update(self, context: BatchContext, which: int, settings: RowStep) -> None:
        for run, taken in zip(context.runs, self._arrived[which], strict=True):
            part = _part(run, which)
            self._cache.apply(part.owned, [Gradients(vectors=taken, sums=part.sums)], settings)

    def _row_scratch(self) -> Scratch:
        return Scratch(self._cache.row_dtype, self._cache.device)

    def _scratch(self) -> Scratch:
        return Scratch(self._cache.dtype, self._cache.device)


def _exchange(run: GroupContext) -> GroupExchange:
    if run.exchange is None:
        raise JobError(f"run {run.run.index} was planned for one rank, there are several")
    return run.exchange


def _part(run: GroupContext, which: int) -> PushPart:
    exchange = _exchange(run)
    return exchange.late if which else exchange.push
