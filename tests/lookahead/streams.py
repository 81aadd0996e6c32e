"""Batches, specs and comparisons for tests of the planners."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.types.batch import Batch
from tests.oracle.batches import make_batch


def plain(value: Any) -> Any:
    """Records as nested tuples, arrays as their dtype, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return tuple(plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value


def plain_part(found: RankBatch) -> Any:
    """What the planner made of a batch."""
    return found.batch.index, found.num_global_examples, *map(plain, (found.consumer, found.owner, found.exchange))


def expected_parts(batches: Iterable[Batch], spec: OracleSpec, rank: int = 0) -> list[Any]:
    """`plain_part` of each batch for one rank, from `plan_batches`."""
    return [plain_part(RankBatch.of(batch, plan, rank)) for batch, plan in plan_batches(batches, spec)]


def spec_of(*, num_slots: int = 20, lookahead: int = 3, world_size: int = 1) -> OracleSpec:
    """One table of 100 rows and one feature."""
    return OracleSpec(
        table_rows=(100,),
        features=(FeatureRef(feature=0, table=0),),
        num_slots=num_slots,
        lookahead=lookahead,
        world_size=world_size,
        assign="own" if world_size > 1 else "contiguous",
    )


def batch_of(index: int, *ids: int) -> Batch:
    """One example per id."""
    return make_batch(index, [[[i] for i in ids]])


def batches_of(count: int, size: int = 4) -> list[Batch]:
    """Batches with ids that return now and then."""
    return [batch_of(index, *((7 * index + 3 * n) % 29 for n in range(size))) for index in range(count)]


class Counted:
    """Counts the batches that were read and not yet yielded."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self.held = 0
        self.most_held = 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self.held += 1
            self.most_held = max(self.held, self.most_held)
            yield batch
