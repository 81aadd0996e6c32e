from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bagpipe.cache.upload import Uploader
from bagpipe.types.batch import Batch
from tests.trainer.schemas import schema_of
from trainer.inputs import InputMaker


def test_inputs_carry_the_batch() -> None:
    batch = Batch(
        index=0,
        dense=np.zeros((2, 0), dtype=np.float32),
        values=np.array([7, 8, 9], dtype=np.int64),
        lengths=np.array([[1, 0], [0, 2]], dtype=np.int32),
        labels=np.array([1, 0], dtype=np.float32),
    )
    maker = InputMaker(schema_of(4, 4, dense=0, weighted=True))
    inputs = maker(batch, Uploader(torch.device("cpu"), torch.float64))
    assert inputs.dense.tolist() == [[1.0], [1.0]]  # no dense columns: a constant
    assert inputs.dense.dtype == inputs.labels.dtype == torch.float64
    assert inputs.sparse.to_dict()["f1"].to_dense()[1].tolist() == [8, 9]
    assert inputs.sparse.weights().tolist() == [1.0, 1.0, 1.0]


def test_keys_and_dense_columns_have_the_order_of_the_schema() -> None:
    schema = schema_of(4, 4, 4, dense=2)
    schema = dataclasses.replace(schema, features=(schema.features[2], schema.features[0], schema.features[1]))
    batch = Batch(
        index=0,
        dense=np.array([[1, 2]], dtype=np.float32),
        values=np.array([7, 8, 9]),
        lengths=np.ones((3, 1), dtype=np.int32),
        labels=np.ones(1, dtype=np.float32),
    )
    inputs = InputMaker(schema)(batch, Uploader(torch.device("cpu"), torch.float32))
    assert inputs.dense.tolist() == [[1, 2]]
    assert inputs.sparse.keys() == ["f2", "f0", "f1"]
    assert inputs.sparse["f2"].values().tolist() == [7]


@pytest.mark.parametrize("offset", range(0, 64, 4))
def test_inputs_do_not_depend_on_the_batchs_alignment(offset: int) -> None:
    """Matrix kernels sum in an order that depends on alignment, so inputs must not keep the batch's own addresses."""
    buffer = np.zeros(64 + 4 * 33 * 7 + 64, dtype=np.uint8)
    start = -buffer.__array_interface__["data"][0] % 64 + offset
    dense = buffer[start : start + 4 * 33 * 7].view(np.float32).reshape(33, 7)
    batch = Batch(
        index=0,
        dense=dense,
        values=np.arange(33),
        lengths=np.ones((1, 33), dtype=np.int32),
        labels=dense[:, 0],
        weights=dense.reshape(-1)[:33],
    )
    inputs = InputMaker(schema_of(4, dense=7, weighted=True))(batch, Uploader(torch.device("cpu"), torch.float32))
    for tensor in (inputs.dense, inputs.labels, inputs.sparse.weights()):
        assert tensor.data_ptr() % 64 == 0
    dense[:] = 1
    assert not inputs.dense.any()
