"""`RankBatch`: one rank's part of a batch and its plan. `BatchSource`: the interface that yields them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import CachePlan, ConsumerPlan, ExchangePlan, OracleSpec, OwnerPlan, by_occurrence
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema

__all__ = ["UNTIMED", "BatchSource", "Phase", "PlanSpan", "RankBatch"]

Phase = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSpan:
    """Times at which the cacher read and planned a batch, in nanoseconds of the monotonic clock, for the trace."""

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
        consumer: the rows it reads for them.
        owner: the changes of its own cache.
        num_global_examples: examples in the global batch; the loss is their mean.
        span: when the cacher worked on the batch.
        exchange: its exchange with the other ranks; None for a single rank.
    """

    batch: Batch
    consumer: ConsumerPlan
    owner: OwnerPlan
    num_global_examples: int
    span: PlanSpan
    exchange: ExchangePlan | None = None

    @classmethod
    def of(
        cls,
        batch: Batch,
        plan: CachePlan,
        rank: int,
        span: PlanSpan = UNTIMED,
        *,
        ids_in_plan: bool = False,
        without_ids: bool = False,
    ) -> RankBatch:
        """One rank's part of a global batch and its plan.

        Args:
            ids_in_plan: the batch's ids are not in it; the plan has all of them, in their order.
            without_ids: leave them out: they are zeros. Allowed if the plan has all of them, in their order.
        """
        consumer = plan.consumers[rank]
        values: NDArray[np.int64] | None = None
        if without_ids:
            values = np.broadcast_to(np.int64(0), consumer.order.shape)
        elif ids_in_plan:
            values = by_occurrence(consumer.unique.ids, consumer.offsets, consumer.order)
        part = batch
        if plan.examples:
            part = batch.select(plan.examples[rank], values=values)
        elif values is not None:
            part = dataclasses.replace(batch, values=values)
        return cls(
            batch=part,
            consumer=consumer,
            owner=plan.owners[rank],
            num_global_examples=batch.num_examples,
            span=span,
            exchange=plan.exchanges[rank] if plan.exchanges else None,
        )


class BatchSource(Protocol):
    """Source of a trainer's batches."""

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
        """One rank's batches of a phase, in order. Bounded: a slow reader slows the cacher down.

        Args:
            phase: the training or the held-out examples.
            spec: what to plan for.
            max_steps: leave out the batches from this one on (planned as if all came); 0: none.
            first_batch: begin with this batch, the caches empty.
            reader_state: of a batch before `first_batch` (`Batch.reader_state`); saves reading the data from its start.

        Raises:
            InputError: the data is bad; all batches before the bad block have been yielded.
        """
        ...

    def skipped_rows(self) -> int:
        """Malformed rows skipped so far (`data.bad_rows = skip`)."""
        ...
