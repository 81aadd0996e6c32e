"""`RowExchange`: exchanges rows and row gradients with the other ranks, batch by batch.

    lane pull     prepull(b) ─> rows unused by the previous batch      pull(b) ─> the others, after their update
    lane compute  begin(b) ─> forward, backward                      update(b) ─> rows with gradients from `push`
    lane push     push(b) ─> gradients the next batch waits for      push_late(b), update_late(b) ─> the rest
                  squares(b), after both ─> their squared norm, of all ranks

A gradient goes to the owner of its row, which sums the contributions of all ranks in rank order and updates the row
once. All ranks make the same calls: a rank that uses no row of a group sends empty contributions. No gradient of a
frozen group is exchanged. Nor does a rank send any in a batch whose backward reaches no row of its examples, which all
ranks know; its contributions are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext, GroupContext
from bagpipe.cache.gradient_squares import limbs_of_gradients
from bagpipe.cache.lookup import ActiveTableGroup, gradients_of, touched_rows
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_exchange_plan import GroupExchange, PullPart, PushPart
from bagpipe.cache.staging import Scratch
from bagpipe.distributed.interface import Peers
from bagpipe.errors import InputError, JobError
from bagpipe.kernels.exact_sum import total
from bagpipe.kernels.interface import Gradients, RowSteps
from bagpipe.pipeline.stream import keep_for_current_stream
from bagpipe.types.row_record import base_optimizer, moves_without_gradient

__all__ = ["Givers", "RowExchange"]

#: By rank, whether the backward of a batch reaches rows of its examples; None: all do.
Givers: TypeAlias = Sequence[bool] | None

#: Batches whose rows are held at a time: the batch being computed, and the rows pulled ahead for the next one.
_BATCHES_HELD = 2
_NOW, _LATE = 0, 1  # parts of `GroupContext.backward`


class RowExchange:
    """Row exchange of one rank. Each method is called by its lane only.

    Args:
        cache: the rows of this rank.
        peers: the other ranks.
    """

    def __init__(self, cache: RowCache, peers: Peers) -> None:
        self._cache = cache
        self._peers = peers
        self._rows = [[self._scratch() for _ in cache.schema.tables] for _ in range(_BATCHES_HELD)]
        self._sent = self._scratch()
        self._received = [[self._scratch() for _ in cache.schema.tables] for _ in (_NOW, _LATE)]
        self._arrived: list[list[Tensor]] = [[], []]

    # ---- lane pull -----------------------------------------------------------------------------------------------

    def prepull(self, context: BatchContext, step: int | None = None) -> None:
        """Exchange rows that the previous batch does not use, as they are before batch `step` (`RowCache.read`).

        Raises:
            JobError: an owned row is not in its slot.
            PeerError: a rank is gone or silent.
        """
        for group in context.groups:
            exchange = _exchange(group)
            self._cache.slots.check(exchange.owned.rows, exchange.owned.slots)
            self._exchange_rows(context, group, exchange.prepull, step)

    def pull(self, context: BatchContext, step: int | None = None) -> None:
        """Exchange rows that the previous batch updated, as they are before batch `step`.

        Raises:
            PeerError: a rank is gone or silent.
        """
        for group in context.groups:
            self._exchange_rows(context, group, _exchange(group).pull, step)

    def _exchange_rows(self, context: BatchContext, group: GroupContext, part: PullPart, step: int | None) -> None:
        dim = group.tables.dim
        sent = self._sent.take(sum(part.send_counts), dim, self._cache.row_dtype(group.tables))
        self._cache.read(group.tables, part.slot_index, sent, step)
        received = self._weights(context, group)[part.first : part.end]
        # As bytes: not every process group supports every half dtype.
        self._peers.exchange(
            "pull", received.view(torch.uint8), sent.view(torch.uint8), part.recv_counts, part.send_counts
        )

    def _weights(self, context: BatchContext, group: GroupContext) -> Tensor:
        """``[U, dim]``: receive buffer of the group's rows; the same memory for the same batch."""
        scratch = self._rows[context.batch_index % _BATCHES_HELD][group.tables.index]
        return scratch.take(group.num_rows, group.tables.dim, self._cache.row_dtype(group.tables))

    # ---- lane compute --------------------------------------------------------------------------------------------

    def begin(self, context: BatchContext) -> tuple[ActiveTableGroup, ...]:
        """Make the batch, whose rows have arrived, the one that embedding modules look up; returns its table groups."""
        return self._cache.begin(context, [self._weights(context, group) for group in context.groups])

    def arrived(self) -> Sequence[Tensor]:
        """Row gradients ``[n, dim]`` of each group from the last `push`."""
        return self._arrived[_NOW]

    def update(self, context: BatchContext, settings: RowSteps, factor: Tensor | None = None) -> None:
        """Update the owned rows with the gradients of the last `push`, times a factor; None: 1."""
        self._update(context, _NOW, settings, factor)

    # ---- lane push -----------------------------------------------------------------------------------------------

    def push(self, context: BatchContext, givers: Givers = None) -> tuple[ActiveTableGroup, ...]:
        """End the batch and send the gradients of rows that the next batch uses.

        Args:
            context: the batch.
            givers: by rank, whether its backward reaches rows; None: all do.

        Returns:
            The groups, for `push_late`.

        Raises:
            JobError: backward did not reach a group that has rows.
            InputError: lookups leave rows out, which their optimizer would move (`moves_without_gradient`).
            PeerError: a rank is gone or silent.
        """
        groups = self._cache.end(context)
        for group in groups:
            # A group without rows has no gradient if the examples of this rank have no id of its tables.
            is_expected = givers is None or givers[self._peers.rank]
            if is_expected and not group.gradients and group.context.num_rows and not group.context.tables.is_frozen:
                tables = group.context.tables
                raise JobError(
                    f"batch {context.batch_index}: the loss does not depend on the rows of tables number "
                    f"{tables.first_table} to {tables.end_table - 1}, so it is unknown whether other ranks "
                    "update them: leave such tables out of the model"
                )
            self._check_touched(context, group)
        self._push(groups, _NOW, givers)
        return groups

    def _check_touched(self, context: BatchContext, group: ActiveTableGroup) -> None:
        """Refuse a lookup that leaves rows out where it matters: their owners do not know which rows others touch."""
        tables = group.context.tables
        optimizer = tables.optimizer or self._cache.schema.optimizer
        if not group.gradients or self._cache.is_partial or not moves_without_gradient(optimizer):
            return
        touched = touched_rows(group)
        if touched is not None:
            names = [table.name for table in self._cache.schema.tables[tables.first_table : tables.end_table]]
            raise InputError(
                f"batch {context.batch_index}: with several ranks, lookups of tables {names} must have all of the "
                f"batch's rows, got {np.count_nonzero(touched)} of {len(touched)}: {base_optimizer(optimizer)[0]} "
                "would move the others with a gradient of zero; use one rank, Adagrad, RowWiseAdagrad or SGD, or "
                "leave such ids out of the batch"
            )

    def push_late(self, groups: Sequence[ActiveTableGroup], givers: Givers = None) -> None:
        """Send the remaining gradients; `givers` as in `push`.

        Raises:
            PeerError: a rank is gone or silent.
        """
        self._push(groups, _LATE, givers)
        for group in groups:
            group.gradients.clear()

    def arrived_late(self) -> Sequence[Tensor]:
        """Row gradients ``[n, dim]`` of each group from the last `push_late`."""
        return self._arrived[_LATE]

    def update_late(self, context: BatchContext, settings: RowSteps, factor: Tensor | None = None) -> None:
        """Update the owned rows with the gradients of the last `push_late`, times a factor; None: 1."""
        self._update(context, _LATE, settings, factor)

    def squares(self, context: BatchContext) -> Tensor:
        """float64 scalar: squared norm of the gradients of the batch's rows, summed over the ranks; the same on each.

        After `push_late`, before an update.

        Raises:
            PeerError: a rank is gone or silent.
        """
        gradients = [
            [Gradients(vectors=received, segment_sum=_part(group, which).segment_sum)]
            for which in (_NOW, _LATE)
            for group, received in zip(context.groups, self._arrived[which], strict=True)
            if not group.tables.is_frozen and len(_part(group, which).owned.rows)
        ]
        limbs = limbs_of_gradients(self._cache.kernels, gradients, self._cache.device)
        once = (1,) * self._peers.world_size
        of_ranks = limbs.new_empty(len(once), len(limbs))
        self._peers.exchange("push", of_ranks, limbs.repeat(len(once), 1), once, once)
        return total(of_ranks.sum(0))

    def _push(self, groups: Sequence[ActiveTableGroup], which: int, givers: Givers) -> None:
        self._arrived[which] = []
        for group in groups:
            dim = group.context.tables.dim
            if group.context.tables.is_frozen:  # on every rank
                self._arrived[which].append(torch.empty(0, dim, dtype=self._cache.dtype, device=self._cache.device))
                continue
            part = _part(group.context, which)
            for vectors, weights, *_ in group.gradients:
                keep_for_current_stream(vectors)
                if weights is not None:
                    keep_for_current_stream(weights)
            if group.gradients:
                sent = self._cache.kernels.sum(gradients_of(group, which))
            else:
                sent = torch.empty(0, dim, dtype=self._cache.dtype, device=self._cache.device)
            scratch = self._received[which][group.context.tables.index]
            received = scratch.take(sum(part.recv_counts), dim, self._cache.dtype)
            if givers is None or all(givers):
                self._peers.exchange("push", received, sent, part.recv_counts, part.send_counts)
            else:
                self._exchange_some(received, sent, part, givers)
            self._arrived[which].append(received)

    def _exchange_some(self, received: Tensor, sent: Tensor, part: PushPart, givers: Sequence[bool]) -> None:
        """Exchange the gradients of the ranks that have any; those of others become zeros."""
        gives = givers[self._peers.rank]
        send_counts = [count if gives else 0 for count in part.send_counts]
        recv_counts = [count if given else 0 for count, given in zip(part.recv_counts, givers, strict=True)]
        arrived = received.new_empty(sum(recv_counts), received.shape[1])
        self._peers.exchange("push", arrived, sent, recv_counts, send_counts)
        received.zero_()
        whole, some = torch.split(received, list(part.recv_counts)), torch.split(arrived, recv_counts)
        for rows, got in zip(whole, some, strict=True):
            if len(got):
                rows.copy_(got)

    def _update(self, context: BatchContext, which: int, settings: RowSteps, factor: Tensor | None) -> None:
        if factor is not None:
            keep_for_current_stream(factor)
        for group, received in zip(context.groups, self._arrived[which], strict=True):
            if not group.tables.is_frozen:
                part = _part(group, which)
                if factor is not None:
                    received.mul_(factor)
                gradients = [Gradients(vectors=received, segment_sum=part.segment_sum)]
                self._cache.apply(group.tables, part.owned, gradients, settings)

    def _scratch(self) -> Scratch:
        return Scratch(self._cache.device)


def _exchange(group: GroupContext) -> GroupExchange:
    if group.exchange is None:
        raise JobError(f"table group {group.tables.index} was planned for one rank, there are several")
    return group.exchange


def _part(group: GroupContext, which: int) -> PushPart:
    exchange = _exchange(group)
    return exchange.push_late if which else exchange.push
