"""`Kernels`: the device operations on rows, and their arguments.

Every implementation is deterministic: the result of a row depends only on its own terms, in plan order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from bagpipe.kernels.row_decay import Missed
from bagpipe.kernels.segment_sum import SegmentSum

__all__ = ["Bags", "Gradients", "Kernels", "RowNames", "RowStep", "RowSteps", "RowView", "map_steps", "step_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStep:
    """Hyperparameters of one row-optimizer step.

    Attributes:
        lr, eps: learning rate and epsilon.
        step: number of batches trained, this one included (for Adam's bias correction).
        momentum: of momentum: factor of the velocity.
        beta, l1, l2: of FTRL; its alpha is the learning rate.
        weight_decay: decay of the rows.
        is_l2: it is a part of the gradient; otherwise it is decoupled.
        missed: decay that the rows have missed; None: the rows do not decay.
    """

    lr: float
    eps: float
    step: int
    momentum: float = 0.0
    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0
    is_l2: bool = False
    missed: Missed | None = None


#: Hyperparameters of a batch's steps: the same for all table groups, or one per group of the layout.
RowSteps: TypeAlias = RowStep | Sequence[RowStep]


def step_of(steps: RowSteps, group: int) -> RowStep:
    """The hyperparameters of a table group, by its number."""
    return steps if isinstance(steps, RowStep) else steps[group]


def map_steps(steps: RowSteps, change: Callable[[RowStep], RowStep]) -> RowSteps:
    """The hyperparameters after a change, which is called once for each `RowStep`."""
    return change(steps) if isinstance(steps, RowStep) else tuple(map(change, steps))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowView:
    """The U unique rows of one table group.

    Attributes:
        records: ``[num_records, >= dim]``, weights in the first `dim` columns. Their dtype can be narrower than that
            of vectors and gradients (`bagpipe.kernels.row_format`).
        slot_index: int64 ``[U]``, record of each row; None: row u is record u.
        dim: weights per row.
    """

    records: Tensor
    slot_index: Tensor | None
    dim: int

    def gathered(self) -> Tensor:
        """``[U, dim]``: the weights in the dtype of the records. Can share their memory."""
        weights = self.records[:, : self.dim]
        return weights if self.slot_index is None else weights.index_select(0, self.slot_index)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowNames:
    """Table numbers and ids of rows, on the device. They seed stochastic rounding.

    Attributes:
        tables: int32 ``[k]``, table numbers.
        ids: int64 ``[k]``.
    """

    tables: Tensor
    ids: Tensor

    def part(self, first: int, end: int) -> RowNames:
        """The names of rows ``first`` to ``end``."""
        return RowNames(tables=self.tables[first:end], ids=self.ids[first:end])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bags:
    """Bags of row indices in CSR form; n occurrences, G bags.

    Attributes:
        indices: int32 ``[n]``, unique row of each occurrence.
        offsets: int32 ``[G + 1]``, start of each bag; None: each bag is one occurrence.
        factors: ``[n]``, factor of each occurrence; None: ones.
        mean: divide each sum by the number of its occurrences.
    """

    indices: Tensor
    offsets: Tensor | None
    factors: Tensor | None
    mean: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    """The contribution of one lookup to the gradients of rows.

    Attributes:
        vectors: ``[num_vectors, dim]``, contiguous; never written.
        segment_sum: the vectors that are summed for each row.
        weights: per-id weights in plan order, which replace the coefficients; None: unweighted.
    """

    vectors: Tensor
    segment_sum: SegmentSum
    weights: Tensor | None = None


class Kernels(Protocol):
    """Operations on the rows of one cache, enqueued on the current stream. No operation waits for the device.

    Attributes:
        reads_slots: `pool` reads rows in their slots; otherwise the caller gathers them first.
        needs_names: `update` needs the names of half-precision rows, for stochastic rounding.
        max_terms: rows with more terms are summed in chunks (`HostSegmentSum.split`); None: no limit.
    """

    reads_slots: bool
    needs_names: bool
    max_terms: int | None

    def pool(self, rows: RowView, bags: Bags) -> Tensor:
        """``[G, dim]``: ``sum(factors[p] * weights[indices[p]] for p in range(offsets[g], offsets[g + 1]))``.

        The vector of an empty bag is zero. Half-precision rows are widened first: vectors and sums are float32.
        """
        ...

    def sum(self, gradients: Sequence[Gradients]) -> Tensor:
        """``[k, dim]``: gradient of each row, the sum of its terms. Contributions of lookups are added in order.

        Raises:
            JobError: `gradients` is empty.
        """
        ...

    def update(
        self,
        records: Tensor,
        slot_index: Tensor,
        gradients: Sequence[Gradients],
        step: RowStep,
        names: RowNames | None = None,
        optimizer: str | None = None,
    ) -> None:
        """Apply one optimizer step to each row, in its slot, with the gradient of `sum`.

        Args:
            records: records of the cache, ``[num_slots, width]``, in the dtype of the rows.
            slot_index: int64 ``[k]``, distinct slots of the rows.
            gradients: gradients of the rows.
            step: hyperparameters.
            names: names of the rows, ``[k]`` each, if `needs_names`; else unused.
            optimizer: row optimizer of the rows, not `FROZEN`; None: the schema's.

        Raises:
            JobError: `gradients` is empty, or needed names are missing.
        """
        ...

    def initialise(
        self,
        records: Tensor,
        slot_index: Tensor,
        tables: Tensor,
        ids: Tensor,
        dim: int,
        optimizer: str | None = None,
    ) -> None:
        """Write initial weights and zero optimizer state of rows into their slots.

        Args:
            records: records of the cache, ``[num_slots, width]``, in the dtype of the rows.
            slot_index, tables, ids: int64 ``[k]`` each.
            dim: weights per row.
            optimizer: row optimizer of the rows; None: the schema's.
        """
        ...
