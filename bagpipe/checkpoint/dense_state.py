"""`DenseState`: host copy of the dense part: parameters, buffers, optimizer state and random state, by name.

model, optimizer ──capture──> DenseCopy ──get──> DenseState ──save──> dense-<rank>.safetensors ──load──> restore

model.<name>              parameters and buffers, by the model's own names
optim.<name>.<state>      optimizer state of a parameter; non-tensors are JSON in the file's metadata
rng.<name>                states of random number generators
part.<part>.<name>        tensors of other parts of the training loop (weight averages)

Of a model that is divided among the ranks a rank writes *pieces*: flat runs of elements of these tensors. `combine`
joins them, so whoever reads a checkpoint sees whole tensors, whatever the division.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from bagpipe.checkpoint.optimizer_state import check_finite, compare_states, cut, restore_optimizer, state_of, type_name
from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import Streams
from bagpipe.util.documents import parse_json
from bagpipe.util.utf8_path import utf8_path

__all__ = [
    "MODEL",
    "OPTIM",
    "OPTIMIZER_REST",
    "PART",
    "RNG",
    "DenseCopy",
    "DenseState",
    "OwnState",
    "capture",
    "capture_parts",
    "check_model",
    "combine",
    "load",
    "load_of_rank",
    "random_state",
    "restore_random_state",
    "save_tensors",
    "type_name",
]

#: Beginnings of full names.
MODEL, OPTIM, RNG, PART = "model.", "optim.", "rng.", "part."
#: Name of a part's tensor: what an optimizer's ``state_dict`` has besides (`bagpipe.train_pipeline.optimizer_rest`).
OPTIMIZER_REST = "optimizer.rest"

#: Beginning of the keys of a file's metadata that describe pieces.
_PIECE = "piece "
#: Key of a file's metadata: the rank has a part of the model, if only whole tensors.
_DIVIDED = "divided"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnState:
    """One rank's part of a divided model.

    Attributes:
        tensors, values: whole, by full name; see `DenseState`.
        pieces: 1-D runs of elements, by full name.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    pieces: Mapping[str, tuple[Piece, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseState:
    """Host copies of the dense part.

    Attributes:
        tensors: by full name; see the module.
        values: optimizer state other than tensors (numbers, None), by full name.
        pieces: runs of elements of tensors that are not in `tensors`, by full name.
        is_divided: other ranks have other parts of the model. A part can consist of whole tensors.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    pieces: Mapping[str, tuple[Piece, Tensor]] = field(default_factory=dict)
    is_divided: bool = False

    def digest(self) -> str:
        """Hexadecimal XXH3-128 of everything except the random state. Replicas have equal digests."""
        hasher = xxhash.xxh3_128()
        for name in sorted(name for name in self.tensors if not name.startswith(RNG)):
            hasher.update(f"{name} {type_name(self.tensors[name])}\0".encode())
            hasher.update(_bytes(self.tensors[name]))
        for name, (piece, tensor) in sorted(self.pieces.items()):
            hasher.update(f"{name} {piece.first} {type_name(tensor)}\0".encode())
            hasher.update(_bytes(tensor))
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
        """Write ``dense-<rank>.safetensors``, or ``dense-<rank>-<n>…`` beside it. Raises OSError if the write fails."""
        number = len([*folder.glob(f"dense-{rank:04d}*")])
        path = folder / f"dense-{rank:04d}{f'-{number}' if number else ''}.safetensors"
        metadata = {name: json.dumps(value) for name, value in self.values.items()}
        metadata |= {_DIVIDED: "true"} if self.is_divided else {}
        metadata |= {f"{_PIECE}{name}": json.dumps([p.first, list(p.shape)]) for name, (p, _) in self.pieces.items()}
        save_tensors({**self.tensors, **{name: tensor for name, (_, tensor) in self.pieces.items()}}, path, metadata)
        return finish(path)

    def restore(
        self,
        model: nn.Module,
        *optimizers: torch.optim.Optimizer,
        own: Mapping[str, tuple[Piece, nn.Parameter]] | None = None,
    ) -> None:
        """Restore a model and its optimizers in place. Everything is compared before anything changes.

        Args:
            model: has exactly the saved parameters and buffers.
            optimizers: each gets the state of its own parameters; its previous state is dropped.
            own: what the optimizers have in place of parameters: flat runs of their elements, by name.

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
        for name, (piece, part) in (own or {}).items():
            parameters[name] = part
            if name in states:
                states[name] = {state: cut(state, value, piece, part) for state, value in states[name].items()}
        for optimizer in optimizers:
            compare_states(states, parameters, optimizer)
        with torch.no_grad():
            for name, value in saved.items():
                targets[name].copy_(value)
        for optimizer in optimizers:
            restore_optimizer(states, parameters, optimizer)

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
        tensors: whole ones and pieces, by full name.
        values: see `DenseState`.
        pieces: what the pieces among the tensors are.
        is_divided: see `DenseState`.
        trained: names of parameters that must be finite.
    """

    tensors: PendingTensors
    values: Mapping[str, Any]
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    is_divided: bool = False
    trained: Collection[str] = ()

    def get(self) -> DenseState:
        """The state in host memory. Blocks until the copy is complete. Raises JobError: a parameter is not finite."""
        tensors = self.tensors.get()
        check_finite((name, tensors[MODEL + name]) for name in self.trained if MODEL + name in tensors)
        return replace(_divided(self.tensors.get(), self.values, self.pieces), is_divided=self.is_divided)


def capture(
    streams: Streams,
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    only: Collection[str] | None = None,
    rng: Mapping[str, Tensor] | None = None,
    parts: Mapping[str, Tensor] | None = None,
    own: OwnState | None = None,
) -> DenseCopy:
    """Start copying the dense state to the host, ordered by the current stream; see `copy_to_host`.

    Args:
        streams: streams of the model's device.
        model: its parameters and buffers are copied, including those outside its state_dict.
        optimizers: together hold the state of its parameters, each parameter in one of them.
        only: names of the parameters and buffers to copy, with their optimizer state. None: all.
        rng: random states to save, by name.
        parts: tensors of other parts of the training loop, by ``part.name``.
        own: what this rank has of a divided model, besides.

    Raises:
        InputError: a module overrides `get_extra_state`, whose result only a pickle can hold; or an optimizer has state
            of another kind, which is not in `parts`.
    """
    check_model(model)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, tensor in _named_tensors(model):
        if only is None or name in only:
            tensors[MODEL + name] = tensor
    for name, value in state_of(optimizers, model, only, keeps_rest=OPTIMIZER_REST in (parts or {})):
        (tensors if isinstance(value, Tensor) else values)[OPTIM + name] = value
    for name, value in (rng or {}).items():
        tensors[RNG + name] = value
    for name, value in (parts or {}).items():
        tensors[PART + name] = value
    own = OwnState() if own is None else own
    tensors |= own.tensors
    tensors |= {name: tensor for name, (_, tensor) in own.pieces.items()}
    return DenseCopy(
        tensors=copy_to_host(streams, tensors),
        values={**values, **own.values},
        pieces={name: piece for name, (piece, _) in own.pieces.items()},
        trained=tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad),
    )


def capture_parts(streams: Streams, tensors: Mapping[str, Tensor]) -> DenseCopy:
    """Start copying tensors of parts of the training loop, by ``part.name``, to the host."""
    return DenseCopy(tensors=copy_to_host(streams, {PART + name: value for name, value in tensors.items()}), values={})


def check_model(model: nn.Module) -> None:
    """Raise InputError if a module overrides `get_extra_state`, whose result only a pickle can hold."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise InputError(f"module {name!r} has extra state, which checkpoints cannot hold: use a buffer")


def combine(states: Iterable[DenseState]) -> DenseState:
    """Union of states, with pieces joined. The first wins: duplicates are equal but for buffers and random state.

    Raises:
        BrokenCheckpoint: some of a tensor's pieces are missing.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    pieces: dict[str, list[tuple[Piece, Tensor]]] = {}
    is_divided = False
    for part in states:  # one at a time in memory
        is_divided = is_divided or part.is_divided or bool(part.pieces)
        tensors = {**part.tensors, **tensors}
        values = {**part.values, **values}
        for name, piece in part.pieces.items():
            pieces.setdefault(name, []).append(piece)
    alone: dict[str, tuple[Piece, Tensor]] = {}
    for name, found in pieces.items():
        joined = _joined(found)
        if joined is not None:
            tensors[name] = joined
        elif len(found) == 1:
            alone[name] = found[0]
        else:
            raise BrokenCheckpoint(f"the checkpoint lacks elements of {name!r}")
    return DenseState(tensors=tensors, values=values, pieces=alone, is_divided=is_divided)


def _joined(pieces: Iterable[tuple[Piece, Tensor]]) -> Tensor | None:
    """A whole tensor of its pieces; None: elements are missing."""
    end, parts = 0, []
    shape: tuple[int, ...] = ()
    for piece, tensor in sorted(pieces, key=lambda item: item[0].first):
        if piece.first != end:
            return None
        end, shape = end + tensor.numel(), piece.shape
        parts.append(tensor)
    return torch.cat(parts).view(shape) if end == math.prod(shape) else None


def _divided(tensors: Mapping[str, Tensor], values: Mapping[str, Any], pieces: Mapping[str, Piece]) -> DenseState:
    return DenseState(
        tensors={name: tensor for name, tensor in tensors.items() if name not in pieces},
        values=values,
        pieces={name: (piece, tensors[name]) for name, piece in pieces.items()},
    )


def load(folder: Path, entry: FileEntry) -> DenseState:
    """Read a file written by `DenseState.save`. Raises `BrokenCheckpoint` for any other content."""
    path = folder / entry.name
    try:
        with utf8_path(path) as readable, safe_open(readable, framework="pt") as file:
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata() or {}
        values = {name: parse_json(text) for name, text in metadata.items() if name.startswith(OPTIM)}
        pieces = {
            name.removeprefix(_PIECE): Piece(first=first, shape=tuple(shape))
            for name, text in metadata.items()
            if name.startswith(_PIECE)
            for first, shape in [parse_json(text)]
        }
        return replace(_divided(tensors, values, pieces), is_divided=_DIVIDED in metadata or bool(pieces))
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise BrokenCheckpoint(f"{path}: cannot be read: {error}") from None


def load_of_rank(folder: Path, entries: Sequence[FileEntry], rank: int, *, is_staged: bool) -> DenseState:
    """What a rank needs of a checkpoint's dense part: its own file first, and the others where they have the rest.

    Args:
        folder: of the checkpoint.
        entries: the files of all ranks, at least one.
        rank: whose file comes first; rank 0's if it has none.
        is_staged: the files are of stages.

    Raises:
        BrokenCheckpoint: a file cannot be read, or some of a tensor's pieces are missing.
    """
    others = list(entries)
    own = load(folder, others.pop(rank if rank < len(others) else 0))
    # Replicas have the whole model each. A rank that divided it has its part, or, of a small model, nothing.
    if not is_staged and not own.is_divided and own.below(MODEL):
        return own
    return combine([own, *(load(folder, entry) for entry in others)])


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, in place of what is there. Raises OSError if the write fails."""
    path.unlink(missing_ok=True)  # a link: safetensors 0.5 writes through it
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
