"""`DensePart`: the loss scale of each batch."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.optim import SGD

from bagpipe.dense.executor import EagerExecutor
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.training.part import InFlightBatch, LoopRun
from bagpipe.training.weights import ResidentWeights
from bagpipe.training.whole_dense import WholeDense


def test_a_lane_behind_the_main_one_has_the_loss_scale_of_its_batch() -> None:
    """A scale that grows is another one when the main lane has ended the batch."""
    model = nn.Linear(2, 1)
    precision = Precision(loss_scale=LossScale(value=4, growth_interval=1))
    dense = WholeDense(
        weights=ResidentWeights(model, SGD(model.parameters(), lr=0.1)),
        executor=EagerExecutor(model, precision),
        skips_nonfinite=True,
    )
    run = LoopRun(batches=iter(()), parts=())
    dense.start(run)
    for b in range(3):
        run.in_flight[b] = InFlightBatch(rank_batch=cast(Any, None), context=cast(Any, None), inputs=None)
    run.in_flight[1].is_skipped = True
    scales = []
    for b in range(3):
        scales.append(dense.scale_of(b).value)
        dense.finish_batch(b)
    assert scales == [4, 8, 4]
    assert [dense.scale_of(b).value for b in range(3)] == scales
