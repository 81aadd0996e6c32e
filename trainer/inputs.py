"""A batch as the tensors torchrec models take.

Rule of this file: floating-point inputs are copied into torch's own memory, which begins at multiples of 64 bytes. A
batch's arrays begin anywhere, and matrix kernels (MKL's, oneDNN's) sum in an order that depends on where their operands
begin: without the copy a result would depend on how the batch came here.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.batch import Batch
from bagpipe.engine import ModelInputs
from bagpipe.schema import DataSchema

__all__ = ["InputMaker"]


class InputMaker:
    """Makes model inputs on one device.

    Args:
        schema: the data.
        device, dtype: of the inputs.
    """

    def __init__(self, schema: DataSchema, device: torch.device, dtype: torch.dtype) -> None:
        self._keys = [feature.name for feature in schema.features]
        self._weighted = any(feature.weighted for feature in schema.features)
        self._device = device
        self._dtype = dtype

    def __call__(self, batch: Batch) -> ModelInputs:
        """The inputs of one batch; ``sparse`` carries its sizes as host numbers, so that nothing waits for a device."""
        offsets = batch.feature_offsets().tolist()
        sizes = [stop - start for start, stop in pairwise(offsets)]
        sparse = KeyedJaggedTensor(
            keys=self._keys,
            values=torch.from_numpy(batch.values).to(self._device, non_blocking=True),
            weights=self._weights(batch),
            lengths=torch.from_numpy(batch.lengths.reshape(-1)).to(self._device, non_blocking=True),
            stride=batch.num_examples,
            length_per_key=sizes,
            offset_per_key=offsets,
        )
        dense = torch.from_numpy(batch.dense)
        if not dense.shape[1]:
            dense = torch.ones(batch.num_examples, 1)
        return ModelInputs(
            dense=self._tensor(dense), sparse=sparse, labels=self._tensor(torch.from_numpy(batch.labels))
        )

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, self._dtype, non_blocking=True, copy=True)

    def _weights(self, batch: Batch) -> torch.Tensor | None:
        if not self._weighted:
            return None
        if batch.weights is None:
            return torch.ones(len(batch.values), dtype=self._dtype, device=self._device)
        return self._tensor(torch.from_numpy(batch.weights))
