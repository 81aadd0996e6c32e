"""A store's writer let in, as the trainer does it."""

from __future__ import annotations

import uuid

from bagpipe.store.fencing import Fence
from bagpipe.store.interface import Store

__all__ = ["take_over"]


def take_over(store: Store, *, generation: int = 1, writer: int = 0, num_writers: int = 1) -> Fence:
    """Make the open store a writer of a job that has just seized its namespace, in epoch 1."""
    fence = Fence(token=f"{generation}-{uuid.uuid4().hex}", writer=writer, epoch=1)
    with store.ledger() as ledger:
        ledger.seize(fence.token)
        ledger.begin("test:0", num_writers)
    store.fence(fence)
    return fence
