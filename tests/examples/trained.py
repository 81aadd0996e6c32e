"""Examples trained by `bagpipe.TrainPipeline`, for comparison with `tests.examples.plain`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tests.examples.plain import Trained
from tests.examples.samples import Sample

__all__ = ["piped_training", "state_of"]


def piped_training(sample: Sample, batches: Iterable[Any], *, dtype: str = "float32", **settings: Any) -> Trained:
    """Train an example on all batches.

    Args:
        sample: the example.
        batches: its batches, with numbers of `dtype`.
        dtype: of rows and dense parameters.
        settings: of the pipeline.
    """
    model = sample.model().to(getattr(torch, dtype))
    losses = []
    with sample.module.make_pipeline(model, **settings) as pipeline:
        for _ in pipeline.train(batches):
            losses.append(pipeline.loss.item())
        return state_of(pipeline, sample, losses)


def state_of(pipeline: Any, sample: Sample, losses: list[float]) -> Trained:
    """Copies of the pipeline's dense parameters and of all rows of its tables."""
    return Trained(
        losses=losses,
        dense={name: value.detach().clone() for name, value in pipeline.model.named_parameters()},
        tables={name: pipeline.rows(name)[torch.arange(num_rows)] for name, num_rows in sample.num_rows.items()},
    )
