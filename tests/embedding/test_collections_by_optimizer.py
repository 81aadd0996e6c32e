"""torchrec's collections whose tables have row optimizers of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.cache.row_cache import RowCache
from bagpipe.embedding.torchrec_collections import Converted, convert
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import initial_weights
from bagpipe.optim import SGD, Adagrad, Frozen, RowOptimizers
from bagpipe.training.row_steps import row_steps_of
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, RowSchema, Table
from tests.cache.plans import DictStore, Job, random_batch

NAMES, NUM_IDS = ("f0", "f1", "f2"), 9
SCHEMA = DataSchema(
    label="label",
    dense=(),
    features=tuple(Feature(name=name, table=name) for name in NAMES),
    tables=tuple(Table(name=name, rows=NUM_IDS) for name in NAMES),
)
MODEL = "abc"


def bags(*, is_weighted: bool = False) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=NUM_IDS, feature_names=[feature])
        for name, feature in zip(MODEL, NAMES, strict=True)
    ]
    return EmbeddingBagCollection(configs, is_weighted=is_weighted)


def sequences() -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=NUM_IDS, feature_names=[feature])
        for name, feature in zip(MODEL, NAMES, strict=True)
    ]
    return EmbeddingCollection(configs)


def converted(model: nn.Module, rows: RowOptimizers | None) -> Converted:
    return convert(model, SCHEMA, optimizers=rows)


def numbering(found: Converted) -> list[tuple[str, str | None]]:
    return [(table.name, table.optimizer) for table in found.row_tables]


@pytest.mark.parametrize("make", [bags, sequences])
def test_tables_of_one_optimizer_are_numbered_side_by_side(make: type[nn.Module]) -> None:
    plain = converted(make(), None)
    assert numbering(plain) == [("a", None), ("b", None), ("c", None)]
    assert (plain.optimizers, plain.optimizer) == ((), None)
    same = converted(make(), Adagrad(0.1))
    assert same.row_tables == plain.row_tables
    assert same.layout == plain.layout
    assert (same.optimizers, same.optimizer) == ((Adagrad(0.1),) * 3, "adagrad")
    mixed = converted(make(), {"b": Frozen(), "*": Adagrad(0.1)})
    assert numbering(mixed) == [("a", None), ("c", None), ("b", "frozen")]
    assert [group.is_frozen for group in mixed.layout.groups] == [False, True]
    assert mixed.optimizers == (Adagrad(0.1), Adagrad(0.1), Frozen())


def test_another_rate_changes_no_table_number() -> None:
    """So a job can go on with other rates: the row schema stays."""
    found = converted(bags(), {"b": SGD(0.2), "*": SGD(0.1)})
    assert numbering(found) == [("a", None), ("b", None), ("c", None)]
    assert [(group.first_table, group.end_table) for group in found.layout.groups] == [(0, 1), (1, 2), (2, 3)]


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(InputError, match=r"of the tables \['a', 'b', 'c'\].*unknown \['d'\]"):
        converted(bags(), {"d": SGD(0.2), "*": SGD(0.1)})


# ---- forward, backward and update ------------------------------------------------------------------------------------


def kjt_of(batch: Batch, weights: torch.Tensor | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(NAMES),
        values=torch.from_numpy(batch.values),
        lengths=torch.from_numpy(batch.lengths).view(-1),
        weights=weights,
    )


@pytest.mark.parametrize("kind", ["bags", "weighted", "sequences"])
def test_one_step_changes_the_rows_that_are_not_frozen(kind: str) -> None:
    """And gradients reach the per-id weights of a frozen table, as those of the others."""
    is_weighted = kind == "weighted"
    batch = random_batch(np.random.default_rng(1), num_examples=6, num_ids=[NUM_IDS] * 3, max_length=3)
    make = sequences if kind == "sequences" else lambda: bags(is_weighted=is_weighted)
    ours = converted(make(), {"a": SGD(0.1), "b": Frozen(), "c": SGD(0.2)})
    schema = RowSchema(tables=ours.row_tables, optimizer="sgd", seed=4)
    cache = RowCache(schema, 0)
    ours.bind(cache)
    job = Job(cache, DictStore(schema), ours.layout)
    (context,) = job.steps([batch])

    theirs = make()
    modules = theirs.embeddings if kind == "sequences" else theirs.embedding_bags
    tables = {name: modules[name].weight for name in MODEL}
    for table in ours.row_tables:
        tables[table.name].data = initial_weights(table, np.arange(NUM_IDS), seed=4)
        tables[table.name].requires_grad_(table.name != "b")
    gradients = []
    for model in (ours.model, theirs):
        weights = torch.linspace(-1, 1, len(batch.values)).requires_grad_() if is_weighted else None
        found = model(kjt_of(batch, weights))
        values = [jagged.values() for jagged in found.values()] if kind == "sequences" else [found.values()]
        sum((value * value).sum() for value in values).backward()
        gradients.append(None if weights is None else weights.grad)
    if is_weighted:
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)
    assert cache.current is not None
    for group in cache.current.groups:
        assert len(group.gradients) == (0 if group.context.tables.is_frozen else 1)
    cache.update(context, row_steps_of(ours.layout, ours.optimizers)(0))
    for name, rate in (("a", 0.1), ("c", 0.2)):
        tables[name].data -= rate * tables[name].grad
    written = job.finish()
    assert {schema.tables[table].name for table, _ in written} == {"a", "c"}
    for (table, row_id), record in written.items():
        expected = tables[schema.tables[table].name][row_id].detach().numpy()
        np.testing.assert_allclose(record, expected, rtol=1e-6, atol=1e-7)
