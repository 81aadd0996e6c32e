"""`JobSettings`, `JobTimes`: settings of a measured job, and the times of its rank 0. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["TABLES", "JobSettings", "JobTimes", "OpTimes"]

#: Tables of a measured job, with one id of each example: as Criteo's click logs.
TABLES = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """One job.

    Attributes:
        store_url, namespace: of a server that nobody else uses.
        server_process: its process id.
        examples: of a rank's batch, `TABLES` ids each.
        dim: weights of a row.
        cache_rows: of a rank; 0: direct mode.
        layers: widths of the dense layers behind the lookups; empty: their sum is the loss.
        batches: measured, after some to warm up.
    """

    store_url: str
    namespace: str
    server_process: int
    examples: int
    dim: int
    cache_rows: int
    layers: Sequence[int] = ()
    batches: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTimes:
    """One operation of the training loop.

    Attributes:
        items: ids or rows that it works on, of a batch.
        processor_s: of its thread, with what the lane needs beside it.
    """

    items: float
    processor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """Medians over the batches of a rank.

    Attributes:
        step_s: between the ends of two batches.
        ops: by operation; what the threads of the process use that are no lanes is `OTHER_THREADS`.
        planner_s: of the processes that it has started, a batch.
        server_s: of the store server, a batch of all ranks.
        ids: occurrences of a rank's batch.
    """

    step_s: float
    ops: Mapping[str, OpTimes]
    planner_s: float
    server_s: float
    ids: float

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> JobTimes:
        """The times of a record that a process wrote."""
        ops = {op: OpTimes(**each) for op, each in values["ops"].items()}
        return cls(**{**values, "ops": ops})
