"""The tables of a torchrec model as the data of its user sees them: schema, row optimizers, weights.

model ──schema_of──> DataSchema: the features of its collections, in order
      ──table_rows──> rows of each table: ids in [0, num_embeddings), or any id
      ──optimizers_in_backward──> row optimizers that the user gave torch's optimizer-in-backward
      ──held_weights──> values of tables that are on a real device
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from bagpipe.errors import InputError
from bagpipe.optim import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from bagpipe.types.schema import DataSchema, Feature, Table

with warnings.catch_warnings():  # torchrec and fbgemm warn about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

__all__ = ["embedding_parameters", "held_weights", "optimizers_in_backward", "schema_of", "table_rows"]

#: Stands for all tables in `schema_of`'s `unbounded`.
ALL_TABLES = "*"


def schema_of(model: nn.Module) -> DataSchema:
    """The features that the collections of a model look up, in the order of the collections; without vocabularies.

    Args:
        model: with torchrec's collections.

    Raises:
        InputError: the model has no collection.
    """
    configs = _all_configs(model)
    if not configs:
        raise InputError(
            f"expected a model with a torchrec EmbeddingBagCollection or EmbeddingCollection, {type(model).__name__} "
            "has none"
        )
    names = dict.fromkeys(feature for config in configs for feature in config.feature_names)
    return DataSchema(
        label="",
        dense=(),
        features=tuple(Feature(name=name, table=name) for name in names),
        tables=tuple(Table(name=name, rows=None) for name in names),
    )


def table_rows(model: nn.Module, unbounded: Collection[str] = ()) -> dict[str, int | None]:
    """Rows of every table, by name; None: any id.

    Args:
        model: with torchrec's collections.
        unbounded: names of tables that take any 64-bit id, whatever their `num_embeddings`; ``"*"``: all.

    Raises:
        InputError: `unbounded` names no table of the model.
    """
    sizes = {config.name: config.num_embeddings for config in _all_configs(model)}
    unknown = sorted(set(unbounded) - sizes.keys() - {ALL_TABLES})
    if unknown:
        raise InputError(f"unbounded names table {unknown[0]!r}, the model has {list(sizes)}")
    return {name: None if name in unbounded or ALL_TABLES in unbounded else size for name, size in sizes.items()}


def embedding_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter of the model's collections."""
    return [parameter for _, collection in _collections(model) for parameter in collection.parameters()]


def held_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights ``[num_embeddings, dim]`` of the tables that are not on the meta device, by table name."""
    return {name: weight.detach() for name, weight in _weights(model) if not weight.is_meta}


def optimizers_in_backward(model: nn.Module) -> dict[str, RowOptimizer]:
    """Row optimizers by table name, from `apply_optimizer_in_backward` of torch or torchrec; empty without.

    Raises:
        InputError: an optimizer that rows do not have, or one of its options.
    """
    found: dict[str, RowOptimizer] = {}
    for name, weight in _weights(model):
        classes = getattr(weight, "_optimizer_classes", ())
        if not classes:
            continue
        options = dict(getattr(weight, "_optimizer_kwargs", ({},))[0])
        make = _IN_BACKWARD.get(classes[0].__name__)
        if make is None or len(classes) > 1:
            raise InputError(
                f"table {name!r}: optimizer-in-backward {', '.join(c.__name__ for c in classes)} has no row optimizer; "
                f"expected one of {', '.join(_IN_BACKWARD)}, or give rows="
            )
        found[name] = make(name, options)
    return found


def _optimizer(kind: Any, defaults: Mapping[str, Any]) -> Callable[[str, dict[str, Any]], RowOptimizer]:
    """Makes a row optimizer of a torch optimizer's options; those that rows lack must have torch's default."""

    def make(table: str, options: dict[str, Any]) -> RowOptimizer:
        values = {**defaults, **options}
        taken = {key: values.pop(key) for key in ("lr", "eps") if key in values}
        for key, value in values.items():
            neutral = (0.9, 0.999) if key == "betas" else 0
            if value not in (neutral, False, None):
                raise InputError(f"table {table!r}: {kind.__name__} of rows has no {key}, got {key}={value!r}")
        made: RowOptimizer = kind(taken.pop("lr"), **taken)
        return made

    return make


#: Class name of an optimizer-in-backward -> maker of the row optimizer; defaults are those of the class.
_IN_BACKWARD: Mapping[str, Callable[[str, dict[str, Any]], RowOptimizer]] = {
    "SGD": _optimizer(SGD, {"lr": 1e-3}),
    "Adagrad": _optimizer(Adagrad, {"lr": 1e-2, "eps": 1e-10}),
    "RowWiseAdagrad": _optimizer(RowWiseAdagrad, {"lr": 1e-2, "eps": 1e-10}),
    "SparseAdam": _optimizer(Adam, {"lr": 1e-3, "eps": 1e-8}),
    "Adam": _optimizer(Adam, {"lr": 1e-3, "eps": 1e-8}),
}


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every table's weight, with the name of the table."""
    for _, collection in _collections(model):
        held = collection.embedding_bags if isinstance(collection, EmbeddingBagCollection) else collection.embeddings
        for name, module in held.items():
            yield name, module.weight


def _collections(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            yield name, module


def _all_configs(model: nn.Module) -> list[Any]:
    return [config for _, collection in _collections(model) for config in _configs(collection)]


def _configs(collection: Any) -> list[Any]:
    configs: list[Any] = (
        collection.embedding_bag_configs()
        if isinstance(collection, EmbeddingBagCollection)
        else collection.embedding_configs()
    )
    return configs
