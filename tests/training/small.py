"""A minimal dense part, and small objects built on it."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import SGD

from bagpipe.dense.executor import EagerExecutor
from bagpipe.pipeline.stream import Streams
from bagpipe.training.nonfinite import NonfiniteGuard
from bagpipe.training.weights import ResidentWeights
from bagpipe.training.whole_dense import WholeDense

__all__ = ["guard_of", "small_dense"]


def small_dense(**more: Any) -> WholeDense:
    model = nn.Linear(2, 1)
    weights = ResidentWeights(model, SGD(model.parameters(), lr=0.1))
    return WholeDense(weights=weights, executor=EagerExecutor(model), **more)


def guard_of(streams: Streams, *, skips_nonfinite: bool = False, **more: Any) -> NonfiniteGuard:
    return NonfiniteGuard(streams, small_dense(skips_nonfinite=skips_nonfinite), **more)
