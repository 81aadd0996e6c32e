"""What a user's model must be before a pipeline takes it. Nothing changes here.

check_model    no wrapper that shards or averages it, no pipeline's already, no parameter without a shape
check_tables   tables as torchrec makes them: nothing that a user has put on one would be lost with its parameter
dtype_of       dtype of vectors, and of rows that are configured as FP32
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bagpipe.embedding.model_tables import ModelTable, tables_of
from bagpipe.embedding.table_configs import collections_of, configs_of, other_collections_of
from bagpipe.embedding.table_configs import dtype_of as configured_dtype
from bagpipe.embedding.table_dtypes import RowDtypes
from bagpipe.embedding.torchrec_collections import CachedEmbeddingBagCollection, CachedEmbeddingCollection
from bagpipe.errors import InputError
from bagpipe.optim import Frozen, RowOptimizer

__all__ = ["check_model", "check_tables", "dtype_of"]

#: Wrapper, by the name of its class -> why a model comes without it.
_WRAPPERS: Mapping[str, str] = {
    "DistributedModelParallel": "the pipeline itself trains on all ranks, and rows are in a store",
    "FullyShardedDataParallel": "the pipeline itself trains on all ranks",
    "DistributedDataParallel": "the pipeline itself sums the gradients of all ranks",
}
_CACHED = (CachedEmbeddingBagCollection, CachedEmbeddingCollection)
#: Dtypes of the weights of a table by the dtype of its config. torchrec makes BF16 float16, too.
_HELD_AS: Mapping[str | None, tuple[torch.dtype, ...]] = {
    None: (torch.float32,),
    "float16": (torch.float16,),
    "bfloat16": (torch.bfloat16, torch.float16),
}
#: Settings of torch's embedding modules that a lookup has not, with their neutral values.
_SETTINGS: Mapping[str, Any] = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_model(model: nn.Module) -> None:
    """Check what the model is made of.

    Raises:
        InputError: it is no module, is wrapped, belongs to a pipeline, has another kind of collection, a parameter
            without a shape or a dense one that its backward steps, or an average of it was made already.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for path, module in model.named_modules():
        names = [kind.__name__ for kind in type(module).__mro__]
        for wrapper, reason in _WRAPPERS.items():
            if wrapper in names:
                raise InputError(f"expected a model without {wrapper}, got one with: {reason}")
        if isinstance(module, _CACHED):
            raise InputError(
                f"expected a model of its own for each pipeline, but collection {path!r} belongs to one already, whose "
                "store has its rows: make the model anew"
            )
        tensors = {**module._parameters, **module._buffers}
        lazy = [name for name, tensor in tensors.items() if tensor is not None and is_lazy(tensor)]
        if lazy:
            raise InputError(
                f"module {path!r} ({type(module).__name__}) has no shape of its {lazy[0]} yet: expected a module with "
                "sizes, or one that was called once with an example of its input"
            )
        if any(type(tensor).__name__ == "DTensor" for tensor in tensors.values()):
            raise InputError(f"module {path!r} is divided among ranks: the pipeline itself trains on all ranks")
    for path, kind in other_collections_of(model):
        raise InputError(
            f"collection {path!r} is a {kind}: expected torchrec's EmbeddingBagCollection or EmbeddingCollection, not "
            "sharded, fused or quantised"
        )
    for path, module in _outside_of(model, set(collections_of(model))):
        for name, parameter in module._parameters.items():
            if getattr(parameter, "_in_backward_optimizers", ()):
                raise InputError(
                    f"parameter {name!r} of module {path!r} has an optimizer in its backward, whose state no "
                    "checkpoint would have: give it to the dense optimizer; apply_optimizer_in_backward is for tables"
                )
            if parameter is not None and parameter.is_meta and _has_hooks(parameter):
                raise InputError(
                    f"parameter {name!r} of module {path!r} is on the meta device and has a hook, which would be lost "
                    "when it gets values: register the hook when the pipeline is made, or build that part on a real "
                    "device"
                )
    _check_averages(model)


def check_tables(model: nn.Module, optimizers: Mapping[str, RowOptimizer], row_dtype: RowDtypes | None) -> None:
    """Check the tables of a model: their weights become rows of a store.

    Args:
        model: the user's.
        optimizers: of the rows, by table name.
        row_dtype: over the `data_type` of the tables.

    Raises:
        InputError: a weight is also another parameter; a setting, hook or parametrization of its would be lost; or its
            dtype is not the one that is configured.
    """
    for collection, path in collections_of(model).items():
        forward = vars(collection).get("forward", type(collection).forward)
        if not str(forward.__module__).startswith("torchrec."):
            raise InputError(
                f"collection {path!r} ({type(collection).__name__}) has a forward of its own, which would not be "
                "called: expected torchrec's, and a module around the collection for the rest"
            )
    _check_tied(model)
    wide = (torch.float64,) if dtype_of(model) == "float64" else ()
    for table in tables_of(model):
        _check_module(table)
        weight = table.module.weight
        if not weight.requires_grad and not isinstance(optimizers[table.name], Frozen):
            raise InputError(
                f"table {table.name!r} has requires_grad=False, but its rows would be trained: give it "
                f"bagpipe.optim.Frozen() in rows, got {optimizers[table.name]}"
            )
        is_named = row_dtype is not None and (isinstance(row_dtype, str) or {table.name, "*"} & row_dtype.keys())
        if not is_named and weight.dtype not in (*wide, *_HELD_AS[configured_dtype(table.config)]):
            raise InputError(
                f"table {table.name!r} has weights of {_name(weight.dtype)}, but its data_type is "
                f"{table.config.data_type.value}: name the dtype of its rows with row_dtype"
            )


