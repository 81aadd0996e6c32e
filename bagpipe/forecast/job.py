"""`JobShape`: what a forecast is about: ranks, batch, cache, window, rows and the dense part of a job."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bagpipe.errors import InputError
from bagpipe.forecast.stages import StagedDense
from bagpipe.forecast.traffic import RowTraffic, UniqueCurve
from bagpipe.partition.operators import OperatorGraph
from bagpipe.types.shard_level import SHARD_LEVELS

__all__ = ["DenseCosts", "JobShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCosts:
    """The dense part on one device, as it was measured or computed.

    Attributes:
        fixed_s, per_example_s: forward and backward of a batch.
        step_s: optimizer step.
        param_bytes: of its parameters.
        activation_bytes: kept for each example.
        weight_copies: memory of a parameter with gradient and optimizer state, in multiples of it.
    """

    fixed_s: float = 0.0
    per_example_s: float = 0.0
    step_s: float = 0.0
    param_bytes: float = 0.0
    activation_bytes: float = 0.0
    weight_copies: float = 3.0

    @classmethod
    def of_operators(cls, graph: OperatorGraph, weight_copies: float = 3.0) -> DenseCosts:
        """Sums over all operators of a model, on one device."""
        operators = graph.operators
        return cls(
            fixed_s=math.fsum(op.forward.fixed_s + op.backward.fixed_s for op in operators),
            per_example_s=math.fsum(op.forward.per_example_s + op.backward.per_example_s for op in operators),
            param_bytes=math.fsum(op.param_bytes for op in operators),
            activation_bytes=math.fsum(op.activation_bytes for op in operators),
            weight_copies=weight_copies,
        )

    def copies_of_rank(self, shard: str, ranks: int) -> float:
        """Memory of a parameter on a rank in multiples of it, where ranks divide it (ZeRO: Rajbhandari et al., 2020).

        Args:
            shard: one of `SHARD_LEVELS`.
            ranks: with the same parameters.
        """
        divided = {"none": 0.0, "optimizer": self.weight_copies - 2, "gradients": self.weight_copies - 1}
        part = min(self.weight_copies, max(0.0, divided.get(shard, self.weight_copies)))
        return self.weight_copies - part + part / ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """One job.

    Attributes:
        ranks: ranks, one device each.
        batch_examples: of the global batch.
        traffic: rows of a batch with the job's caches and window.
        uniques: unique rows of the parts of a batch.
        dim: weights of a row.
        dense: the dense part.
        staged: it is cut into stages; None: each rank trains it whole.
        shard: what ranks with the same parameters divide, one of `SHARD_LEVELS`.
        direct: no cache: every batch reads and writes all its rows.
        prefetch_depth, write_depth: as `cache.prefetch_depth`, and the write staging buffers.
        checkpoint_every: batches between two checkpoints; 0: there are none.
        store_rows: rows that the store holds at the end; 0: unknown, its memory is not checked.

    Raises:
        InputError: a number is below 1, the batch is not that of the traffic, or the stages are not those of the ranks.
    """

    ranks: int
    batch_examples: int
    traffic: RowTraffic
    uniques: UniqueCurve
    dim: int
    dense: DenseCosts
    staged: StagedDense | None = None
    shard: str = "none"
    direct: bool = False
    prefetch_depth: int = 4
    write_depth: int = 2
    checkpoint_every: int = 0
    store_rows: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ranks", "batch_examples", "dim", "prefetch_depth", "write_depth"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.batch_examples < self.ranks:
            raise InputError(f"ranks: expected at most the {self.batch_examples} examples of a batch, got {self.ranks}")
        if self.traffic.batch_examples != self.batch_examples:
            raise InputError(
                f"batch_examples: expected {self.traffic.batch_examples}, as the rows were counted, got "
                f"{self.batch_examples}"
            )
        if self.shard not in SHARD_LEVELS:
            raise InputError(f"shard: expected one of {', '.join(SHARD_LEVELS)}, got {self.shard!r}")
        if self.staged is not None and self.staged.stages * self.staged.replicas != self.ranks:
            raise InputError(
                f"ranks: expected {self.staged.stages * self.staged.replicas}, {self.staged.stages} stages times "
                f"{self.staged.replicas} replicas, got {self.ranks}"
            )

    @property
    def fetched_rows(self) -> float:
        """Rows of a batch that all ranks read from the store."""
        return self.traffic.unique if self.direct else self.traffic.fetched

    @property
    def inserted_rows(self) -> float:
        """Rows of a batch that enter the caches of all ranks."""
        return self.traffic.unique if self.direct else self.traffic.fetched + self.traffic.new

    @property
    def written_rows(self) -> float:
        """Rows of a batch that all ranks write to the store."""
        return self.traffic.unique if self.direct else self.traffic.written

    @property
    def readers(self) -> int:
        """Ranks that read examples: those where micro-batches enter."""
        return self.ranks if self.staged is None else self.staged.replicas
