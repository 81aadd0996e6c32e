from __future__ import annotations

import pytest
import torch

from bagpipe.config.sections import OptimConfig
from bagpipe.errors import InputError
from trainer.optimizers import dense_optimizer


@pytest.mark.parametrize(("name", "kind"), [("sgd", "SGD"), ("adagrad", "Adagrad"), ("adam", "Adam")])
def test_dense_optimizers(name: str, kind: str) -> None:
    parameters = torch.nn.Linear(2, 1).parameters()
    optimizer = dense_optimizer(parameters, OptimConfig(dense=name, dense_lr=0.5, eps=1e-3))
    assert type(optimizer).__name__ == kind
    assert optimizer.defaults["lr"] == 0.5
    assert optimizer.defaults.get("eps", 1e-3) == 1e-3


def test_an_unknown_dense_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match=r"optim.dense must be one of sgd"):
        dense_optimizer([], OptimConfig(dense="lion"))
