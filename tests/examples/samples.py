"""The examples that train through `bagpipe.TrainPipeline`, each with the plain optimizers of its `make_pipeline`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.examples.plain import MakeOptimizer, collections_of

__all__ = ["SAMPLES", "Sample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One example.

    Attributes:
        name: module below `examples`.
        rows: table name, or ``*`` for the others -> optimizer of its rows.
        dense: optimizer of the dense parameters.
    """

    name: str
    rows: Mapping[str, MakeOptimizer]
    dense: MakeOptimizer

    @property
    def module(self) -> Any:
        return importlib.import_module(f"examples.{self.name}")

    def model(self, device: str = "meta") -> nn.Module:
        made: nn.Module = self.module.make_model(device)
        return made

    @property
    def num_rows(self) -> dict[str, int]:
        """Table name -> number of its rows."""
        return {
            config.name: config.num_embeddings
            for _, _, _, configs in collections_of(self.model())
            for config in configs
        }

    def batches(self, num: int, batch_size: int = 32, seed: int = 0) -> Iterator[Any]:
        made: Callable[..., Iterator[Any]] = self.module.make_batches
        return made(num, batch_size, seed)


ADAGRAD = partial(torch.optim.Adagrad, lr=0.1, eps=1e-10)
ADAM = partial(torch.optim.Adam, lr=0.005)

SAMPLES = {
    sample.name: sample
    for sample in (
        Sample(name="two_tower", rows={"*": partial(RowWiseAdagrad, lr=0.1, eps=1e-8)}, dense=ADAM),
        Sample(
            name="mmoe",
            rows={"*": ADAGRAD, "category": partial(torch.optim.SparseAdam, lr=0.01)},
            dense=ADAM,
        ),
        Sample(name="din", rows={"*": partial(torch.optim.SparseAdam, lr=0.005)}, dense=ADAM),
        Sample(name="sasrec", rows={"*": ADAGRAD}, dense=partial(torch.optim.Adam, lr=0.003)),
        Sample(
            name="dlrm_swap.bagpipe_train",
            rows={"*": partial(torch.optim.Adagrad, lr=0.1, eps=1e-8)},
            dense=partial(torch.optim.SGD, lr=0.5),
        ),
    )
}
