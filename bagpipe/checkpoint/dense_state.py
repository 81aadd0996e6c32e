"""`DenseState`: host copy of the dense part: parameters, buffers, optimizer state and random state, by name.

model, optimizer ──capture──> DenseCopy ──get──> DenseState ──save──> dense-<rank>.safetensors ──load──> restore

model.<name>              parameters and buffers, by the model's own names
optim.<name>.<state>      optimizer state of a parameter; non-tensors are JSON in the file's metadata
rng.<name>                states of random number generators
part.<part>.<name>        tensors of other parts of the training loop (weight averages)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bagpipe.cache.staging import PendingTensors, copy_to_host
from bagpipe.checkpoint.files import finish
from bagpipe.checkpoint.manifest import BrokenCheckpoint, FileEntry
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import Streams

__all__ = [
    "MODEL",
    "OPTIM",
    "PART",
    "RNG",
    "DenseCopy",
    "DenseState",
    "capture",
    "capture_parts",
    "check_model",
    "combine",
    "load",
    "random_state",
    "restore_random_state",
    "save_tensors",
    "type_name",
]

#: Beginnings of full names.
MODEL, OPTIM, RNG, PART = "model.", "optim.", "rng.", "part."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseState:
    """Host copies of the dense part.

    Attributes:
        tensors: by full name; see the module.
        values: optimizer state other than tensors (numbers, None), by full name.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """Hexadecimal XXH3-128 of everything except the random state. Replicas have equal digests."""
        hasher = xxhash.xxh3_128()
        for name in sorted(name for name in self.tensors if not name.startswith(RNG)):
            hasher.update(f"{name} {type_name(self.tensors[name])}\0".encode())
            hasher.update(_bytes(self.tensors[name]))
        hasher.update(json.dumps(dict(self.values), sort_keys=True).encode())
        return hasher.hexdigest()

    def rng(self) -> dict[str, Tensor]:
        """Random states by name, as returned by `random_state`."""
        return self.below(RNG)

    def of_part(self, part: str) -> dict[str, Tensor]:
        """Tensors of a part of the training loop, by name."""
        return self.below(f"{PART}{part}.")

    def below(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose full names begin with a prefix such as `MODEL`, by the rest of their names."""
        return {name.removeprefix(prefix): value for name, value in self.tensors.items() if name.startswith(prefix)}

    def save(self, folder: Path, rank: int) -> FileEntry:
        """Write ``dense-<rank>.safetensors`` durably. Raises OSError if the write fails."""
        path = folder / f"dense-{rank:04d}.safetensors"
        metadata = {name: json.dumps(value) for name, value in self.values.items()}
        save_tensors(self.tensors, path, metadata)
        return finish(path)

    def restore(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Restore a model and its optimizers in place. Everything is compared before anything changes.

        Args:
            model: has exactly the saved parameters and buffers.
            optimizers: each gets the state of its own parameters; its previous state is dropped.

        Raises:
            InputError: the model or an optimizer differs; one line naming the first difference.
        """
        targets = dict(_named_tensors(model))
        saved = self.below(MODEL)
        _compare({name: type_name(value) for name, value in saved.items()}, targets)
        states = self.optimizer_states()
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name in states:
            if name not in parameters:
                raise InputError(f"the checkpoint has optimizer state of {name!r}, which is not a model parameter")
        for optimizer in optimizers:
            _compare_states(states, parameters, optimizer)
        with torch.no_grad():
            for name, value in saved.items():
                targets[name].copy_(value)
        for optimizer in optimizers:
            _restore_optimizer(states, parameters, optimizer)

    def optimizer_states(self) -> dict[str, dict[str, Any]]:
        """State by parameter name and state name. Parameter names contain dots, state names do not."""
        states: dict[str, dict[str, Any]] = {}
        for full_name, value in (*self.tensors.items(), *self.values.items()):
            if full_name.startswith(OPTIM):
                name, _, state = full_name.removeprefix(OPTIM).rpartition(".")
                states.setdefault(name, {})[state] = value
        return states


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseCopy:
    """A dense state whose copy to the host is in flight.

    Attributes:
        tensors, values: see `DenseState`.
    """

    tensors: PendingTensors
    values: Mapping[str, Any]

    def get(self) -> DenseState:
        """The state in host memory. Blocks until the copy is complete."""
        return DenseState(tensors=self.tensors.get(), values=self.values)


def capture(
    streams: Streams,
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    only: Collection[str] | None = None,
    rng: Mapping[str, Tensor] | None = None,
    parts: Mapping[str, Tensor] | None = None,
) -> DenseCopy:
    """Start copying the dense state to the host, ordered by the current stream; see `copy_to_host`.

    Args:
        streams: streams of the model's device.
        model: its parameters and buffers are copied, including those outside its state_dict.
        optimizers: together hold the state of its parameters, each parameter in one of them.
        only: names of the parameters and buffers to copy, with their optimizer state. None: all.
        rng: random states to save, by name.
        parts: tensors of other parts of the training loop, by ``part.name``.

    Raises:
        InputError: a module overrides `get_extra_state`, whose result only a pickle can hold.
    """
    check_model(model)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, tensor in _named_tensors(model):
        if only is None or name in only:
            tensors[MODEL + name] = tensor
    for name, parameter in model.named_parameters():
        if only is not None and name not in only:
            continue
        for optimizer in optimizers:
            for state, value in optimizer.state.get(parameter, {}).items():
                full_name = f"{OPTIM}{name}.{state}"
                if isinstance(value, Tensor):
                    tensors[full_name] = value
                elif value is None or isinstance(value, bool | int | float | str):
                    values[full_name] = value
                else:
                    raise InputError(f"optimizer state {state!r} of {name!r} is a {type(value).__name__}, not a tensor")
    for name, value in (rng or {}).items():
        tensors[RNG + name] = value
    for name, value in (parts or {}).items():
        tensors[PART + name] = value
    return DenseCopy(tensors=copy_to_host(streams, tensors), values=values)


def capture_parts(streams: Streams, tensors: Mapping[str, Tensor]) -> DenseCopy:
    """Start copying tensors of parts of the training loop, by ``part.name``, to the host."""
    return DenseCopy(tensors=copy_to_host(streams, {PART + name: value for name, value in tensors.items()}), values={})


def check_model(model: nn.Module) -> None:
    """Raise InputError if a module overrides `get_extra_state`, whose result only a pickle can hold."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise InputError(f"module {name!r} has extra state, which checkpoints cannot hold: use a buffer")


def combine(states: Iterable[DenseState]) -> DenseState:
    """Union of several states. The first one wins: duplicates are equal except for buffers and random state."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for part in states:
        tensors = {**part.tensors, **tensors}
        values = {**part.values, **values}
    return DenseState(tensors=tensors, values=values)


def load(folder: Path, entry: FileEntry) -> DenseState:
    """Read a file written by `DenseState.save`. Raises `BrokenCheckpoint` for any other content."""
    path = folder / entry.name
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata() or {}
        values = {name: json.loads(text) for name, text in metadata.items() if name.startswith(OPTIM)}
    except (SafetensorError, OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path}: cannot be read: {error}") from None
    return DenseState(tensors=tensors, values=values)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. Raises OSError if the write fails."""
    try:
        save_file(dict(tensors), path, metadata=dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from None
    # The library ignores the umask and creates files with mode 0600. Folders follow the umask.
    path.chmod(path.parent.stat().st_mode & 0o666)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """States of torch's global generators: the host's, and the CUDA device's if there is one."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore states of `random_state`. The state of a device this job does not use is ignored."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers; a tied tensor under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def type_name(tensor: Tensor) -> str:
    """Dtype and shape, as in ``float32 [3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _compare(saved: Mapping[str, str], targets: Mapping[str, Tensor]) -> None:
    """Raise InputError for the first different name, shape or dtype, in the model's order."""
    for name, target in targets.items():
        if name not in saved:
            raise InputError(f"the checkpoint is of another model: it has no {name!r}")
        if saved[name] != type_name(target):
            raise InputError(
                f"the checkpoint is of another model: {name!r} is {saved[name]} there, {type_name(target)} in this job"
            )
    unknown = sorted(saved.keys() - targets.keys())
    if unknown:
        raise InputError(f"the checkpoint is of another model: it has {unknown[0]!r}, this job's model does not")


def _parameters_of(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any, Any]]:
    """(name, parameter, parameter group) of an optimizer's parameters."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if parameter in groups:
            yield name, parameter, groups[parameter]


def _compare_states(
    states: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Raise InputError unless the checkpoint has the state that a new optimizer has; the rest appears at step one."""
    for name, parameter, _ in _parameters_of(parameters, optimizer):
        saved = states.get(name, {})
        for state, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            found = saved.get(state)
            if not isinstance(found, Tensor) or type_name(found) != type_name(value):
                title = type_name(found) if isinstance(found, Tensor) else "missing"
                raise InputError(
                    f"the checkpoint is of another optimizer: state {state!r} of {name!r} is {title} there, "
                    f"{type_name(value)} in this job"
                )


def _restore_optimizer(
    states: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    for name, parameter, group in _parameters_of(parameters, optimizer):
        if name not in states:
            continue
        kept: dict[str, Any] = {}
        for state, value in states[name].items():
            if isinstance(value, Tensor):
                # torch keeps step counts on the host, unless a fused or captured kernel reads them.
                on_host = state == "step" and not (group.get("fused") or group.get("capturable"))
                kept[state] = value.clone() if on_host else value.to(parameter.device, copy=True)
            else:
                kept[state] = value
        optimizer.state[parameter] = kept
