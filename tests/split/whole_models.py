"""References for stages: library models with rows in ordinary parameters, and a staged model run as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.config.sections import ModelConfig
from bagpipe.embedding.torchrec_collections import convert as _  # noqa: F401  (quiets the import of torchrec)
from bagpipe.models.torchrec_models import build_model
from bagpipe.split.staged_model import StagedModel
from tests.trainer.schemas import schema_of

from torchrec.modules.embedding_modules import (  # isort: skip (after bagpipe.embedding.torchrec_collections, which quiets its import)
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor  # isort: skip

NUM_FEATURES = 9
NUM_DENSE = 3
MODEL_NAMES = ("dlrm", "dcnv2", "deepfm", "wide-deep", "towers", "dcnv2-fuxictr", "deepfm-fuxictr", "finalmlp", "own")


class PlainBags(EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """A float64 collection, one `nn.EmbeddingBag` per table. torchrec's own has no float64."""

    def __init__(self, configs: list[Any]) -> None:
        super().__init__()
        self.configs = configs
        self.tables = nn.ModuleList(nn.EmbeddingBag(c.num_embeddings, c.embedding_dim, mode="sum") for c in configs)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        columns = [
            table(features[name].values(), features[name].offsets()[:-1])
            for table, config in zip(self.tables, self.configs, strict=True)
            for name in config.feature_names
        ]
        names = [name for names in get_embedding_names_by_table(self.configs) for name in names]
        widths = [column.shape[1] for column in columns]
        return KeyedTensor(keys=names, length_per_key=widths, values=torch.cat(columns, dim=1))

    def embedding_bag_configs(self) -> list[Any]:
        return self.configs

    def is_weighted(self) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


def library_model(name: str) -> nn.Module:
    """A library model, or the example's, in float64 with rows in ordinary parameters."""
    schema = schema_of(*[None] * NUM_FEATURES, dense=NUM_DENSE)
    factory = "examples.own_model:build" if name == "own" else ""
    torch.manual_seed(7)
    config = ModelConfig(name=name, factory=factory, embedding_dim=4, bottom_mlp=(8, 6), top_mlp=(7, 5))
    return with_plain_bags(build_model(schema, config))


def with_plain_bags(model: nn.Module) -> nn.Module:
    """`model` in float64, its collections replaced by `PlainBags`."""
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if isinstance(child, EmbeddingBagCollection):
                setattr(parent, key, PlainBags(child.embedding_bag_configs()))
    return model.double()


def random_batch(num_examples: int, seed: int = 0) -> tuple[Tensor, Any]:
    """Random dense inputs and ids, one or two per feature."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 3, (NUM_FEATURES * num_examples,), generator=draw)
    ids = torch.randint(0, 10, (int(lengths.sum()),), generator=draw)
    sparse = KeyedJaggedTensor(keys=[f"f{n}" for n in range(NUM_FEATURES)], values=ids, lengths=lengths)
    return torch.randn(num_examples, NUM_DENSE, dtype=torch.float64, generator=draw), sparse


def run_staged(staged: StagedModel, dense: Tensor, sparse: Any) -> list[Tensor]:
    """Run source and stages in sequence. Returns the model's outputs."""
    values: dict[int, Tensor] = dict(zip(staged.embedding_values, staged.embedding(dense, sparse), strict=True))
    heads: dict[int, Tensor] = {}
    for number in staged.graph(1).order:
        stage = staged.stages[number]
        results = stage.module(*(values[n] for n in stage.inputs))
        values.update(zip(stage.outputs, results, strict=True))
        heads.update((position, values[n]) for position, n in stage.heads)
    for number, value in values.items():
        described = staged.values[number]
        assert tuple(value.shape) == (len(dense), *described.shape)
        assert (value.dtype, value.requires_grad) == (described.dtype, described.wants_grad)
    return [heads[position] for position in sorted(heads)]


def outputs_and_gradients(model: nn.Module, outputs: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs, and gradients of a loss with a different weight per example. Clears the model's gradients."""
    weights = torch.arange(1, outputs[0].numel() + 1, dtype=torch.float64).view_as(outputs[0])
    sum((output * weights).square().sum() for output in outputs).backward()  # type: ignore[union-attr]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return [output.detach() for output in outputs], gradients
