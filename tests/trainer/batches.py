"""A batch of bags."""

from __future__ import annotations

import numpy as np

from bagpipe.types.batch import Batch


def batch_of(features: list[list[list[int]]]) -> Batch:
    """A batch by the bags of its features."""
    return Batch(
        index=0,
        dense=np.zeros((len(features[0]), 0), np.float32),
        values=np.array([item for bags in features for bag in bags for item in bag], np.int64),
        lengths=np.array([[len(bag) for bag in bags] for bags in features], np.int32),
        labels=np.zeros(len(features[0]), np.float32),
    )
