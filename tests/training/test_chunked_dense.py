"""The part by itself; whole jobs are in tests/system/test_chunked_dense.py."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD

from bagpipe.dense.chunks.budget import Budget
from bagpipe.dense.clip import Clip
from bagpipe.dense.executor import EagerExecutor
from bagpipe.pipeline.stream import NullStreams
from bagpipe.training.chunked_dense import ChunkedDense


def make(clip: Clip) -> ChunkedDense:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    budget = Budget(num_bytes=1024)
    return ChunkedDense(
        budget=budget,
        streams=NullStreams(),
        model=model,
        optimizer=optimizer,
        executor=EagerExecutor(model),
        clip=clip,
    )


def test_the_budget_is_divided_into_chunks() -> None:
    assert make(Clip(value=0.5)).chunked.arena.num_slots == 4
