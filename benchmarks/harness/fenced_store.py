"""`FencedStore`: the store of a benchmark's own writes, which have the fence of a job's.

Only this module, `benchmarks.harness.job` and benchmarks/store open a store's rows; a test of the harness checks it.
"""

from __future__ import annotations

from typing import Self

from bagpipe.store.redis.store import RedisStore
from bagpipe.testing.fence_jobs import take_over

__all__ = ["FencedStore"]


class FencedStore(RedisStore):
    """A `RedisStore` that takes its namespace over when it is entered: its writes are guarded and logged.

    The logs take 12 bytes per row written, and last until the next job takes the namespace over.
    """

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.claim()
            take_over(self)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self
