"""`Budget` of the device, the chunks of what a lane computes (`ChunkPlan`), and the division of a budget among lanes.

    modules, parameters, optimizer ──> Piece, … ──plan_chunks──> ChunkPlan of a lane: layout, units, least bytes
    Budget, ChunkPlan of each lane of a process ──divide_budget──> bytes of each lane

A piece is what one optimizer steps: the whole model, or a stage. No chunk is in two pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from bagpipe.dense.chunks.layout import ChunkLayout, Place, pack
from bagpipe.dense.chunks.state import state_names
from bagpipe.dense.chunks.units import Unit, most_chunks, units_of
from bagpipe.errors import InputError

__all__ = ["AVERAGE", "LAST_GRADIENT", "Budget", "ChunkPlan", "Piece", "divide_budget", "plan_chunks"]


#: Names of the averages of parameters and of their last gradients, beside the state of optimizers.
AVERAGE, LAST_GRADIENT = "average", "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much of the dense part the device holds.

    Attributes:
        num_bytes: of chunks on the device at most; 0: no limit.
        chunk_bytes: size of a chunk; 0: the bytes of the largest parameter.
        state_on_host: the device has room for parameters, gradients and two steps' state: state streams through.
        averages: chunks hold averages of the parameters too (`ChunkedModel.keep_averages`).
    """

    num_bytes: int = 0
    chunk_bytes: int = 0
    state_on_host: bool = False
    averages: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """What one optimizer steps.

    Attributes:
        module: whose modules' forwards use the parameters.
        parameters: of the module, trainable and frozen, by their names in the whole model.
        optimizer: of the trainable ones; None: there are none, or others are stepped in their place.
        collects: the gradients of the trainable ones go to chunks; otherwise somebody else takes them.
        versions: names of the other weights that its forwards and backwards use in place of trainable parameters, and
            of what these are predicted from.
    """

    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer | None
    collects: bool = True
    versions: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> Piece:
        """A whole model."""
        return cls(module=model, parameters=dict(model.named_parameters()), optimizer=optimizer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkPlan:
    """The chunks of what one lane computes.

    Attributes:
        pieces: what it computes.
        layout: of all parameters, piece by piece.
        places: of each parameter.
        chunks: by piece, its chunks of parameters.
        units: whose forwards are called in training.
        outer: whose forwards are called only where the whole model is, in evaluations.
        least: chunks that are needed at once at most, and whose need it is.
        num_used: chunks that are used at all: only what is stepped has gradients and state.
    """

    pieces: tuple[Piece, ...]
    layout: ChunkLayout
    places: Mapping[nn.Parameter, Place]
    chunks: tuple[range, ...]
    units: tuple[Unit, ...]
    outer: tuple[Unit, ...]
    least: tuple[int, str]
    num_used: int

    @property
    def least_bytes(self) -> int:
        """The least budget."""
        return self.least[0] * self.layout.chunk_bytes

    def limit(self, budget: Budget) -> int:
        """Bytes that the lane can use, but for `Budget.num_bytes`."""
        layout, num_states = self.layout, len(self.layout.states) + len(self.layout.beside)
        num_bytes = self.num_used * layout.chunk_bytes
        if not budget.state_on_host:
            return num_bytes
        # Two steps' state: one is copied while the other is used.
        return min(num_bytes, 2 * (layout.num_of_kind + num_states) * layout.chunk_bytes)


def plan_chunks(pieces: Sequence[Piece], budget: Budget, *, whole: nn.Module | None = None) -> ChunkPlan:
    """The chunks of a lane.

    Args:
        pieces: what it computes.
        budget: of the device.
        whole: the model that evaluations call; None: the only piece.

    Raises:
        InputError: an optimizer's state is not by element, two modules share a parameter, or one exceeds a chunk.
    """
    optimizers = [piece.optimizer for piece in pieces if piece.optimizer is not None]
    states = tuple(dict.fromkeys(name for optimizer in optimizers for name in state_names(optimizer)))
    if budget.state_on_host and optimizers and not states:
        kind = type(optimizers[0]).__name__
        raise InputError(f"dense.state host needs an optimizer that keeps state by element, got {kind} without any")
    named = [each for piece in pieces for each in piece.parameters.items()]
    kept = tuple(dict.fromkeys(name for piece in pieces for name in piece.versions))
    breaks: set[int] = set()
    for piece in pieces:
        begin, end = max(breaks, default=0), len(piece.parameters)
        breaks.add(begin + end)
        if piece.versions:  # a unit needs no more chunks with other weights: frozen parameters have chunks of their own
            frozen = [not parameter.requires_grad for parameter in piece.parameters.values()]
            breaks |= {begin + number for number in range(1, end) if frozen[number] != frozen[number - 1]}
    layout = pack(
        [name for name, _ in named],
        [parameter.nbytes for _, parameter in named],
        chunk_bytes=budget.chunk_bytes,
        states=states,
        beside=(*([AVERAGE] if budget.averages else []), *kept),
        breaks=breaks,
    )
    places = {parameter: place for (_, parameter), place in zip(named, layout.places, strict=True)}
    chunk_of = {parameter: place.chunk for parameter, place in places.items()}
    by_piece = [units_of(each.module, {p: chunk_of[p] for p in each.parameters.values()}) for each in pieces]
    num_kept = int(LAST_GRADIENT in kept)
    modules = {unit.module for units in by_piece for unit in units}
    evaluated = () if whole is None else units_of(whole, chunk_of)
    needs = [most_chunks(layout, units, num_kept) for units in (*by_piece, evaluated)]
    needs += [most_chunks(layout, (), num_kept, steps=True)] * bool(optimizers)
    chunks = tuple(_chunks_of(piece, places) for piece in pieces)
    return ChunkPlan(
        pieces=tuple(pieces),
        layout=layout,
        places=places,
        chunks=chunks,
        units=tuple(unit for units in by_piece for unit in units),
        outer=tuple(unit for unit in evaluated if unit.module not in modules),
        least=max(needs, key=lambda need: need[0], default=(0, "")),
        num_used=sum(
            len(own) * (1 + len(layout.beside) + piece.collects + (piece.optimizer is not None) * len(layout.states))
            for own, piece in zip(chunks, pieces, strict=True)
        ),
    )


def divide_budget(budget: Budget, plans: Sequence[ChunkPlan]) -> list[int]:
    """Bytes of the device of each lane of a process: its least, and of the rest a share by what it can use besides.

    Raises:
        InputError: the budget does not hold the least of all lanes.
    """
    limits = [plan.limit(budget) for plan in plans]
    least = [plan.least_bytes for plan in plans]
    for plan, limit in zip(plans, limits, strict=True):
        if not budget.num_bytes and limit < plan.least_bytes:
            raise _too_small(plan, limit)
    total = sum(least)
    if not budget.num_bytes:
        return limits
    if budget.num_bytes < total:
        if len(plans) == 1:
            raise _too_small(plans[0], budget.num_bytes)
        raise InputError(
            f"dense.budget_bytes must be at least {total}, what the largest units of the {len(plans)} compute lanes of "
            f"a rank need ({', '.join(map(str, least))}), got {budget.num_bytes}"
        )
    # At least what the least needs: a lane whose state waits on the host needs no more than that.
    room = [max(limit - own, 0) for limit, own in zip(limits, least, strict=True)]
    rest = min(budget.num_bytes - total, sum(room))
    return [own + (rest * more // sum(room) if more else 0) for own, more in zip(least, room, strict=True)]


def _too_small(plan: ChunkPlan, num_bytes: int) -> InputError:
    most, name = plan.least
    return InputError(
        f"dense.budget_bytes must be at least {plan.least_bytes}, what the largest unit, {name}, needs "
        f"({most} chunks of {plan.layout.chunk_bytes} bytes), got {num_bytes}"
    )


def _chunks_of(piece: Piece, places: Mapping[nn.Parameter, Place]) -> range:
    own = [places[parameter].chunk for parameter in piece.parameters.values()]
    return range(own[0], own[-1] + 1) if own else range(0)
