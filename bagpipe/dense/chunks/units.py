"""`Unit`: parameters that are used together, because one module's forward uses them; and the moments of their use.

module with parameters of its own     a unit; its forward and its backward need its chunks
ParameterList, plain nn.Module, …     no forward of their own: the module around them is the unit
MultiheadAttention                    reads parameters of the modules in it: one unit with them
a compiled stage                      its code takes all parameters in it: one unit
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from bagpipe.dense.chunks.layout import ChunkLayout
from bagpipe.dense.chunks.moments import Moment, Use
from bagpipe.errors import InputError

__all__ = [
    "Unit",
    "average_moment",
    "gradient_moment",
    "is_compiled",
    "module_moment",
    "most_chunks",
    "norm_moment",
    "step_moment",
    "tensors_in",
    "units_of",
    "version_moment",
]

_WITHOUT_FORWARD = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)
_WHOLE = (nn.MultiheadAttention,)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """See above.

    Attributes:
        name: of the module.
        module: whose forward uses the parameters.
        parameters: of the module.
        chunks: of them, ascending.
    """

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    chunks: tuple[int, ...]


def units_of(model: nn.Module, chunk_of: Mapping[nn.Parameter, int]) -> tuple[Unit, ...]:
    """The units of a model.

    Args:
        model: the model.
        chunk_of: chunk of each of its parameters; the others are left out.

    Raises:
        InputError: a parameter is in two units.
    """
    modules = dict(model.named_modules())
    found: dict[str, list[nn.Parameter]] = {}
    owners: dict[nn.Parameter, tuple[str, str]] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter not in chunk_of:
                continue
            owner, full_name = _owner(name, modules), f"{name}.{key}" if name else key
            other = owners.setdefault(parameter, (owner, full_name))
            if other[1] == full_name:
                found.setdefault(owner, []).append(parameter)
            elif other[0] != owner:
                raise InputError(
                    f"dense.budget_bytes is not possible for {other[1]}, which is {full_name} too: weights that two "
                    "modules share have no one place"
                )
    return tuple(
        Unit(name, modules[name], tuple(own), tuple(sorted({chunk_of[parameter] for parameter in own})))
        for name, own in found.items()
    )


def is_compiled(module: nn.Module) -> bool:
    """A module calls compiled code; as `bagpipe.dense.stage_module` says."""
    return getattr(module, "is_compiled", False) is True


def _owner(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Name of the module whose forward uses the parameters of a module."""
    path = name.split(".")
    for end in range(len(path)):
        around = modules[".".join(path[:end])]
        if isinstance(around, _WHOLE) or is_compiled(around):
            return ".".join(path[:end])
    # A plain `nn.Module` is a container, as in the graph modules of stages.
    while name and (isinstance(modules[name], _WITHOUT_FORWARD) or type(modules[name]) is nn.Module):
        name = name.rpartition(".")[0]
    return name


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors in a module's output: alone, in mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def module_moment(kind: str, units: Iterable[Unit], placed: Callable[[int], int] = int) -> Moment:
    """A forward, or the backward of what it computed, inside the forwards of some units, the innermost last.

    Args:
        kind: of the moment.
        units: whose parameters it uses.
        placed: chunk of parameters -> the chunk with the weights that are used in their place.
    """
    opened = tuple(units)
    chunks = sorted({placed(chunk) for unit in opened for chunk in unit.chunks})
    return Moment(f"{kind} {opened[-1].name or 'the model'}", tuple(Use(chunk) for chunk in chunks))


def gradient_moment(layout: ChunkLayout, chunk: int, *, is_first: bool) -> Moment:
    """A gradient comes to its chunk, the first of the batch or one more."""
    return Moment(f"gradient {chunk}", (Use(layout.gradient(chunk), reads=not is_first, writes=True),))


def norm_moment(layout: ChunkLayout, chunk: int) -> Moment:
    """The gradients of a chunk of parameters are measured, and limited by element, before the first step.

    The parameters are there too: torch keeps a gradient only beside a parameter of the same device.
    """
    return Moment(f"norm {chunk}", (Use(chunk), Use(layout.gradient(chunk), writes=True)))


def average_moment(layout: ChunkLayout, chunk: int, name: str) -> Moment:
    """An average of a chunk of parameters follows them."""
    return Moment(f"average {chunk}", (Use(chunk), Use(layout.state(chunk, name), writes=True)))


def version_moment(layout: ChunkLayout, chunk: int, name: str, reads: Sequence[str]) -> Moment:
    """Weights of a chunk are written: the parameters, or what is predicted from these and from state."""
    state = [Use(layout.state(chunk, each)) for each in reads]
    target = Use(layout.state(chunk, name), reads=False, writes=True)
    return Moment(f"{name} {chunk}", (Use(chunk), *state, target))


def step_moment(layout: ChunkLayout, chunk: int, keeps: Sequence[str] = ()) -> Moment:
    """The optimizer's step on a chunk of parameters.

    Args:
        layout: of all chunks.
        chunk: of the parameters.
        keeps: names of what else the step writes.
    """
    state = [Use(layout.state(chunk, name), writes=True) for name in (*layout.states, *keeps)]
    return Moment(f"step {chunk}", (Use(chunk, writes=True), Use(layout.gradient(chunk)), *state))


def most_chunks(
    layout: ChunkLayout, units: Iterable[Unit], num_kept: int = 0, *, steps: bool = False
) -> tuple[int, str]:
    """Chunks that are needed at once, by a unit inside the units around it or by a step; and whose need it is.

    Args:
        layout: of all chunks.
        units: which of them.
        num_kept: kinds of chunks that a step writes beside the optimizer's state.
        steps: there are steps, without units too.
    """
    by_name = {unit.name: unit for unit in units}
    num_of_step = 2 + len(layout.states) + num_kept
    needs: list[tuple[int, str]] = [(num_of_step, "a step of the optimizer")] if by_name or steps else []
    for name in by_name:
        path = name.split(".") if name else []
        around = [by_name[outer] for end in range(len(path) + 1) if (outer := ".".join(path[:end])) in by_name]
        needs.append((len({chunk for unit in around for chunk in unit.chunks}), name or "the model"))
    return max(needs, key=lambda need: need[0], default=(0, ""))
