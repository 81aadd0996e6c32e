"""`WriterLogs`: keys and expected lengths of one writer's logs in one epoch. No I/O.

    Fence ──> WriterLogs ──entries(commands per bucket)──> LogEntries: the length of each log after the next command
                      └─next()──> WriterLogs of the next epoch, all logs empty

A log starts with one empty element, because Redis has no empty lists; each group adds one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import Fence, check_token, log_key, log_name

__all__ = ["LogEntries", "WriterLogs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntries:
    """Logs of one group of rows.

    Attributes:
        token: the writer's token.
        keys: key of the log, by bucket.
        lengths: elements of the log, by bucket: after the first command of the group (`entries`), or now (`current`).
    """

    token: str
    keys: Sequence[bytes]
    lengths: Sequence[int]


class WriterLogs:
    """Counts the groups of one writer in one epoch. Not thread-safe.

    Args:
        fence: the writer; its logs exist and are empty.
        bucket_keys: key of each bucket.

    Raises:
        ValueError: the fence's token is malformed.
    """

    def __init__(self, fence: Fence, bucket_keys: Sequence[bytes]) -> None:
        check_token(fence.token)
        self.fence = fence
        self.log_name = log_name(fence)
        self.log_keys = [log_key(key, fence) for key in bucket_keys]
        self._bucket_keys = bucket_keys
        self._lengths = np.ones(len(bucket_keys), np.int64)

    def entries(self, num_commands: NDArray[np.int64]) -> LogEntries:
        """Entries for the next commands; counts them as sent. `num_commands`: int64 ``[num_buckets]``."""
        firsts = (self._lengths + 1).tolist()
        self._lengths += num_commands
        return LogEntries(token=self.fence.token, keys=self.log_keys, lengths=firsts)

    def current(self) -> LogEntries:
        """Entries with the present lengths."""
        return LogEntries(token=self.fence.token, keys=self.log_keys, lengths=self._lengths.tolist())

    def num_groups(self) -> NDArray[np.int64]:
        """Groups in each log, int64 ``[num_buckets]``."""
        return self._lengths - 1

    def next(self) -> WriterLogs:
        """The logs of the next epoch."""
        return WriterLogs(replace(self.fence, epoch=self.fence.epoch + 1), self._bucket_keys)