def dtype_of(model: nn.Module) -> str:
    """Dtype of vectors and of the rows of FP32 tables: float64 if the dense part or all these tables are, or float32.

    Raises:
        InputError: some of these tables are float64, others are not.
    """
    tables = {id(table.module.weight): table for table in tables_of(model)}
    dense = {p.dtype for p in model.parameters() if p.is_floating_point() and id(p) not in tables}
    if dense == {torch.float64}:
        return "float64"
    by_dtype = {
        table.module.weight.dtype: table.name for table in tables.values() if configured_dtype(table.config) is None
    }
    if torch.float64 in by_dtype and len(by_dtype) > 1:
        other = next(dtype for dtype in by_dtype if dtype != torch.float64)
        raise InputError(
            f"tables must all be of float64 or none, got {_name(other)} in {by_dtype[other]!r} and float64 in "
            f"{by_dtype[torch.float64]!r}"
        )
    return "float64" if torch.float64 in by_dtype else "float32"


def _check_module(table: ModelTable) -> None:
    """Check that a table's module is torch's, and its weight a plain parameter."""
    module = table.module
    if type(module) not in (nn.EmbeddingBag, nn.Embedding) or module._parameters.keys() != {"weight"}:
        raise InputError(
            f"table {table.name!r}: expected torchrec's module of a table, got {type(module).__name__} with "
            f"{sorted(name for name, _ in module.named_parameters())}: rows in a store have no parametrization"
        )
    for name, neutral in _SETTINGS.items():
        if getattr(module, name) != neutral:
            raise InputError(f"table {table.name!r}: rows in a store have no {name}, got {getattr(module, name)}")
    hooks = any(getattr(module, name) for name in _HOOKS)
    if hooks or _has_hooks(module.weight):
        raise InputError(
            f"table {table.name!r} has a hook on its {'module' if hooks else 'weight'}, which would never be called: "
            "put it on the collection"
        )


def _has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _check_tied(model: nn.Module) -> None:
    """Check that no table's weight is also another parameter."""
    owners: dict[int, str] = {}
    for table in tables_of(model):
        first = owners.setdefault(id(table.module.weight), table.name)
        if first != table.name:
            raise InputError(f"tables {first!r} and {table.name!r} have one weight: rows of a store are not shared")
    for path, module in _outside_of(model, set(collections_of(model))):
        for name, parameter in module._parameters.items():
            if id(parameter) in owners:
                raise InputError(
                    f"the weight of table {owners[id(parameter)]!r} is also parameter {name!r} of module {path!r}: "
                    "rows of a store are no parameters, so they cannot be tied to one"
                )


def _outside_of(model: nn.Module, left_out: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, with their paths, without some and what is inside these only."""
    seen: set[nn.Module] = set()
    todo = [("", model)]
    while todo:
        path, module = todo.pop()
        if module in seen or module in left_out:
            continue
        seen.add(module)
        yield path, module
        todo += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


def _check_averages(model: nn.Module) -> None:
    """Refuse a model of which an average was made, such as torch's `AveragedModel`.

    It holds a copy, and pairs the parameters of both by their position. Those of the tables leave the model, so it
    would average others.
    """
    own = collections_of(model)
    copies = [
        copy
        for kind in {type(collection) for collection in own}
        for copy in gc.get_referrers(kind)
        if type(copy) is kind and copy not in own and any(_is_copy(copy, collection) for collection in own)
    ]
    if not copies:
        return
    gc.collect()  # averages of earlier models, which nothing refers to any more
    seen, inner = set[int](), list[object](copies)
    while inner:
        outer = [owner for owner in _owners(inner) if id(owner) not in seen]
        seen.update(map(id, outer))
        for owner in outer:
            if any(callable(getattr(type(owner), name, None)) for name in ("update_parameters", "update")):
                name = type(owner).__name__
                raise InputError(
                    f"{name} has a copy of the model from before the pipeline, with parameters that the model has no "
                    f"more: make it of pipeline.model (del the {name} if it is of another model)"
                )
        inner = [owner for owner in outer if isinstance(owner, nn.Module)]


def _owners(values: Collection[object]) -> Iterator[object]:
    """The objects with one of the values among their attributes, and the modules with one among their children.

    Few passes over all objects of the interpreter, none of them in Python.
    """
    ids = {id(value) for value in values}
    inside: Collection[object] = values
    for _ in range(3):  # a child of a module is in a dict, which is in its __dict__, which is the module's
        if not inside:
            return
        found = gc.get_referrers(*inside)
        inside = [each for each in found if type(each) is dict]
        for each in found:
            held = getattr(each, "__dict__", None)
            if isinstance(held, dict) and any(
                id(value) in ids for value in (*held.values(), *held.get("_modules", {}).values())
            ):
                yield each


def _is_copy(one: Any, other: Any) -> bool:
    """Whether two collections have the same tables, on the meta device or with the same weights."""
    tables = [[(c.name, c.num_embeddings, c.embedding_dim) for c in configs_of(each)] for each in (one, other)]
    if tables[0] != tables[1]:
        return False
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(a.is_meta if b.is_meta else a.device == b.device and torch.equal(a, b) for a, b in pairs)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
