"""Units of a sharded model: layers whose parameters are gathered, summed and divided together.

    model ──modules that have trainable parameters of their own──> units, in the order of the model's modules
          ──modules that a wrap rule names────────────────────────> one unit each, with all parameters below

A list of parameters (`nn.ParameterList`) is no layer: its parameters belong to the module that uses them. Compiled code
is one layer: nothing can be gathered inside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from bagpipe.errors import InputError

__all__ = ["ParameterUnit", "find_units"]

#: Modules that only hold others, or parameters. They are not called.
_CONTAINERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParameterUnit:
    """Parameters that are handled together.

    Attributes:
        name: of the module in the model; empty: the model itself.
        module: its forward uses them.
        parameters: trainable, each once, with their names in the model; at least one; one dtype and device.
    """

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def find_units(
    model: nn.Module, wrap: Sequence[str] = (), compiled: nn.Module | None = None
) -> tuple[ParameterUnit, ...]:
    """Cut a model into units.

    Args:
        model: what is trained. Parameters without `requires_grad` are in no unit.
        wrap: patterns of module names, as of `fnmatch`: the outermost module that fits is one unit.
        compiled: computes with parameters of the model in code of its own: these are one unit, the last one. None:
            nothing does.

    Raises:
        InputError: a pattern fits no module with trainable parameters, a parameter is used in two units, a unit has
            several dtypes, or the forward changes a buffer.
    """
    _check_buffers(model)
    owners = _owners(model, wrap)
    modules = dict(model.named_modules(remove_duplicate=False))
    units: dict[str, dict[nn.Parameter, str]] = {}
    first_names: dict[nn.Parameter, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        unit = owners[name.rpartition(".")[0]]
        other, first_name = first_names.setdefault(parameter, (unit, name))
        if modules[other] is not modules[unit]:
            raise InputError(
                f"dense.shard: model parameters {first_name} and {name} are one tensor in two layers, expected one: "
                f"name in dense.wrap a module that has both"
            )
        units.setdefault(other, {}).setdefault(parameter, first_name)
    found = tuple(
        ParameterUnit(
            name=unit, module=modules[unit], parameters=tuple((name, parameter) for parameter, name in members.items())
        )
        for unit, members in units.items()
    )
    if compiled is not None:
        found = _with_compiled(found, compiled)
    for unit_found in found:
        _check_dtypes(unit_found)
    return found


def _with_compiled(units: Sequence[ParameterUnit], compiled: nn.Module) -> tuple[ParameterUnit, ...]:
    own = {*compiled.parameters()}
    named = [(name, parameter) for unit in units for name, parameter in unit.parameters]
    taken = tuple((name, parameter) for name, parameter in named if parameter in own)
    left = [(unit, tuple(item for item in unit.parameters if item[1] not in own)) for unit in units]
    rest = [ParameterUnit(name=unit.name, module=unit.module, parameters=found) for unit, found in left if found]
    if not taken:
        return tuple(rest)
    return (*rest, ParameterUnit(name="(compiled)", module=compiled, parameters=taken))


def _owners(model: nn.Module, wrap: Sequence[str]) -> Mapping[str, str]:
    """Name of each module -> name of the module whose unit has its parameters."""
    owners: dict[str, str] = {}
    fitting: dict[str, bool] = dict.fromkeys(wrap, False)
    wrapped: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        outer = next((above for above in wrapped if not above or name.startswith(f"{above}.")), None)
        patterns = [pattern for pattern in wrap if fnmatchcase(name, pattern)]
        if patterns and any(parameter.requires_grad for parameter in module.parameters()):
            fitting.update(dict.fromkeys(patterns, True))
            if outer is None:
                wrapped.append(name)
                outer = name
        if outer is not None:
            owners[name] = outer
        elif isinstance(module, _CONTAINERS) and name:
            owners[name] = owners[name.rpartition(".")[0]]
        else:
            owners[name] = name
    for pattern, fits in fitting.items():
        if not fits:
            names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
            raise InputError(f"dense.wrap: {pattern!r} fits no module with parameters; there are {', '.join(names)}")
    return owners


def _check_buffers(model: nn.Module) -> None:
    """Refuse running means: every rank has its own, and a sharded model has one value of each tensor."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise InputError(
                f"dense.shard: module {name} ({type(module).__name__}) changes buffers in its forward, which come to "
                f"differ between the ranks: expected a model whose buffers stay the same"
            )


def _check_dtypes(unit: ParameterUnit) -> None:
    first_name, first = unit.parameters[0]
    for name, parameter in unit.parameters:
        if parameter.dtype != first.dtype:
            raise InputError(
                f"dense.shard: model parameters {first_name} and {name} of one layer are {first.dtype} and "
                f"{parameter.dtype}, expected one dtype"
            )
