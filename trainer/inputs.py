"""Converts a batch to the input tensors of torchrec models.

Floating-point inputs are copied to memory aligned to 64 bytes (512 on a device). The arrays of a batch have arbitrary
alignment, and the summation order of matrix kernels (MKL, oneDNN) depends on the alignment of their operands. Without
the copy, results would depend on how the batch was transferred.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.cache.upload import Uploader
from bagpipe.types.batch import Batch
from bagpipe.types.model_inputs import ModelInputs
from bagpipe.types.schema import DataSchema

__all__ = ["InputMaker"]


class InputMaker:
    """Makes model inputs.

    Args:
        schema: data schema.
    """

    def __init__(self, schema: DataSchema) -> None:
        self._keys = [feature.name for feature in schema.features]
        self._weighted = any(feature.weighted for feature in schema.features)

    def __call__(self, batch: Batch, upload: Uploader) -> ModelInputs | None:
        """The inputs of one batch; None without examples, which few models take.

        ``sparse`` holds its sizes as host integers, which avoids device synchronisation.
        """
        if not batch.num_examples:
            return None
        offsets = batch.feature_offsets().tolist()
        sizes = [stop - start for start, stop in pairwise(offsets)]
        sparse = KeyedJaggedTensor(
            keys=self._keys,
            values=upload.shared(batch.values),
            weights=self._weights(batch, upload),
            lengths=upload.shared(batch.lengths.reshape(-1)),
            stride=batch.num_examples,
            length_per_key=sizes,
            offset_per_key=offsets,
        )
        dense = batch.dense if batch.dense.shape[1] else np.ones((batch.num_examples, 1), dtype=np.float32)
        return ModelInputs(dense=upload.numbers(dense), sparse=sparse, labels=upload.numbers(batch.targets))

    def _weights(self, batch: Batch, upload: Uploader) -> Tensor | None:
        if not self._weighted:
            return None
        return upload.numbers(np.ones(len(batch.values), np.float32) if batch.weights is None else batch.weights)
