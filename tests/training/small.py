"""A minimal dense part, and small objects built on it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD

from bagpipe.dense.executor import EagerExecutor
from bagpipe.pipeline.stream import Streams
from bagpipe.training.dense import WholeDense
from bagpipe.training.nonfinite import NonfiniteGuard

__all__ = ["guard_of", "small_dense"]


def small_dense(**more: Any) -> WholeDense:
    model = nn.Linear(2, 1)
    return WholeDense(model=model, optimizer=SGD(model.parameters(), lr=0.1), executor=EagerExecutor(model), **more)


def guard_of(streams: Streams, *, skips_nonfinite: bool = False, **more: Any) -> NonfiniteGuard:
    return NonfiniteGuard(streams, small_dense(skips_nonfinite=skips_nonfinite), **more)
