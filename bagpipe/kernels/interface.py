"""`Kernels`: the operations on rows that are worth a kernel of their own on a device, and what they are given.

Every implementation gives the same bits for the same arguments, whatever ran before and however often it is asked: a
row's result depends on the row's own terms, in the order of the plan, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bagpipe.kernels.segment_sum import SegmentSum

__all__ = ["Bags", "Gradients", "Kernels", "RowNames", "RowStep", "RowView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """Numbers of one row-optimizer step.

    Attributes:
        lr, eps: of the row optimizer.
        step: batches trained so far, this one included (Adam's bias correction).
    """

    lr: float
    eps: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowView:
    """The unique rows of one table group; U of them.

    Attributes:
        records: ``[num_records, >= dim]``, weights in the first `dim` columns; their dtype may be narrower than that of
            vectors and gradients (`bagpipe.kernels.row_format`).
        slot_index: int64 ``[U]``, record of each row; None: row u is record u.
        dim: weights per row.
    """

    records: Tensor
    slot_index: Tensor | None
    dim: int

    def gathered(self) -> Tensor:
        """``[U, dim]``: the weights, row after row, in the records' dtype. May be the records themselves."""
        weights = self.records[:, : self.dim]
        return weights if self.slot_index is None else weights.index_select(0, self.slot_index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowNames:
    """Which rows they are, on the device: what stochastic rounding draws its bits from.

    Attributes:
        tables: int32 ``[k]``, table numbers.
        ids: int64 ``[k]``.
    """

    tables: Tensor
    ids: Tensor

    def part(self, first: int, end: int) -> RowNames:
        """Of rows ``first`` to ``end``."""
        return RowNames(tables=self.tables[first:end], ids=self.ids[first:end])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bags:
    """Which rows make which vector; n occurrences, G vectors.

    Attributes:
        indices: int32 ``[n]``, unique row of each occurrence.
        offsets: int32 ``[G + 1]``, where each vector's occurrences start; None: each vector is one occurrence.
        factors: ``[n]``, what each occurrence is multiplied by; None: ones.
        mean: divide by the number of occurrences.
    """

    indices: Tensor
    offsets: Tensor | None
    factors: Tensor | None
    mean: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    """What is summed to the gradients of rows: one lookup's share.

    Attributes:
        vectors: ``[num_vectors, dim]``, contiguous; never written.
        segment_sum: which of them make which row's gradient.
        weights: per-id weights by occurrence (as in the plan), in the place of the coefficients; None: there are none.
    """

    vectors: Tensor
    segment_sum: SegmentSum
    weights: Tensor | None = None


class Kernels(Protocol):
    """Operations on the rows of one cache. Each is enqueued on the current stream; nothing waits for the device.

    Attributes:
        reads_slots: `pool` reads rows in their slots; otherwise they are better gathered first.
        needs_names: `update` wants the names of the rows, because it rounds stochastically.
        max_terms: rows with more terms are to be summed in chunks (`HostSegmentSum.split`); None: no row is.
    """

    reads_slots: bool
    needs_names: bool
    max_terms: int | None

    def pool(self, rows: RowView, bags: Bags) -> Tensor:
        """``[G, dim]``: ``sum(factors[p] * weights[indices[p]] for p in range(offsets[g], offsets[g + 1]))``.

        A vector without occurrences is zero. Half rows are widened first: vectors and sums are float32 then.
        """
        ...

    def sum(self, gradients: Sequence[Gradients]) -> Tensor:
        """``[k, dim]``: per row the sum of its terms; several lookups' sums are added in their order.

        Raises:
            JobError: there are none.
        """
        ...

    def update(
        self,
        records: Tensor,
        slot_index: Tensor,
        gradients: Sequence[Gradients],
        step: RowStep,
        names: RowNames | None = None,
    ) -> None:
        """One optimizer step for each row, in its slot, from `sum` of the terms.

        Args:
            records: the cache's, ``[num_slots, width]``.
            slot_index: int64 ``[k]``, distinct.
            gradients: of these rows.
            step: numbers of the optimizer.
            names: the rows' names, ``[k]`` each, where `needs_names`; else unused.

        Raises:
            JobError: there are no terms, or no names where they are needed.
        """
        ...

    def initialise(self, records: Tensor, slot_index: Tensor, tables: Tensor, ids: Tensor, dim: int) -> None:
        """Write initial weights and zero state of rows with `dim` weights into their slots.

        Args:
            records: the cache's, ``[num_slots, width]``.
            slot_index, tables, ids: int64 ``[k]`` each.
            dim: of all these rows.
        """
        ...
