"""`ChunkedModel`: what one lane computes and steps, whose parameters, gradients and state live in chunks.

    forward, backward    `UnitHooks`: chunks of a unit come
    gradient is ready    `KeptGradients`: its chunk comes, the gradient is copied there
    step, chunk by chunk its parameters, gradients and state come; the optimizer sees these parameters alone

Parameters and state keep their identity and their names: whoever reads them by name finds them where they are, after
`settle`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.chunks.arena import Arena, Part
from bagpipe.dense.chunks.budget import AVERAGE, LAST_GRADIENT, Budget, ChunkPlan, Piece, divide_budget, plan_chunks
from bagpipe.dense.chunks.gradients import KeptGradients
from bagpipe.dense.chunks.unit_hooks import UnitHooks
from bagpipe.dense.chunks.units import average_moment, gradient_moment, norm_moment, step_moment, version_moment
from bagpipe.dense.chunks.walker import Walker
from bagpipe.dense.clip import Clip, Limited, Prepare
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
            layout.chunk_bytes,
            num_bytes // layout.chunk_bytes,
            device=device_of(plan.pieces[0].module),
            streams=streams,
            name=name,
        )
        self.arena.dead.update(range(layout.num_of_kind, layout.num_chunks))
        self.walker = Walker(self.arena, f"dense.budget_bytes {num_bytes}")
        names = {parameter: key for piece in plan.pieces for key, parameter in piece.parameters.items()}
        self._kept: dict[str, Mapping[nn.Parameter, Tensor]] = {}  # by name: averages, other weights, last gradients
        self.hooks = UnitHooks(
            self.walker, plan.units, plan.outer, names, layout=layout, places=plan.places, kept=self._kept
        )
        self.gradients = KeptGradients(self.walker, layout, plan.places, names)
        self._replaced: dict[nn.Parameter, Tensor] = {}  # gradients beside the chunks that are stepped with
        self._share = 0.0
        self._of_chunk: list[list[nn.Parameter]] = [[] for _ in range(layout.num_of_kind)]
        for parameter, place in plan.places.items():
            self._of_chunk[place.chunk].append(parameter)
        for parameter in (p for piece in plan.pieces if piece.collects for p in piece.parameters.values()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
        self._place_all()

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any, budget: Budget, streams: Streams) -> ChunkedModel:
        """A whole model.

        Raises:
            InputError: see `plan_chunks`, or the budget is too small.
        """
        return cls.of_pieces([Piece.of(model, optimizer)], budget, streams)

    @classmethod
    def of_pieces(
        cls, pieces: Sequence[Piece], budget: Budget, streams: Streams, *, whole: nn.Module | None = None
    ) -> ChunkedModel:
        """Some pieces of one lane, which has the whole budget; see `plan_chunks`.

        Raises:
            InputError: see `plan_chunks`, or the budget is too small.
        """
        plan = plan_chunks(pieces, budget, whole=whole)
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
        # Of what is stepped: segments come after the parameters in whose place they are.
        own = {name: p for piece in self._plan.pieces for name, p in piece.parameters.items()}
        self.keep({AVERAGE: {own[name]: average for name, average in averages.items() if name in own}})

    def keep(self, kept: Mapping[str, Mapping[nn.Parameter, Tensor]]) -> None:
        """Have tensors in chunks of their own, at the places of the parameters.

        Args:
            kept: by a name of `Piece.versions` or `AVERAGE`, and by parameter; of its shape and dtype. What a mapping
                of last gradients gets in steps goes there too.
        """
        for name, tensors in kept.items():
            self._kept[name] = {**self._kept.get(name, {}), **tensors} if name != LAST_GRADIENT else tensors
        self._place_all()

    def settle(self) -> None:
        """All parameters and state can be read and written where they are."""
        self.arena.settle()

    def open(self, piece: int = 0) -> None:
        """The parameters of a piece are about to be written where they are, until the next moment."""
        self.settle()
        for chunk in self.arena.held.intersection(self._plan.chunks[piece]):
            self.arena.use(chunk, writes=True)

    def computing(self) -> AbstractContextManager[None]:
        """Inside is a forward of a batch that has a backward."""
        return self.hooks.computing()

    def begin(self, *, goes_on: bool = False) -> None:
        """A batch begins.

        Args:
            goes_on: some of its forwards were called before.
        """
        self.gradients.clear()
        self.hooks.begin(goes_on=goes_on)
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
                with _shown({parameter: self._replaced.get(parameter, own[parameter]) for parameter in own}):
                    look([*own])

    def step_limited(
        self, step: Callable[[], None], clip: Clip, limited: Limited | None, *, prepare: Prepare | None, piece: int = 0
    ) -> None:
        """Step chunk by chunk, with gradients under their limits.

        Args:
            step: steps the optimizer, which sees the parameters of a chunk alone.
            clip: the limits.
            limited: what the limit of the norm does; None: there is none.
            prepare: of gradients that `measure` has not prepared, whose elements are limited here; None: it has.
            piece: number of what is stepped.
        """

        def update(parameters: Sequence[nn.Parameter]) -> None:
            if prepare is not None:
                prepare(parameters)
                clip.measure(parameters)
            elif limited is not None:
                clip.scale(parameters, limited)
            step()

        self.step(update, piece=piece)

    def show(self, wanted: Container[nn.Parameter], prepare: Prepare, *, piece: int = 0) -> None:
        """Have copies of gradients in `grad`, beside the chunks, until `take_shown`.

        Args:
            wanted: parameters.
            prepare: called once for each gradient of the piece, which it may change.
            piece: number of what is stepped then.
        """
        found: dict[nn.Parameter, Tensor] = {}

        def look(parameters: Sequence[nn.Parameter]) -> None:
            prepare(parameters)
            found.update({p: p.grad.clone() for p in parameters if p in wanted and p.grad is not None})

        self.measure(look, piece=piece)
        for parameter, gradient in found.items():
            parameter.grad = gradient

    def take_shown(self, wanted: Iterable[nn.Parameter]) -> None:
        """After `show`: the parameters are stepped with what they have in `grad` now."""
        for parameter in wanted:
            if parameter.grad is not None:
                self._replaced[parameter], parameter.grad = parameter.grad, None

    def step(self, update: Callable[[Sequence[nn.Parameter]], None], *, piece: int = 0) -> None:
        """Step chunk by chunk.

        Args:
            update: steps the optimizer, which sees only the parameters of its argument, with their gradients.
            piece: number of what is stepped.
        """
        for chunk in self._plan.chunks[piece]:
            own = self.gradients.of(self._of_chunk[chunk])
            if own:
                kept = [name for name in self._plan.pieces[piece].versions if name == LAST_GRADIENT]
                self.walker.enter(step_moment(self._plan.layout, chunk, kept))
                shown = {parameter: self._replaced.pop(parameter, gradient) for parameter, gradient in own.items()}
                with _shown(shown), self._only([*own], piece):
                    update([*own])
                for parameter in own:
                    self._place_state(parameter, piece)
                    for name in kept:
                        if parameter in self._kept[name]:
                            self._place(name, parameter, self._kept[name][parameter])
                self.gradients.drop(chunk, own)
            self._follow(chunk)

    def write(
        self, name: str, write: Callable[[Sequence[nn.Parameter]], None], *, predicts: bool, piece: int = 0
    ) -> None:
        """Write what is kept of a piece's parameters, chunk by chunk.

        Args:
            name: of what is written.
            write: is given parameters that are on the device with what is written of them.
            predicts: what the optimizer keeps of them is there too, and it sees only these.
            piece: number of what is written.
        """
        layout, versions = self._plan.layout, self._plan.pieces[piece].versions
        reads = [*layout.states, *(each for each in versions if each == LAST_GRADIENT)] if predicts else []
        for chunk in self._plan.chunks[piece]:
            own = [parameter for parameter in self._of_chunk[chunk] if parameter in self._kept[name]]
            if own:
                with torch._C.DisableTorchFunction():  # it can be called where uses of parameters are looked at
                    self.walker.enter(version_moment(layout, chunk, name, reads))
                    with self._only(own, piece):
                        write(own)

    def follow(self, piece: int = 0) -> None:
        """The averages of a piece's parameters follow them, which have made no step."""
        for chunk in self._plan.chunks[piece]:
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
        averages = self._kept.get(AVERAGE, {})
        own = {p: averages[p] for p in self._of_chunk[chunk] if p in averages}
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
            for name, tensors in self._kept.items():
                if parameter in tensors:
                    self._place(name, parameter, tensors[parameter])
        for number, piece in enumerate(self._plan.pieces):
            for parameter in piece.parameters.values():
                self._place_state(parameter, number)

    def _place_state(self, parameter: nn.Parameter, piece: int) -> None:
        optimizer, layout = self._plan.pieces[piece].optimizer, self._plan.layout
        state: Mapping[str, Any] = {} if optimizer is None else optimizer.state.get(parameter, {})
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
            self._place(name, parameter, tensor)

    def _place(self, name: str, parameter: nn.Parameter, tensor: Tensor) -> None:
        place = self._plan.places[parameter]
        chunk = self._plan.layout.state(place.chunk, name)
        self.arena.place(tensor, Part.of(tensor, chunk, place.offset_bytes))

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
