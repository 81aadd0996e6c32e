"""`capacity_error`: the error of a batch that does not fit, with the cache size that its window needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress

from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.planner import Planner
from bagpipe.types.batch import Batch

__all__ = ["capacity_error"]


def capacity_error(
    planner: Planner, batch: Batch, following: Iterable[Batch], *, held_out: bool = False, pushed: bool = False
) -> CapacityError:
    """The error of a batch that does not fit. Names the largest need of a window that begins there.

    Args:
        planner: refused the batch.
        batch: the batch.
        following: the batches after it; at most ``lookahead - 1`` are taken. It ends where an InputError is raised: bad
            data further on is another run's error.
        held_out, pushed: as in `CapacityError.of_batch`.
    """
    spec = planner.spec
    num_unique = before = planner.num_unique(batch)
    num_held = planner.num_held(batch)
    largest, last_batch = num_unique + num_held, batch.index
    with suppress(InputError):
        for later in itertools.islice(following, spec.lookahead - 1):
            last_batch = later.index
            needed = planner.num_unique(later)
            # Of two batches whose rows are held together, at most all are different.
            largest, before = max(largest, needed + spec.rows_delay * before), needed
    return CapacityError.of_batch(
        batch.index,
        num_unique,
        num_slots=spec.num_slots * spec.world_size,
        world_size=spec.world_size,
        largest=largest,
        last_batch=last_batch,
        held_out=held_out,
        pushed=pushed,
        num_held=num_held,
        grows=spec.grows,
    )
