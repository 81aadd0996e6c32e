"""`LookupGuard`: an evaluation ends with an error if the model has looked up other ids than those of its batch.

On a device the host learns that later (`bagpipe.cache.verdicts`). In training the `NonfiniteGuard` asks.
"""

from __future__ import annotations

from bagpipe.cache.verdicts import Verdicts
from bagpipe.training.part import LoopPart, LoopRun

__all__ = ["LookupGuard"]


class LookupGuard(LoopPart):
    """Asks after each batch what has come, and at the end what is still to come.

    Args:
        verdicts: of the cache that the model reads.
    """

    def __init__(self, verdicts: Verdicts) -> None:
        self._verdicts = verdicts

    def start(self, run: LoopRun) -> None:
        self._verdicts.clear()

    def finish_batch(self, b: int) -> None:
        self._verdicts.check()

    def end(self) -> None:
        self._verdicts.check_before()
