"""`OptimizerRest`: what the ``state_dict`` of a user's optimizer has besides the plain state of the model's parameters.

    state_dict() ──tensors of named state become references──> bytes ──part.optimizer.rest──> checkpoint
    checkpoint ──named state, groups──> the optimizers that step ──rest──> load_state_dict(the whole)

Optimizers that wrap others, count steps of their own or have hooks at their ``state_dict`` go on as they were. An
optimizer of torch without any of that has no rest.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.checkpoint.dense_state import OPTIMIZER_REST
from bagpipe.checkpoint.optimizer_state import has_plain_name, optimizers_in, stepping
from bagpipe.dense.precondition.optimizer import KfacOptimizer
from bagpipe.errors import InputError
from bagpipe.train_pipeline.plain_state import from_bytes, to_bytes
from bagpipe.training.part import LoopPart

__all__ = ["OptimizerRest", "check_optimizer", "groups_of", "load_optimizer", "load_optimizer_state", "optimizer_state"]

_PART, _, _REST = OPTIMIZER_REST.partition(".")

#: First member of a tuple in place of a tensor; parameter and state follow.
_NAMED = "bagpipe named state"

#: Hooks at the state of an optimizer.
_HOOKS = tuple(
    f"_optimizer_{call}_{when}_hooks" for call in ("state_dict", "load_state_dict") for when in ("pre", "post")
)


class OptimizerRest(LoopPart):
    """See above.

    Args:
        model: whose dense parameters are trained.
        optimizer: of them.

    Attributes:
        is_loaded: a rest was loaded.
    """

    name = _PART

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        # The factors of K-FAC have a part of their own.
        self._optimizer = optimizer.optimizer if isinstance(optimizer, KfacOptimizer) else optimizer
        self._model = model
        self.is_loaded = False

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        states = self._states()
        if self._is_plain(states):
            return {}
        return {_REST: torch.frombuffer(bytearray(self._encoded(states)), dtype=torch.uint8)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if _REST not in tensors:
            return
        try:
            tree = from_bytes(tensors[_REST].numpy().tobytes())
            state = _replaced(tree, self._of_reference(self._states()))
        except (ValueError, KeyError) as error:
            raise InputError(f"the optimizer's state in the checkpoint cannot be read: {error!r}") from None
        load_optimizer(self._optimizer, state)
        self.is_loaded = True

    def check(self) -> None:
        """Raise InputError unless a checkpoint can hold the state that the optimizer has now."""
        states = self._states()
        try:
            to_bytes([{key: value for key, value in group.items() if key != "params"} for group in self._groups()])
            if not self._is_plain(states):
                self._encoded(states)
        except Exception as error:  # any: of the user's code
            raise InputError(
                f"the state of {type(self._optimizer).__name__} cannot be kept in checkpoints: "
                f"{' '.join(str(error).split())}"
            ) from None

    def check_older(self) -> None:
        """Raise InputError if the optimizer has a rest: the checkpoint of a trained batch has none."""
        params = getattr(self._optimizer, "params", None)
        known = {id(parameter) for group in self._groups() for parameter in group["params"]}
        own = [key for key, value in params.items() if id(value) not in known] if isinstance(params, Mapping) else []
        more = set(self._optimizer.state_dict()) - {"state", "param_groups"}
        missing = [*own, *sorted(map(str, more))]
        if missing:
            raise InputError(
                f"expected the state {missing[0]!r} of {type(self._optimizer).__name__}, which the checkpoint of an "
                "older version has not: resume it with that version, or with an optimizer without"
            )

    def _groups(self) -> Sequence[dict[str, Any]]:
        return groups_of(self._optimizer)

    def _states(self) -> list[tuple[str | None, Any]]:
        """Name of the parameter, and state, of all that the optimizers which step have state of."""
        names: dict[Any, str] = {parameter: name for name, parameter in reversed([*self._model.named_parameters()])}
        return [(names.get(key), values) for each in stepping(self._optimizer) for key, values in each.state.items()]

    def _is_plain(self, states: Iterable[tuple[str | None, Any]]) -> bool:
        """The state by name, and the settings of groups, are all that there is."""
        kind, own = type(self._optimizer), vars(self._optimizer)
        return (
            kind.state_dict is Optimizer.state_dict
            and kind.load_state_dict is Optimizer.load_state_dict
            and not {"state_dict", "load_state_dict"} & own.keys()
            and not any(own.get(hooks) for hooks in _HOOKS)
            and stepping(self._optimizer) == [self._optimizer]
            and all(
                name is not None and all(has_plain_name(state, value) for state, value in values.items())
                for name, values in states
            )
        )

    def _encoded(self, states: Iterable[tuple[str | None, Any]]) -> bytes:
        references = {
            id(value): (_NAMED, name, state)
            for name, values in states
            if name is not None
            for state, value in values.items()
            if isinstance(value, Tensor) and has_plain_name(state, value)
        }
        return to_bytes(_replaced(self._optimizer.state_dict(), lambda value: references.get(id(value))))

    @staticmethod
    def _of_reference(states: Iterable[tuple[str | None, Any]]) -> Callable[[Any], Any]:
        by_name = {name: values for name, values in states if name is not None}

        def tensor(value: Any) -> Any:
            if isinstance(value, tuple) and len(value) == 3 and value[0] == _NAMED:
                return by_name[value[1]][value[2]]
            return None

        return tensor


def _replaced(tree: Any, found: Callable[[Any], Any]) -> Any:
    """A tree of containers with other leaves or tuples where `found` gives some."""
    other = found(tree)
    if other is not None:
        return other
    if isinstance(tree, Mapping):
        return {key: _replaced(value, found) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replaced(value, found) for value in tree) if type(tree) in (list, tuple) else tree
    return tree


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups of those optimizers inside an optimizer that step."""
    return [group for each in stepping(optimizer) for group in each.param_groups]


