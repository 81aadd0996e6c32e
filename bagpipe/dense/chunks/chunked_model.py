"""`ChunkedModel`: what one lane computes and steps, whose parameters, gradients and state live in chunks.

    forward, backward    `UnitHooks`: chunks of a unit come
    gradient is ready    `KeptGradients`: its chunk comes, the gradient is copied there
    step, chunk by chunk its parameters, gradients and state come; the optimizer sees these parameters alone

Parameters and state keep their identity and their names: whoever reads them by name finds them where they are, after
`settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.chunks.arena import Arena, Part
from bagpipe.dense.chunks.budget import AVERAGE, Budget, ChunkPlan, Piece, divide_budget, plan_chunks
from bagpipe.dense.chunks.gradients import KeptGradients
from bagpipe.dense.chunks.unit_hooks import UnitHooks
from bagpipe.dense.chunks.units import average_moment, gradient_moment, norm_moment, step_moment
from bagpipe.dense.chunks.walker import Walker
from bagpipe.errors import InputError
from bagpipe.pipeline.stream import Streams
from bagpipe.pipeline.trace import Trace
from bagpipe.types.model_inputs import device_of

__all__ = ["ChunkedModel"]


class ChunkedModel:
    """See above. One thread at a time uses it.

    Args:
        plan: its chunks; the parameters are dense and contiguous.
        num_bytes: of chunks on the device at most.
        streams: of the model's device.
        name: of the copy lane.

    Raises:
        InputError: optimizer state is not of its parameter's shape and dtype.
    """

    def __init__(self, plan: ChunkPlan, num_bytes: int, streams: Streams, *, name: str = "chunks") -> None:
        layout = plan.layout
        self._plan = plan
        self.arena = Arena(
            layout.num_chunks,
            layout.chunk_bytes,
            num_bytes // layout.chunk_bytes,
            device=device_of(plan.pieces[0].module),
            streams=streams,
            name=name,
        )
        self.arena.dead.update(range(layout.num_of_kind, layout.num_chunks))
        self.walker = Walker(self.arena, f"dense.budget_bytes {num_bytes}")
        names = {parameter: key for piece in plan.pieces for key, parameter in piece.parameters.items()}
        self.hooks = UnitHooks(self.walker, plan.units, plan.outer, names)
        self.gradients = KeptGradients(self.walker, layout, plan.places, names)
        self._averages: dict[nn.Parameter, Tensor] = {}
        self._share = 0.0
        self._of_chunk: list[list[nn.Parameter]] = [[] for _ in range(layout.num_of_kind)]
        for parameter, place in plan.places.items():
            self._of_chunk[place.chunk].append(parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
        self._place_all()

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any, budget: Budget, streams: Streams) -> ChunkedModel:
        """A whole model.

        Raises:
            InputError: see `plan_chunks`, or the budget is too small.
        """
        plan = plan_chunks([Piece.of(model, optimizer)], budget)
        return cls(plan, divide_budget(budget, [plan])[0], streams)

    @property
    def marks(self) -> Mapping[str, Tensor]:
        """See `KeptGradients.marks`."""
        return self.gradients.marks

    def start(self, trace: Trace | None = None) -> None:
        """Everything is home, and the state that the optimizer has now lies in chunks. Before a run.

        Args:
            trace: records the moves.
        """
        self._place_all()
        self.arena.lane.open(trace)

    def end(self) -> None:
        """Everything goes home. After a run."""
        self.hooks.finish()
        self.walker.rest()

    def close(self) -> None:
        """The copy lane ends, after a run or what is left of it."""
        self.arena.lane.close()

    def rest(self) -> None:
        """Between batches: everything goes home, where it can be written."""
        self.walker.rest()

    def keep_averages(self, averages: Mapping[str, Tensor], decay: float) -> None:
        """Have averages of the parameters in chunks of their own, and follow each step.

        Args:
            averages: by the parameters' names, also of others; of their shapes and dtypes.
            decay: weight of the average before.
        """
        self._share = 1.0 - decay
        for piece in self._plan.pieces:
            self._averages |= {p: averages[name] for name, p in piece.parameters.items() if name in averages}
        self._place_all()

    def settle(self) -> None:
        """All parameters and state can be read and written where they are."""
        self.arena.settle()

    def computing(self) -> AbstractContextManager[None]:
        """Inside is a forward of a batch that has a backward."""
        return self.hooks.computing()

    def begin(self) -> None:
        """A batch begins."""
        self.gradients.clear()
        self.hooks.begin()
        self.walker.begin()

    def measure(self, look: Callable[[Sequence[nn.Parameter]], None], *, piece: int = 0) -> None:
        """Go through the gradients before the first step, chunk by chunk, in the order of the parameters.

        Args:
            look: is given parameters whose gradients are on the device, in `grad`; it may change them.
            piece: number of what is stepped then.
        """
        for chunk in self._plan.chunks[piece]:
            own = self.gradients.of(self._of_chunk[chunk])
            if own:
                self.walker.enter(norm_moment(self._plan.layout, chunk))
                with _shown(own):
                    look([*own])

    def step(self, update: Callable[[Sequence[nn.Parameter]], None], *, piece: int = 0) -> None:
        """Step chunk by chunk.

        Args:
            update: steps the optimizer, which sees only the parameters of its argument, with their gradients.
            piece: number of what is stepped.
        """
        for chunk in self._plan.chunks[piece]:
            own = self.gradients.of(self._of_chunk[chunk])
            if own:
                self.walker.enter(step_moment(self._plan.layout, chunk))
                with _shown(own), self._only([*own], piece):
                    update([*own])
                for parameter in own:
                    self._place_state(parameter, piece)
                self.gradients.drop(chunk, own)
            self._follow(chunk)

    def finish(self) -> None:
        """A batch is over."""
        self.hooks.finish()
        self.gradients.clear()
        self.walker.end()

    def hand_out(self, piece: int = 0) -> None:
        """Have copies of a piece's gradients in `grad`, beside the chunks, until `take_back`."""
        for chunk in self._plan.chunks[piece]:
            self.gradients.hand_out(chunk, self._of_chunk[chunk])

    def take_back(self, piece: int = 0) -> None:
        """Take the gradients that `grad` has now to their chunks, those of more parameters maybe."""
        for chunk in self._plan.chunks[piece]:
            if any(parameter.grad is not None for parameter in self._of_chunk[chunk]):
                self.walker.enter(gradient_moment(self._plan.layout, chunk, is_first=True))
                self.gradients.take_back(self._of_chunk[chunk])

    def _follow(self, chunk: int) -> None:
        """The averages of a chunk's parameters follow them."""
        own = {p: self._averages[p] for p in self._of_chunk[chunk] if p in self._averages}
        if own:
            self.walker.enter(average_moment(self._plan.layout, chunk, AVERAGE))
            torch._foreach_lerp_([*own.values()], [parameter.detach() for parameter in own], self._share)

    def _take(self, parameter: nn.Parameter) -> None:
        self.hooks.check_called(parameter)
        self.gradients.take(parameter)

    def _place_all(self) -> None:
        self.walker.rest()
        self.gradients.clear()
        self.hooks.finish()
        for chunk in range(self._plan.layout.num_chunks):
            self.arena.release(chunk)
        for parameter, place in self._plan.places.items():
            self.arena.place(parameter, Part.of(parameter, place.chunk, place.offset_bytes))
            if parameter in self._averages:
                chunk, average = self._plan.layout.state(place.chunk, AVERAGE), self._averages[parameter]
                self.arena.place(average, Part.of(average, chunk, place.offset_bytes))
        for number, piece in enumerate(self._plan.pieces):
            for parameter in piece.parameters.values():
                self._place_state(parameter, number)

    def _place_state(self, parameter: nn.Parameter, piece: int) -> None:
        optimizer, layout = self._plan.pieces[piece].optimizer, self._plan.layout
        state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
        place = self._plan.places[parameter]
        for name in layout.states:
            tensor = state.get(name)
            if not isinstance(tensor, Tensor):
                continue
            if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                raise InputError(
                    f"chunks of the dense part need optimizer state of its parameters' shape and dtype, got "
                    f"{name} of a parameter {parameter.dtype} {list(parameter.shape)}: {tensor.dtype} "
                    f"{list(tensor.shape)}"
                )
            self.arena.place(tensor, Part.of(tensor, layout.state(place.chunk, name), place.offset_bytes))

    @contextmanager
    def _only(self, parameters: Sequence[nn.Parameter], piece: int) -> Iterator[None]:
        """Inside, the piece's optimizer has these parameters alone."""
        optimizer = self._plan.pieces[piece].optimizer
        assert optimizer is not None, "there are gradients"
        groups = optimizer.param_groups
        before, wanted = [group["params"] for group in groups], set(parameters)
        for group, everything in zip(groups, before, strict=True):
            group["params"] = [parameter for parameter in everything if parameter in wanted]
        try:
            yield
        finally:
            for group, everything in zip(groups, before, strict=True):
                group["params"] = everything


@contextmanager
def _shown(gradients: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Inside, the parameters have their gradients in `grad`."""
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
    try:
        yield
    finally:
        for parameter in gradients:
            parameter.grad = None
