"""Configuration of the dense part: executors and refused combinations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.config.sections import Config, ModelConfig, RunConfig
from bagpipe.dense.executor import DenseExecutor, EagerExecutor, SplitExecutor
from bagpipe.dense.loss import BCE, Loss
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError
from bagpipe.models.torchrec_models import build_model
from bagpipe.pipeline.stage.cuda_graph import CudaGraphExecutor
from tests.trainer.schemas import schema_of
from trainer.dense import dense_executor, loss_of, precision_of

DATA = schema_of(None, None, dense=2)
CONFIG = Config(model=ModelConfig(embedding_dim=4, bottom_mlp=(6,), top_mlp=(5,)))


def work_of(model: nn.Module | None = None, **run: Any) -> DenseExecutor:
    config = dataclasses.replace(CONFIG, run=RunConfig(**run))
    built = model if model is not None else convert(build_model(DATA, CONFIG.model), DATA).model
    return dense_executor(built, DATA, config, world_size=1)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, Precision()),
        ({"autocast": "bfloat16"}, Precision(autocast_dtype=torch.bfloat16)),
        ({"autocast": "float16"}, Precision(autocast_dtype=torch.float16, loss_scale=LossScale(value=4096))),
        ({"autocast": "float16", "loss_scale": 1}, Precision(autocast_dtype=torch.float16)),
        (
            {"device": "cuda:1", "loss_scale": 8, "loss_scale_growth_interval": 100},
            Precision(device_type="cuda", loss_scale=LossScale(value=8, growth_interval=100)),
        ),
    ],
)
def test_precision(run: dict[str, Any], expected: Precision) -> None:
    assert precision_of(RunConfig(**run)) == expected
    assert work_of(**(run | {"device": "cpu"})).precision.loss_scale == expected.loss_scale


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        ({}, EagerExecutor),
        ({"compile": True}, SplitExecutor),
        ({"compile": True, "cuda_graph": True}, CudaGraphExecutor),
    ],
)
def test_executors(run: dict[str, Any], kind: type[DenseExecutor]) -> None:
    assert type(work_of(**run)) is kind


class Counting(nn.Module):
    """A model with data-dependent control flow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        logits: Tensor = self.layer(dense)
        return logits if logits.sum() > 0 else -logits


@pytest.mark.parametrize("key", ["compile", "cuda_graph"])
def test_a_model_that_cannot_be_split_is_refused(key: str) -> None:
    with pytest.raises(
        InputError, match=rf"^run\.{key} needs embedding lookups that are separate from the dense part: "
    ):
        work_of(Counting(), **{key: True})


def test_the_loss_of_the_configuration() -> None:
    assert loss_of(ModelConfig(), DATA) == BCE
    values = {"label_smoothing": 0.1, "pos_weight": 2.0, "focal_gamma": 3.0, "focal_alpha": 0.5}
    expected = Loss(name="focal", label_smoothing=0.1, pos_weight=2.0, gamma=3.0, alpha=0.5)
    assert loss_of(ModelConfig(loss="focal", **values), DATA) == expected
