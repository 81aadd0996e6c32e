"""`trace`: the FX graph of a model's forward, with embedding collections and torch modules as single nodes.

    model(dense, sparse) ──Tracer──> Traced: graph module, a path for every node, collections ──> shapes, operators

A node's path is the module's path for a module, and the caller's path plus the node's name for a function. Tracing
patches torch's module call, so no other thread may call a module meanwhile.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from bagpipe.errors import InputError, JobError

__all__ = [
    "Traced",
    "batch_dependent_modules",
    "device_of",
    "function_name",
    "is_collection",
    "is_in_place",
    "quiet",
    "trace",
]

#: Classes of modules whose output for an example depends on other examples.
_BATCH_DEPENDENT = (nn.modules.batchnorm._NormBase,)

#: Functions of module `operator` that overwrite their first argument.
_IN_PLACE_OPERATORS = frozenset(
    {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul", "setitem"}
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """A traced model.

    Attributes:
        model: as given.
        module: the graph, with modules, parameters and buffers shared with the model.
        paths: node -> its unique path, without placeholders and output.
        dead_paths: paths of nodes that no output depends on.
    """

    model: nn.Module
    module: fx.GraphModule
    paths: Mapping[fx.Node, str]
    dead_paths: tuple[str, ...]

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def called(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls, if any."""
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def is_collection(self, node: fx.Node) -> bool:
        module = self.called(node)
        return module is not None and is_collection(module)

    def parameters_of(self, node: fx.Node) -> dict[str, nn.Parameter]:
        """Name in the model -> parameter, of what the node itself names, without embedding rows."""
        if node.op == "get_attr":
            value = _attribute(self.module, str(node.target))
            return {str(node.target): value} if isinstance(value, nn.Parameter) else {}
        module = self.called(node)
        if module is None or is_collection(module):
            return {}
        return {f"{node.target}.{name}": parameter for name, parameter in module.named_parameters()}


def trace(model: nn.Module, whole: Collection[str] = ()) -> Traced:
    """Trace the forward of a model in training mode.

    Args:
        model: called as ``model(dense, sparse)``. Neither the model nor its mode changes.
        whole: paths of modules that become single nodes.

    Raises:
        InputError: the forward cannot be traced: it depends on values, iterates over an input, or changes a tensor in
            place without using the result.
    """
    modes = {module: module.training for module in model.modules()}
    known = set(vars(model))
    buffers = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in model.named_buffers()}
    random = torch.get_rng_state()
    try:
        model.train()
        with quiet(), _traceable_len(model):
            graph = _Tracer(whole).trace(model)
        _check_inputs(graph, model)
        changed = next((name for name, (buffer, version, _) in buffers.items() if buffer._version != version), None)
        if changed is not None:
            raise InputError(_refusal(model, JobError(f"it changes buffer {changed}")))
        if not torch.equal(torch.get_rng_state(), random):
            raise InputError(_refusal(model, JobError("it draws random numbers that depend on no input")))
        module = fx.GraphModule(model, graph, class_name=type(model).__name__)
    except InputError:
        raise
    except Exception as error:
        raise InputError(_refusal(model, error)) from error
    finally:
        for part, mode in modes.items():
            part.training = mode
        for buffer, version, before in buffers.values():
            if buffer._version != version:
                buffer.copy_(before)
        torch.set_rng_state(random)
        for name in set(vars(model)) - known:
            delattr(model, name)  # constants made in forward, which the tracer stores on the model
    dead = _remove_dead(graph, module)
    module.recompile()
    return Traced(model=model, module=module, paths=_paths(graph), dead_paths=dead)


def is_collection(module: nn.Module) -> bool:
    """Whether a module is an embedding collection, cached or torchrec's, pooled or not."""
    return hasattr(module, "embedding_bag_configs") or hasattr(module, "embedding_configs")


