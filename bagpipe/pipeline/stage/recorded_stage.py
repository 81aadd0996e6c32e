"""`RecordedStage`: forward and backward of a stage, captured for inputs of one kind and replayed for each micro-batch.

    inputs ────copy──> static inputs ───> replay of F ─────────> shown outputs, losses ────────> copied by the caller
    gradients ─copy──> static gradients ─> replay of B, or I, W ─> gradients of the inputs ────> copied by the caller
    loss scale ─fill─> of losses                               └─> gradients of parameters ────> added to `grad`

F keeps activations in its static memory until B. So each micro-batch under way has recordings of its own, from F to B
or W; `StageRecordings` makes as many as are under way at a time. Only the stage's lane touches static memory: what
others take is a copy.

Gradients come from `autograd.grad`, which accumulates nothing and calls no hooks, so a capture has no side effects. I
and W of a schedule that splits backwards are captured apart, and a full backward then replays both.

A recording computes on the addresses of parameters and buffers: both may change in place, but not move. Weights that
are inputs can change between F and B (`RecordedStage.overwrite`): a backward can read others than its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from bagpipe.errors import InputError
from bagpipe.pipeline.stage.backward import Graph, Kept, SplitBackward, hooks_of
from bagpipe.pipeline.stage.graphs import Graphs, Recording
from bagpipe.split.staged_model import StagedModel

__all__ = ["Compute", "GraphCapture", "RecordedMicroBatch", "RecordedStage", "StageRecordings", "check_recordable"]

#: inputs -> tensors to show after the forward, and the roots of the backward: outputs that get a gradient, then losses.
Compute: TypeAlias = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCapture:
    """Graphs and batch size with which the stages of a process are recorded.

    Attributes:
        graphs: of the stages' device.
        full_batch: examples of a global batch that is not the last one. Others run operator by operator.
        split: stage instances that have I and W.
    """

    graphs: Graphs
    full_batch: int
    split: frozenset[int] = frozenset()


def check_recordable(staged: StagedModel) -> None:
    """Check that all stages can be recorded.

    Raises:
        InputError: one draws random numbers.
    """
    if any(stage.uses_random for stage in staged.stages):
        raise InputError("run.cuda_graph is not possible for a model that draws random numbers (dropout)")


class RecordedStage:
    """The recordings of one micro-batch at a time. One thread calls `forward`, `backward_inputs`, `backward_weights`.

    Args:
        graphs: of the stage's device.
        compute: the stage. It draws no random numbers.
        inputs: of the first micro-batch; those of others have the same shapes and dtypes, and want the same gradients.
        module: that `compute` calls.
        trains: there is a backward.
        splits: I and W are apart.

    Attributes:
        num_roots: outputs that get a gradient, and losses.

    Raises:
        JobError: it cannot be captured.
    """

    def __init__(
        self,
        graphs: Graphs,
        compute: Compute,
        inputs: Sequence[Tensor],
        *,
        module: nn.Module,
        trains: bool = True,
        splits: bool = False,
    ) -> None:
        self._compute = compute
        self._inputs = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
        self._leaves = [leaf for leaf in self._inputs if leaf.requires_grad]
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        # Code that is compiled without gradients can round in another way than with them.
        self._tracks = trains or getattr(module, "is_compiled", False) is True
        self._split = SplitBackward(self._parameters)
        self._roots: list[Tensor] = []  # of a forward, until its backward
        self._kept = Kept()
        self._reached: list[Tensor] = []  # leaves, and parameters below, that the roots depend on
        self._graded: list[nn.Parameter] = []
        with _restored(module):
            self._forward()  # for the shapes of the roots
            self._given = [torch.empty_like(root, memory_format=torch.contiguous_format) for root in self._roots]
            self.num_roots = len(self._given)
            self._wants = [trains and root.requires_grad for root in self._roots]
            backward: list[Callable[[], Sequence[Tensor]]] = [self._backward] if any(self._wants) else []
            if backward and splits and self._leaves and self._parameters:
                backward = [self._backward_inputs, self._backward_weights]
            # Nothing of a graph outlives this block: nodes of parameters would lead other captures to this stream.
            self._roots = []
            self._recording, *recorded = graphs.record(self._forward, *backward)
            self._roots = []
        # What is in one recording is replayed by I if anyone waits for it, else by W.
        self._first: Recording | None = recorded.pop(0) if recorded and self._leaves else None
        self._last: Recording | None = recorded.pop() if recorded else None

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """F. What is shown; static, valid until the next F.

        Args:
            inputs: of the micro-batch.
        """
        with torch.no_grad():
            for static, value in zip(self._inputs, inputs, strict=True):
                static.copy_(value)
        self._recording.replay()
        return self._recording.outputs

    def overwrite(self, first: int, values: Sequence[Tensor]) -> None:
        """Before B: what the backward reads of inputs, from the number `first` on, has these values.

        The graph keeps them by reference, as autograd does not count this change.
        """
        for static, value in zip(self._inputs[first:], values, strict=False):
            static.data.copy_(value)

    def backward_inputs(self, gradients: Sequence[Tensor | float]) -> tuple[Tensor | None, ...]:
        """I. The gradients of the inputs, None where there is none; static, valid until the next I.

        Args:
            gradients: of the roots; of a loss a number.
        """
        for static, gradient in zip(self._given, gradients, strict=True):
            if isinstance(gradient, Tensor):
                static.copy_(gradient)
            else:
                static.fill_(gradient)
        if self._first is None:
            return (None,) * len(self._inputs)
        self._first.replay()
        found = dict(zip(map(id, self._reached), self._first.outputs, strict=False))
        return tuple(found.get(id(leaf)) for leaf in self._inputs)

    def backward_weights(self, *, lends: bool = False) -> None:
        """W: adds to the ``grad`` of the parameters, and calls their hooks after it, as a backward does.

        Args:
            lends: a parameter without a gradient takes the static one, valid until the next backward.
        """
        gradients: Sequence[Tensor] = ()
        if self._last is not None:
            self._last.replay()
            gradients = self._last.outputs
        elif self._first is not None:
            gradients = self._first.outputs[len(self._reached) :]
        for parameter, gradient in zip(self._graded, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient if lends else gradient.clone()
            else:
                parameter.grad.add_(gradient)
            for hook in hooks_of(parameter):
                hook(parameter)

    # ---- what is recorded ----------------------------------------------------------------------------------------

    def _forward(self) -> list[Tensor]:
        with torch.set_grad_enabled(self._tracks):
            shown, roots = self._compute(self._inputs)
        self._roots = list(roots)
        return [tensor.detach() for tensor in shown]

    def _backward(self) -> list[Tensor]:
        roots, given = self._wanted()
        found = torch.autograd.grad(roots, [*self._leaves, *self._parameters], given, allow_unused=True)
        return _apart([*self._of_leaves(found[: len(self._leaves)]), *self._of_weights(found[len(self._leaves) :])])

    def _backward_inputs(self) -> list[Tensor]:
        roots, given = self._wanted()
        self._kept = self._split.inputs(Graph(self._leaves, roots), given)
        found = [leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.grad = None
        return _apart(self._of_leaves(found))

    def _backward_weights(self) -> list[Tensor]:
        kept, self._kept = self._kept, Kept()
        found = self._split.gradients(kept)
        if kept.gradients:  # I has computed them: this recording has work of its own
            found = [None if gradient is None else gradient.clone() for gradient in found]
        return _apart(self._of_weights(found))

    def _wanted(self) -> tuple[list[Tensor], list[Tensor]]:
        """The roots that depend on a leaf or a parameter, and their gradients."""
        roots, self._roots = self._roots, []
        return [*compress(roots, self._wants)], [*compress(self._given, self._wants)]

    def _of_leaves(self, gradients: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
        found = _present(self._leaves, gradients)
        self._reached = [leaf for leaf, _ in found]
        return found

    def _of_weights(self, gradients: Sequence[Tensor | None]) -> list[tuple[nn.Parameter, Tensor]]:
        found = _present(self._parameters, gradients)
        self._graded = [parameter for parameter, _ in found]
        return found


class RecordedMicroBatch:
    """A micro-batch of a stage from its F to its W. Its F is enqueued.

    Args:
        recorded: its recordings.
        inputs: its inputs.
        scale: of its loss.
        end: it is over.

    Attributes:
        shown: outputs and losses; static, valid until the end.
        late: number of an input, and what the backward reads of it and the next ones, as it is then; None: all inputs
            are those of the forward.
    """

    def __init__(
        self, recorded: RecordedStage, inputs: Sequence[Tensor], scale: float, end: Callable[[RecordedStage], None]
    ) -> None:
        self.shown = recorded.forward(inputs)
        self.late: tuple[int, Sequence[Tensor]] | None = None
        self._recorded = recorded
        self._inputs = inputs
        self._scale = scale
        self._end = end

    def backward(self, gradients: Sequence[Tensor] = (), *, lends: bool = False) -> None:
        """B: I and W."""
        self.backward_inputs(gradients, lends=lends)
        self.backward_weights(lends=lends)

    def backward_inputs(self, gradients: Sequence[Tensor] = (), *, lends: bool = False) -> None:
        """I: gives the inputs their gradients, in ``grad``.

        Args:
            gradients: of the roots that are no loss.
            lends: they are static, valid until the next backward; otherwise they are copies.
        """
        if self.late is not None:
            self._recorded.overwrite(*self.late)
        losses = [self._scale] * (self._recorded.num_roots - len(gradients))
        found = self._recorded.backward_inputs([*gradients, *losses])
        for value, gradient in zip(self._inputs, found, strict=True):
            if gradient is not None:
                value.grad = gradient if lends else gradient.clone(memory_format=torch.contiguous_format)
        self._inputs = ()

    def backward_weights(self, *, lends: bool = False) -> None:
        """W; see `RecordedStage.backward_weights`. The micro-batch is over."""
        self._recorded.backward_weights(lends=lends)
        self.end()

    def end(self) -> None:
        """It is over: others may use its recordings."""
        self._end(self._recorded)


class StageRecordings:
    """The recordings of a stage instance, as many of each kind as micro-batches are under way. One thread uses them.

    Args:
        capture: how stages are recorded.
        compute: the stage.
        module: that `compute` calls.
        splits: I and W are apart.

    Attributes:
        full_batch: see `GraphCapture`.
    """

    def __init__(self, capture: GraphCapture, compute: Compute, *, module: nn.Module, splits: bool = False) -> None:
        self.full_batch = capture.full_batch
        self._graphs = capture.graphs
        self._compute = compute
        self._module = module
        self._splits = splits
        self._free: dict[Hashable, list[RecordedStage]] = {}

    def forward(self, inputs: Sequence[Tensor], scale: float = 1, *, trains: bool = True) -> RecordedMicroBatch:
        """F of a micro-batch.

        Args:
            inputs: of the micro-batch; leaves that a backward gives a gradient.
            scale: of the loss.
            trains: it can have a backward.

        Raises:
            JobError: the stage cannot be captured.
        """
        kind = (trains, tuple((value.shape, value.requires_grad) for value in inputs))
        free = self._free.setdefault(kind, [])
        if not free:
            free.append(
                RecordedStage(
                    self._graphs, self._compute, inputs, module=self._module, trains=trains, splits=self._splits
                )
            )
        return RecordedMicroBatch(free.pop(), inputs, scale, free.append)


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Undo what a capture does to buffers (running means): it runs a forward several times.

    The copy is none of the changes that autograd counts, which tell whether a forward changes buffers.
    """
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    yield
    for buffer, value in before:
        buffer.data.copy_(value)


def _present(tensors: Sequence[AnyTensor], gradients: Sequence[Tensor | None]) -> list[tuple[AnyTensor, Tensor]]:
    """The tensors that have a gradient, and their gradients."""
    pairs = zip(tensors, gradients, strict=True)
    return [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]


def _apart(found: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Gradients as autograd accumulates them: each in its own memory, with the strides of its tensor.

    Two tensors that are added share one gradient; an in-place change would change both.
    """
    taken: set[int] = set()
    gradients = []
    for tensor, gradient in found:
        memory = gradient.untyped_storage().data_ptr()
        if memory in taken or gradient.stride() != tensor.stride():
            gradient = torch.empty_like(tensor).copy_(gradient)
        taken.add(memory)
        gradients.append(gradient)
    return gradients
