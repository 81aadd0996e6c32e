"""Cached collections compared with torchrec's, and conversion of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bagpipe.cache.row_cache import RowCache
from bagpipe.embedding.torchrec_collections import (
    CachedEmbeddingBagCollection,
    CachedEmbeddingCollection,
    Converted,
    convert,
)
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import initial_weights
from bagpipe.kernels.interface import RowStep
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, RowSchema, Table
from tests.cache.plans import DictStore, Job, random_batch

from torchrec.modules.embedding_configs import (  # isort: skip (after bagpipe.embedding.torchrec_collections, which quiets torchrec's import)
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.models.deepfm import SimpleDeepFMNN  # isort: skip
from torchrec.models.dlrm import DLRM, DLRM_DCN  # isort: skip
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection  # isort: skip
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor  # isort: skip

META = torch.device("meta")
NAMES = ("f0", "f1", "f2", "f3")
NUM_IDS = (7, 7, 9, 5)
SCHEMA = DataSchema(
    label="label",
    dense=(),
    features=tuple(Feature(name=name, table=f"data_{name}") for name in NAMES),
    tables=tuple(Table(name=f"data_{name}", rows=rows) for name, rows in zip(NAMES, NUM_IDS, strict=True)),
)


def bag(name: str, dim: int, features: Sequence[str], pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=9, embedding_dim=dim, name=name, feature_names=list(features), pooling=pooling
    )


def seq(name: str, features: Sequence[str]) -> EmbeddingConfig:
    return EmbeddingConfig(num_embeddings=9, embedding_dim=4, name=name, feature_names=list(features))


#: Constructor arguments of collections; every special case of key order, sharing, dims and pooling once.
BAGS: dict[str, tuple[list[EmbeddingBagConfig], bool]] = {
    "one group": ([bag("a", 4, ["f0"]), bag("b", 4, ["f1"])], False),
    "keys out of batch order": ([bag("a", 4, ["f3", "f0"]), bag("b", 4, ["f2"])], False),
    "feature in two tables": ([bag("a", 4, ["f0", "f1"]), bag("b", 4, ["f1", "f2"])], False),
    "mixed dims": ([bag("a", 4, ["f0"]), bag("b", 3, ["f1", "f2"]), bag("c", 4, ["f3"])], False),
    "mean and sum": ([bag("a", 4, ["f0"], PoolingType.MEAN), bag("b", 4, ["f1"]), bag("c", 2, ["f0"])], False),
    "weighted": ([bag("a", 4, ["f2", "f0"]), bag("b", 3, ["f1"])], True),
}


def make_batch(*, weighted: bool = False, seed: int = 0, max_length: int = 3, min_length: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return random_batch(
        rng, num_examples=6, num_ids=NUM_IDS, max_length=max_length, min_length=min_length, weighted=weighted
    )


def kjt_of(batch: Batch, weights: Tensor | None = None) -> KeyedJaggedTensor:
    if weights is None and batch.weights is not None:
        weights = torch.from_numpy(batch.weights)
    return KeyedJaggedTensor(
        keys=list(NAMES),
        values=torch.from_numpy(batch.values),
        lengths=torch.from_numpy(batch.lengths).view(-1),
        weights=weights,
    )


def begin(converted: Converted, batch: Batch, dtype: str = "float32", optimizer: str = "sgd") -> tuple[Job, RowSchema]:
    schema = RowSchema(tables=converted.row_tables, optimizer=optimizer, dtype=dtype, seed=4)
    cache = RowCache(schema, 0)
    converted.bind(cache)
    job = Job(cache, DictStore(schema), converted.layout)
    next(job.steps([batch]))
    return job, schema


def fill_from(converted: Converted, weights: dict[str, nn.Parameter], schema: RowSchema) -> None:
    """Give torchrec's own tables the initial rows of the cached ones."""
    for table in converted.row_tables:
        weight = weights[table.name]
        weight.data = initial_weights(table, np.arange(len(weight)), seed=schema.seed).to(weight.dtype)