def function_name(node: fx.Node) -> str:
    """Name of the function or method that a node calls, or an empty string."""
    if node.op == "call_method":
        return str(node.target)
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def is_in_place(node: fx.Node, called: nn.Module | None) -> bool:
    """Whether a node overwrites its first argument; `called` is the module that it calls, if any."""
    name = function_name(node)
    return (
        bool(getattr(called, "inplace", False))
        or bool(node.kwargs.get("inplace", False))
        or (name.endswith("_") and not name.endswith("__"))
        or (getattr(node.target, "__module__", "") == "_operator" and name in _IN_PLACE_OPERATORS)
    )


def batch_dependent_modules(model: nn.Module) -> tuple[str, ...]:
    """Paths of modules that mix examples in training: batch norms, which micro-batches would change."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, _BATCH_DEPENDENT) and (module.track_running_stats or not _is_instance_norm(module))
    )


def _is_instance_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.instancenorm._InstanceNorm)


class _Tracer(fx.Tracer):
    def __init__(self, whole: Collection[str]) -> None:
        super().__init__()
        self.whole = whole

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            is_collection(m) or module_qualified_name in self.whole or super().is_leaf_module(m, module_qualified_name)
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch.fx warnings about torchrec names and module attributes, which users cannot change."""
    logger = logging.getLogger("torch.fx._symbolic_trace")
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def _traceable_len(model: nn.Module) -> Iterator[None]:
    """Trace `len` of a value in every forward of the model; Python itself would need an int."""

    def recorded_len(value: Any) -> Any:
        if isinstance(value, fx.Proxy):
            return value.tracer.create_proxy("call_method", "size", (value, 0), {})
        return len(value)

    forwards = {id(scope): scope for module in model.modules() if (scope := _globals_of(module)) is not None}
    scopes = [scope for scope in forwards.values() if "len" not in scope]
    for scope in scopes:
        scope["len"] = recorded_len
    try:
        yield
    finally:
        for scope in scopes:
            del scope["len"]


def _globals_of(module: nn.Module) -> dict[str, Any] | None:
    """Globals of a module's forward; None for torch modules, which are not traced into."""
    function = inspect.unwrap(type(module).forward)
    scope = getattr(function, "__globals__", None)
    return None if scope is None or type(module).__module__.startswith("torch.nn") else scope


def _check_inputs(graph: fx.Graph, model: nn.Module) -> None:
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    if len(names) != 2:
        raise InputError(
            f"model {type(model).__name__} must be called as model(dense, sparse), its forward takes {names}"
        )


def _refusal(model: nn.Module, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"model {type(model).__name__} cannot be cut into stages: its forward cannot be traced ({reason}); "
        "give stages by name, among them the modules that do so: those are then taken whole"
    )


def _remove_dead(graph: fx.Graph, module: fx.GraphModule) -> tuple[str, ...]:
    """Remove nodes that no output depends on; returns their paths."""
    paths = _paths(graph)
    alive: set[fx.Node] = set()
    todo = [node for node in graph.nodes if node.op == "output"]
    while todo:
        node = todo.pop()
        if node not in alive:
            alive.add(node)
            todo.extend(node.all_input_nodes)
    dead = [node for node in graph.nodes if node not in alive and node.op != "placeholder"]
    for node in reversed(dead):
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if is_in_place(node, called):
            raise InputError(
                f"{paths[node]}: changes a tensor in place and its result is not used; "
                "go on with what it returns, or with a new tensor"
            )
        graph.erase_node(node)
    return tuple(paths[node] for node in dead)


def _paths(graph: fx.Graph) -> dict[fx.Node, str]:
    paths: dict[fx.Node, str] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        stack = list(node.meta.get("nn_module_stack", {}).values())
        caller = stack[-1][0] if stack else ""
        path = (
            str(node.target) if node.op in ("call_module", "get_attr") else ".".join(filter(None, (caller, node.name)))
        )
        if path in taken:  # a module called again
            path = f"{path}.{node.name}"
        taken.add(path)
        paths[node] = path
    return paths


def _attribute(module: nn.Module, target: str) -> Any:
    parent, _, name = target.rpartition(".")
    return getattr(module.get_submodule(parent), name)


def device_of(module: nn.Module) -> torch.device:
    """The device of a model: that of its first real parameter."""
    return next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
