from __future__ import annotations

import numpy as np
import torch

from bagpipe.batch import Batch
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
    maker = InputMaker(schema_of(4, 4, dense=0, weighted=True), torch.device("cpu"), torch.float64)
    inputs = maker(batch)
    assert inputs.dense.tolist() == [[1.0], [1.0]]  # no dense columns: one constant
    assert inputs.dense.dtype == inputs.labels.dtype == torch.float64
    assert inputs.sparse.to_dict()["f1"].to_dense()[1].tolist() == [8, 9]
    assert inputs.sparse.weights().tolist() == [1.0, 1.0, 1.0]