# ---- forward and backward contracts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("min_length", [0, 1])
@pytest.mark.parametrize("name", list(BAGS))
def test_bags_equal_torchrec_s(name: str, min_length: int) -> None:
    """Same keys, widths and values; one SGD step changes rows by torchrec's gradient."""
    configs, weighted = BAGS[name]
    batch = make_batch(weighted=weighted, min_length=min_length, max_length=1 if min_length else 3)
    converted = convert(EmbeddingBagCollection(configs, is_weighted=weighted, device=META), SCHEMA)
    job, schema = begin(converted, batch)
    theirs = EmbeddingBagCollection(configs, is_weighted=weighted)
    tables = {table: module.weight for table, module in theirs.embedding_bags.items()}
    fill_from(converted, tables, schema)

    ours, expected = converted.model(kjt_of(batch)), theirs(kjt_of(batch))
    assert isinstance(converted.model, CachedEmbeddingBagCollection)
    assert isinstance(ours, KeyedTensor)
    assert ours.keys() == expected.keys()
    assert ours.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(ours.values(), expected.values(), rtol=1e-6, atol=1e-7)
    for key, value in ours.to_dict().items():
        torch.testing.assert_close(value, expected.to_dict()[key], rtol=1e-6, atol=1e-7)

    factor = torch.randn_like(expected.values())
    (ours.values() * factor).sum().backward()
    (expected.values() * factor).sum().backward()
    assert job.cache.current is not None
    job.cache.update(job.cache.current.context, RowStep(lr=0.5, eps=0.0, step=1))
    for (table, row_id), row in job.finish().items():
        weight = tables[converted.row_tables[table].name]
        assert weight.grad is not None
        moved = weight.detach()[row_id] - 0.5 * weight.grad[row_id]
        np.testing.assert_allclose(row, moved.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("need_indices", [False, True])
def test_sequences_equal_torchrec_s(need_indices: bool) -> None:
    configs = [seq("a", ["f3", "f0"]), seq("b", ["f0", "f2"])]
    batch = make_batch()
    converted = convert(EmbeddingCollection(configs, device=META, need_indices=need_indices), SCHEMA)
    job, schema = begin(converted, batch)
    theirs = EmbeddingCollection(configs, need_indices=need_indices)
    tables = {table: module.weight for table, module in theirs.embeddings.items()}
    fill_from(converted, tables, schema)

    ours, expected = converted.model(kjt_of(batch)), theirs(kjt_of(batch))
    assert isinstance(converted.model, CachedEmbeddingCollection)
    assert list(ours) == list(expected) == ["f3", "f0@a", "f0@b", "f2"]
    for key, value in expected.items():
        assert isinstance(ours[key], JaggedTensor)
        assert torch.equal(ours[key].values(), value.values())
        assert torch.equal(ours[key].lengths(), value.lengths())
        assert torch.equal(ours[key].offsets(), value.offsets())
        if need_indices:
            assert torch.equal(ours[key].weights(), value.weights())

    torch.stack([(jagged.values() ** 2).sum() for jagged in ours.values()]).sum().backward()
    torch.stack([(jagged.values() ** 2).sum() for jagged in expected.values()]).sum().backward()
    assert job.cache.current is not None
    job.cache.update(job.cache.current.context, RowStep(lr=0.5, eps=0.0, step=1))
    for (table, row_id), row in job.finish().items():
        weight = tables[converted.row_tables[table].name]
        assert weight.grad is not None
        np.testing.assert_allclose(row, (weight - 0.5 * weight.grad).detach()[row_id].numpy(), rtol=1e-5, atol=1e-6)


def test_gradient_of_computed_weights() -> None:
    """Per-id weights can come from a module of the model, which is trained through them."""
    configs, _ = BAGS["weighted"]
    batch = make_batch(weighted=True)
    converted = convert(EmbeddingBagCollection(configs, is_weighted=True, device=META), SCHEMA)
    _, schema = begin(converted, batch)
    theirs = EmbeddingBagCollection(configs, is_weighted=True)
    fill_from(converted, {name: module.weight for name, module in theirs.embedding_bags.items()}, schema)
    gradients = []
    for model in (converted.model, theirs):
        weights = torch.from_numpy(batch.weights).requires_grad_() if batch.weights is not None else None
        assert weights is not None
        (model(kjt_of(batch, weights)).values() ** 2).sum().backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_attributes_of_the_interface() -> None:
    configs, _ = BAGS["mixed dims"]
    bags = convert(EmbeddingBagCollection(configs, device=META), SCHEMA).model
    assert isinstance(bags, CachedEmbeddingBagCollection)
    assert bags.embedding_bag_configs() == configs
    assert not bags.is_weighted()
    assert bags.device == torch.device("cpu")
    assert list(bags.parameters()) == []
    assert bags.state_dict() == {}
    sequences = convert(EmbeddingCollection([seq("a", ["f0"])], device=META, need_indices=True), SCHEMA).model
    assert isinstance(sequences, CachedEmbeddingCollection)
    assert (sequences.embedding_dim(), sequences.need_indices()) == (4, True)
    assert sequences.device == torch.device("cpu")
    assert sequences.embedding_names_by_table() == [["f0"]]
    assert [config.name for config in sequences.embedding_configs()] == ["a"]


# ---- conversion ------------------------------------------------------------------------------------------------------


class TwoTowers(nn.Module):
    """Nested, with a bag and a sequence collection, and dense parameters on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        with META:
            self.dense = nn.Sequential(nn.Linear(11, 3), nn.ReLU(), nn.Linear(3, 1))
        bags = EmbeddingBagCollection([bag("a", 4, ["f0"]), bag("b", 3, ["f1"])], device=META)
        self.towers = nn.ModuleDict({"bags": nn.ModuleList([bags]), "again": nn.ModuleList([bags])})
        self.sequence = EmbeddingCollection([seq("c", ["f2"])], device=META)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        tower = self.towers["bags"]
        assert isinstance(tower, nn.ModuleList)
        pooled = tower[0](features).values()
        jagged = self.sequence(features)["f2"]
        last = torch.stack([part.sum(0) for part in torch.split(jagged.values(), jagged.lengths().tolist())])
        out: Tensor = self.dense(torch.cat([pooled, last], dim=1))
        return out


def test_convert_a_nested_model() -> None:
    model = TwoTowers()
    model.eval()
    torch.manual_seed(0)
    converted = convert(model, SCHEMA, dtype="float64")
    assert converted.model is model
    assert [(t.name, t.dim, t.rows) for t in converted.row_tables] == [("a", 4, 7), ("b", 3, 7), ("c", 4, 9)]
    assert [(ref.feature, ref.table) for ref in converted.features] == [(0, 0), (1, 1), (2, 2)]
    assert converted.row_tables[0].init_bound == (1 / 9) ** 0.5
    tower, again = model.towers["bags"], model.towers["again"]
    assert isinstance(tower, nn.ModuleList)
    assert isinstance(again, nn.ModuleList)
    assert tower[0] is again[0]
    assert isinstance(tower[0], CachedEmbeddingBagCollection)
    assert isinstance(model.sequence, CachedEmbeddingCollection)
    assert not tower[0].training
    assert {name for name, _ in model.named_parameters()} == {
        "dense.0.weight",
        "dense.0.bias",
        "dense.2.weight",
        "dense.2.bias",
    }
    begin(converted, make_batch(), dtype="float64")
    assert model(kjt_of(make_batch())).dtype == torch.float64


def _bags_of_eight() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([bag("a", 8, ["f0"]), bag("b", 8, ["f1", "f2"]), bag("c", 8, ["f3"])], device=META)


@pytest.mark.parametrize(
    "build",
    [
        lambda bags: DLRM(bags, 2, [8, 8], [8, 1]),
        lambda bags: DLRM(bags, 2, [8, 8], [8, 1], dense_device=META),
        lambda bags: DLRM_DCN(bags, 2, [8, 8], [8, 1], dcn_num_layers=2, dcn_low_rank_dim=4),
        lambda bags: SimpleDeepFMNN(2, bags, hidden_layer_size=8, deep_fm_dimension=4),
    ],
    ids=["dlrm", "dlrm-meta", "dcn-v2", "deepfm"],
)
def test_torchrec_models(build: Callable[[EmbeddingBagCollection], nn.Module]) -> None:
    """torchrec's own models convert, run, and update all their rows."""
    batch = make_batch()
    converted = convert(build(_bags_of_eight()), SCHEMA)
    job, _ = begin(converted, batch)
    logits = converted.model(torch.from_numpy(batch.dense), kjt_of(batch))
    assert logits.shape == (6, 1)
    logits.sum().backward()
    assert job.cache.current is not None
    job.cache.update(job.cache.current.context, RowStep(lr=0.1, eps=1e-8, step=1))
    statistics = job.cache.statistics()
    assert statistics.updated == statistics.dirty == statistics.resident > 0


def test_training_steps_equal_plain_modules() -> None:
    """Several Adagrad steps of the whole model in float64, dense part included, within 1e-12."""
    torch.manual_seed(1)
    converted = convert(TwoTowers(), SCHEMA, dtype="float64")
    schema = RowSchema(tables=converted.row_tables, optimizer="adagrad", dtype="float64", seed=2)
    cache = RowCache(schema, 0)
    converted.bind(cache)
    job = Job(cache, DictStore(schema), converted.layout)
    batches = [make_batch(seed=seed) for seed in range(6)]

    weights = [nn.Parameter(initial_weights(t, np.arange(9), seed=2, dtype="float64")) for t in schema.tables]
    dense = nn.Sequential(nn.Linear(11, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    assert isinstance(converted.model.dense, nn.Module)
    dense.load_state_dict(converted.model.dense.state_dict())
    reference = torch.optim.Adagrad([*weights, *dense.parameters()], lr=0.1, eps=1e-8)
    optimizer = torch.optim.Adagrad(converted.model.parameters(), lr=0.1, eps=1e-8)
    for step, context in enumerate(job.steps(batches)):
        optimizer.zero_grad()
        loss = (converted.model(kjt_of(batches[step])) ** 2).mean()
        loss.backward()
        cache.update(context, RowStep(lr=0.1, eps=1e-8, step=step + 1))
        optimizer.step()

        reference.zero_grad()
        parts = []
        for feature, jagged in enumerate(kjt_of(batches[step]).to_dict()[name] for name in NAMES[:3]):
            bags = (jagged.values(), weights[feature], jagged.offsets())
            parts.append(nn.functional.embedding_bag(*bags, mode="sum", include_last_offset=True))
        expected = (dense(torch.cat(parts, dim=1)) ** 2).mean()
        expected.backward()
        reference.step()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for (table, row_id), record in job.finish().items():
        np.testing.assert_allclose(
            record[: schema.tables[table].dim], weights[table][row_id].detach().numpy(), rtol=1e-12, atol=1e-12
        )


def _with(**changes: object) -> Callable[[], nn.Module]:
    arguments = {"num_embeddings": 9, "embedding_dim": 4, "name": "a", "feature_names": ["f0"], **changes}
    return lambda: EmbeddingBagCollection([EmbeddingBagConfig(**arguments)], device=META)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "expected a model with torchrec embedding collections, Linear has none"),
        (_with(feature_names=["nope"]), r"table 'a' reads feature 'nope', the data has \['f0', 'f1', 'f2', 'f3'\]"),
        (_with(num_embeddings=6), "num_embeddings must be at least the data's 7, got 6"),
        (_with(data_type=DataType.INT8), "data_type must be one of FP32, FP16, BF16, got INT8"),
        (_with(init_fn=nn.init.zeros_), "init_fn is not supported"),
        (_with(weight_init_min=-1.0, weight_init_max=2.0), r"expected weight_init_max above 0 .* got 2\.0 and -1\.0"),
        (
            lambda: EmbeddingBagCollection([bag("a", 4, ["f0"], PoolingType.MEAN)], is_weighted=True, device=META),
            "a weighted collection needs sum pooling, got mean",
        ),
    ],
)
def test_models_that_cannot_be_converted(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(build(), SCHEMA)
