from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bagpipe.config.sections import ModelConfig
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.errors import InputError
from bagpipe.models.torchrec_models import MODELS, build_model
from bagpipe.split.operators import ModelParts
from bagpipe.split.split import trace_parts
from tests.split.whole_models import NUM_DENSE, library_model
from tests.trainer.schemas import schema_of

from torchrec.modules.embedding_configs import EmbeddingConfig  # isort: skip (after bagpipe.embedding.torchrec_collections)
from torchrec.modules.embedding_modules import EmbeddingCollection  # isort: skip


def parts_of(model: nn.Module, num_dense: int = NUM_DENSE) -> ModelParts:
    return trace_parts(model, num_dense=num_dense, dtype=torch.float64)


def test_the_source_is_lookups_and_moves() -> None:
    parts = parts_of(library_model("dlrm"))
    assert parts.embedding_nodes[0].name == "sparse_arch_embedding_bag_collection"
    assert parts.embedding_nodes[-1].name == "reshape"
    assert not any(parts.traced.parameters_of(node) for node in parts.embedding_nodes)
    names = [item.name for item in parts.operators]
    assert names[3:6] == ["inter_arch.cat_1", "inter_arch.bmm", "inter_arch.cat_2"]
    # A transposed or reshaped tensor belongs to its user's operator, a nonlinearity to its layer's.
    assert [node.name for node in parts.operators[4].nodes] == ["transpose", "bmm", "getitem_11"]
    assert [node.name for node in parts.operators[0].nodes] == ["dense_arch_model__mlp_0__linear", "relu"]
    assert [item.inputs for item in parts.operators[:6]] == [(), (0,), (1,), (2,), (3,), (2, 4)]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "esmm"])  # which needs two labels
def test_cached_collections_give_the_parts_of_plain_ones(name: str) -> None:
    schema = schema_of(*[None] * 9, dense=NUM_DENSE)
    config = ModelConfig(name=name, embedding_dim=4, bottom_mlp=(8, 6), top_mlp=(7, 5))
    cached = parts_of(convert(build_model(schema, config), schema, dtype="float64").model)
    plain = parts_of(library_model(name))
    assert [(item.name, item.inputs) for item in cached.operators] == [
        (item.name, item.inputs) for item in plain.operators
    ]
    assert [cached.shapes[node] for node in cached.dense_nodes] == [plain.shapes[node] for node in plain.dense_nodes]


class Sequences(nn.Module):
    """Unpooled embeddings."""

    def __init__(self, how: str) -> None:
        super().__init__()
        config = EmbeddingConfig(num_embeddings=10, embedding_dim=4, name="t0", feature_names=["f0"])
        self.rows = EmbeddingCollection(tables=[config], device=torch.device("meta"))
        self.layer = nn.Linear(4, 1)
        self.attention = nn.Linear(2, 4)
        self.how = how

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        jagged = self.rows(sparse)["f0"]
        if self.how == "padded":
            return self.layer(jagged.to_padded_dense(5).sum(1))  # type: ignore[no-any-return]
        if self.how == "segments":
            return self.layer(torch.segment_reduce(jagged.values(), "sum", lengths=jagged.lengths()))  # type: ignore[no-any-return]
        if self.how == "layer":
            return self.layer(jagged.values()).sum(0)  # type: ignore[no-any-return]
        if self.how == "dense first":
            return (jagged.values() @ self.attention(dense).T).sum(0)  # type: ignore[no-any-return]
        return jagged.values()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("how", "last"), [("padded", "to_padded_dense"), ("segments", "segment_reduce")])
def test_unpooled_vectors_are_pooled_in_the_source(how: str, last: str) -> None:
    parts = trace_parts(Sequences(how), num_dense=2, dtype=torch.float32)
    assert parts.embedding_nodes[-1].name == last
    assert parts.shapes[parts.embedding_nodes[-1]].by_example


class Headless(nn.Module):
    def __init__(self, result: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.result = result

    def forward(self, dense: Tensor, sparse: object) -> object:
        return self.result(dense, self.layer(dense))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Sequences("layer"), r"layer: combines parameter 'layer.bias' with values, which has not one row per example"),
        (Sequences("dense first"), "matmul: combines .* of the dense part with values"),
        (Headless(lambda dense, logits: {"a": logits}), "must return logits or a tuple of them, got dict"),
        (Headless(lambda dense, logits: (logits, dense)), "output 1 of model Headless depends on no dense operator"),
        (Headless(lambda dense, logits: logits.sum()), "output 0 of model Headless must be logits, .* from sum_1"),
    ],
)
def test_models_without_source_or_outputs_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(InputError, match=words):
        trace_parts(model, num_dense=2, dtype=torch.float32)
