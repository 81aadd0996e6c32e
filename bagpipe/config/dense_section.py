"""`DenseConfig`: the keys of where the dense part's memory lies, a section of `bagpipe.config.sections`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from bagpipe.config.ranges import at_least
from bagpipe.types.shard_level import ShardLevel

__all__ = ["DenseConfig"]


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Memory of the dense part. None of these keys changes a result.

    Attributes:
        budget_bytes: most bytes of parameters, gradients and optimizer state on the device; the rest waits in host
            memory and comes in chunks ahead of its use. 0: no limit.
        chunk_bytes: size of a chunk; 0: the bytes of the largest parameter.
        state: host: the optimizer's state lives in host memory and streams through the device at each step; device: as
            much of it as the budget holds stays there.
        shard: division among ranks with the same parameters: none, optimizer state, gradients or parameters too (ZeRO).
        wrap: patterns of module names whose parameters are gathered and summed together; empty: layer by layer.
    """

    budget_bytes: Annotated[int, at_least(0)] = 0
    chunk_bytes: Annotated[int, at_least(0)] = 0
    state: Literal["device", "host"] = "device"
    shard: ShardLevel = "none"
    wrap: tuple[str, ...] = ()

    @property
    def is_chunked(self) -> bool:
        """The dense part lives in chunks."""
        return self.budget_bytes > 0 or self.state == "host"