def optimizer_state(optimizer: Optimizer, parts: Iterable[LoopPart], step: int) -> dict[str, Any]:
    """Copy of an optimizer's ``state_dict``, and of tensors that parts of the loop keep beside it before a step."""
    tensors = {
        f"{part.name}.{name}": tensor.detach().clone()
        for part in parts
        for name, tensor in part.tensors("model", step).items()
    }
    return {"optimizer": copy.deepcopy(optimizer.state_dict()), "parts": tensors}


def load_optimizer_state(optimizer: Optimizer, parts: Iterable[LoopPart], step: int, state: Mapping[str, Any]) -> None:
    """Take back `optimizer_state`.

    Raises:
        InputError: it lacks the tensors of a part.
    """
    load_optimizer(optimizer, state["optimizer"])
    for part in parts:
        prefix, saved = f"{part.name}.", state.get("parts", {})
        own = {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}
        missing = sorted(part.tensors("model", step).keys() - own.keys())
        if missing and not own:
            raise InputError(f"expected a state with {prefix}{missing[0]}, got one without; save() keeps it too")
        part.load_tensors(own)


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a ``state_dict``, into an optimizer that has not stepped too.

    torchrec's optimizers take a state only in place of one of the same layout, which a step of theirs would make.
    Groups of embedding weights alone are empty, and left out in states of older versions.
    """
    named = (getattr(each, "params", None) for each in optimizers_in(optimizer))
    params: Mapping[Any, Tensor] = next((found for found in named if isinstance(found, Mapping)), {})
    values = state.get("state")
    if params and isinstance(values, Mapping):
        for key, entries in values.items():
            holder = _holder(optimizer, params[key]) if key in params else None
            if holder is not None:
                holder.state[params[key]] = copy.deepcopy(entries)
    groups = state.get("param_groups")
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if empty and isinstance(groups, list) and len(groups) + len(empty) == len(optimizer.param_groups):
        groups = list(groups)
        for number in empty:
            groups.insert(number, {**optimizer.param_groups[number], "params": []})
        state = {**state, "param_groups": groups}
    optimizer.load_state_dict(dict(state))


def _holder(optimizer: Optimizer, parameter: Tensor) -> Optimizer | None:
    """The innermost optimizer that has a parameter, in a group or by its own name."""
    for each in reversed(optimizers_in(optimizer)):
        own = [*getattr(each, "params", {}).values()] + [p for group in each.param_groups for p in group["params"]]
        if any(parameter is known for known in own):
            return each
    return None


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise InputError for an optimizer that a pipeline cannot step, or whose state cannot be told."""
    name = type(optimizer).__name__
    for each in optimizers_in(optimizer):
        if not hasattr(each, "param_groups") or not hasattr(each, "state"):
            raise InputError(
                f"expected an optimizer that steps, got {type(each).__module__}.{type(each).__name__}, which only "
                "names the rule of fused tables: use that of torch.optim"
            )
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    needed = [
        argument.name
        for argument in arguments
        if argument.default is argument.empty and argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    ]
    if needed:
        raise InputError(
            f"expected an optimizer with step(), got {name}, whose step needs {needed[0]}: use another one"
        )
    seen: set[int] = set()
    for each in stepping(optimizer):
        if each.state is not each.state:
            raise InputError(
                f"expected an optimizer with one `state`, got {type(each).__name__}, which makes it anew at each "
                "read: give the optimizers that step, or one whose attributes have them"
            )
        for group in each.param_groups:
            twice = [parameter for parameter in group["params"] if id(parameter) in seen]
            if twice:
                raise InputError(
                    f"expected each parameter in one optimizer of {name}, got one of shape {list(twice[0].shape)} in "
                    "two"
                )
            seen.update(id(parameter) for parameter in group["params"])
