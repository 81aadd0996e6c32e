"""`RankBatch`: what the cacher hands one trainer rank for one batch, and the interface it is read through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from bagpipe.oracle.plan import CachePlan, ConsumerPlan, ExchangePlan, OracleSpec, OwnerPlan
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema

__all__ = ["UNTIMED", "BatchSource", "Phase", "PlanSpan", "RankBatch"]

Phase = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpan:
    """When the cacher worked on a batch: nanoseconds of the machine's monotonic clock, for the trace."""

    read_start_ns: int
    plan_start_ns: int
    plan_end_ns: int


#: The span of a batch that was planned outside a cacher.
UNTIMED = PlanSpan(read_start_ns=0, plan_start_ns=0, plan_end_ns=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankBatch:
    """One batch for one rank.

    Attributes:
        batch: the rank's examples.
        consumer: what the rank reads for them.
        owner: what happens to the rank's own cache.
        num_global_examples: examples in the global batch; the loss is their mean.
        span: when the cacher worked on it.
        exchange: what it gives to and takes from the other ranks; None if there are none.
    """

    batch: Batch
    consumer: ConsumerPlan
    owner: OwnerPlan
    num_global_examples: int
    span: PlanSpan
    exchange: ExchangePlan | None = None

    @classmethod
    def of(cls, batch: Batch, plan: CachePlan, rank: int, span: PlanSpan = UNTIMED) -> RankBatch:
        """One rank's part of a global batch and its plan."""
        return cls(
            batch=batch.select(plan.examples[rank]) if plan.examples else batch,
            consumer=plan.consumers[rank],
            owner=plan.owners[rank],
            num_global_examples=batch.num_examples,
            span=span,
            exchange=plan.exchanges[rank] if plan.exchanges else None,
        )


class BatchSource(Protocol):
    """Where a trainer gets its batches from."""

    schema: DataSchema

    def batches(
        self,
        phase: Phase,
        spec: OracleSpec,
        *,
        max_steps: int = 0,
        first_batch: int = 0,
        reader_state: Mapping[str, Any] | None = None,
    ) -> Iterator[RankBatch]:
        """Batches of a phase in batch order. Bounded: a slow reader slows the cacher, nothing piles up.

        Args:
            phase: the training or the held-out examples.
            spec: what to plan for.
            max_steps: leave out the batches from this one on (planned as if all came); 0: none.
            first_batch: begin with this batch, the caches empty.
            reader_state: of a step at or before `first_batch`, so that the data need not be read from the beginning.

        Raises:
            InputError: the data is bad; all steps before the bad block have been yielded.
        """
        ...

    def skipped_rows(self) -> int:
        """Malformed rows skipped so far (`data.bad_rows = skip`)."""
        ...
