"""The tables of a torchrec model as the data of its user sees them: schema, row optimizers, weights.

model ──schema_of──> DataSchema: the features of its collections, in order
      ──table_rows──> rows of each table: ids in [0, num_embeddings), or any id
      ──optimizers_in_backward──> row optimizers that the user gave torch's optimizer-in-backward
      ──held_weights──> values of tables that are on a real device
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bagpipe.embedding.table_configs import collections_of, configs_of, table_names_of
from bagpipe.errors import InputError
from bagpipe.kernels.row_optimizer import ADAM_BETAS
from bagpipe.optim import SGD, Adagrad, Adam, RowOptimizer, RowWiseAdagrad
from bagpipe.types.schema import DataSchema, Feature, Table

with warnings.catch_warnings():  # torchrec and fbgemm warn about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

__all__ = [
    "ModelTable",
    "embedding_parameters",
    "held_weights",
    "optimizers_in_backward",
    "schema_of",
    "table_rows",
    "tables_of",
]

#: Stands for all tables in `schema_of`'s `unbounded`.
ALL_TABLES = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """One table of a torchrec model.

    Attributes:
        name: in the model; see `bagpipe.embedding.table_configs.table_names_of`.
        config: torchrec's.
        module: an `nn.EmbeddingBag` or `nn.Embedding`, unless somebody has replaced it.
    """

    name: str
    config: Any
    module: Any


def schema_of(model: nn.Module) -> DataSchema:
    """The features that the collections of a model look up, in the order of the collections; without vocabularies.

    Args:
        model: with torchrec's collections.

    Raises:
        InputError: the model has no collection.
    """
    configs = [config for collection in collections_of(model) for config in configs_of(collection)]
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
    sizes = {table.name: table.config.num_embeddings for table in tables_of(model)}
    unknown = sorted(set(unbounded) - sizes.keys() - {ALL_TABLES})
    if unknown:
        raise InputError(f"unbounded names table {unknown[0]!r}, the model has {list(sizes)}")
    return {name: None if name in unbounded or ALL_TABLES in unbounded else size for name, size in sizes.items()}


def tables_of(model: nn.Module) -> list[ModelTable]:
    """The tables of a model's collections, in order."""
    return [
        ModelTable(name=name, config=config, module=module)
        for collection, names in table_names_of(model).items()
        for name, config, module in zip(names, configs_of(collection), _modules(collection), strict=True)
    ]


def embedding_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter of the model's collections."""
    return [parameter for collection in collections_of(model) for parameter in collection.parameters()]


def held_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights ``[num_embeddings, dim]`` of the tables that are not on the meta device, by table name."""
    weights = {table.name: table.module.weight.detach() for table in tables_of(model)}
    return {name: weight for name, weight in weights.items() if not weight.is_meta}


def optimizers_in_backward(model: nn.Module) -> dict[str, RowOptimizer]:
    """Row optimizers by table name, from `apply_optimizer_in_backward` of torch or torchrec; empty without.

    Raises:
        InputError: an optimizer that rows do not have, or one of its options.
    """
    found: dict[str, RowOptimizer] = {}
    for table in tables_of(model):
        name, weight = table.name, table.module.weight
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


def _optimizer(kind: Any) -> Callable[[str, dict[str, Any]], RowOptimizer]:
    """Makes a row optimizer of an attached one's options; those that rows lack must have the value that rows have."""

    def make(table: str, options: dict[str, Any]) -> RowOptimizer:
        values = dict(options)
        known = {field.name for field in dataclasses.fields(kind)}
        taken = {key: values.pop(key, default) for key, default in _FBGEMM.items() if key in known}
        for key, value in values.items():
            if (tuple(value) if isinstance(value, list) else value) not in (_NEUTRAL.get(key, 0), False, None):
                raise InputError(f"table {table!r}: {kind.__name__} of rows has no {key}, got {key}={value!r}")
        made: RowOptimizer = kind(taken.pop("lr"), **taken)
        return made

    return make


#: Options that FBGEMM, which torchrec gives the attached optimizers to, has where none are named; not those of torch.
_FBGEMM: Mapping[str, float] = {"lr": 0.01, "eps": 1e-8}

#: Option, torch's or FBGEMM's -> its value of rows; of others: 0, False or None.
_NEUTRAL: Mapping[str, Any] = {"betas": ADAM_BETAS, "beta1": ADAM_BETAS[0], "beta2": ADAM_BETAS[1]}

#: Class name of an optimizer-in-backward -> maker of the row optimizer.
_IN_BACKWARD: Mapping[str, Callable[[str, dict[str, Any]], RowOptimizer]] = {
    "SGD": _optimizer(SGD),
    "Adagrad": _optimizer(Adagrad),
    "RowWiseAdagrad": _optimizer(RowWiseAdagrad),
    "SparseAdam": _optimizer(Adam),
    "Adam": _optimizer(Adam),
}


def _modules(collection: Any) -> list[Any]:
    """The torch modules of a collection's tables, in the order of its configs."""
    held = collection.embedding_bags if isinstance(collection, EmbeddingBagCollection) else collection.embeddings
    return [held[config.name] for config in configs_of(collection)]
