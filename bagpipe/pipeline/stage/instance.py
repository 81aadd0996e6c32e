"""`StageRunner`: forward and backward actions of one stage instance (a stage in one pipe).

    F    take inputs ──> leaves ──module──> outputs ──> put to consumers; loss of its heads
    B    take gradients, sum over consumers ──> backward ──> put the leaves' gradients to producers
    I W  the halves of B        REC   repeats the forward, after a forward that kept only its inputs

Gradients of an output are summed in the order of its consumers' numbers, gradients of parameters in schedule order.
The state of a micro-batch lives from its F to its B or W. An empty micro-batch does nothing. Nor does the backward of
one that a partial backward leaves out: its F keeps nothing. With `GraphCapture` micro-batches of full batches replay
recordings; what these give is copied before other lanes or a later replay can meet it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bagpipe.dense.parallel.saved_places import SavedPlaces
from bagpipe.dense.seeding import mix_seed, seeded
from bagpipe.errors import JobError
from bagpipe.pipeline.stage.activations import LaneActivations, Saving
from bagpipe.pipeline.stage.backward import Graph, SplitBackward
from bagpipe.pipeline.stage.batches import BatchDivision, Batches, StageBatch
from bagpipe.pipeline.stage.channel import Wiring, owned
from bagpipe.pipeline.stage.partial_backward import PartialBackward
from bagpipe.pipeline.stage.recorded_instance import InstanceRecordings, LossSum, summed_loss
from bagpipe.pipeline.stage.recorded_stage import GraphCapture, RecordedMicroBatch
from bagpipe.pipeline.stage.stage_versions import StageVersions
from bagpipe.pipeline.stream import keep_for_current_stream
from bagpipe.schedule.ir.step_program import StageInstance
from bagpipe.split.staged_model import StageModule

__all__ = ["LossSum", "StageRunner"]

#: Batches under way at a time, and one more.
_SUMS_KEPT = 3


@dataclass(slots=True, eq=False)
class _MicroBatch:
    """A micro-batch between its F and its B or W.

    Attributes:
        leaves: inputs by value number.
        buffers: of a module that is computed again: copies of those that the forward began with.
        graph: of the forward, or its recordings.
    """

    leaves: dict[int, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    graph: Graph | RecordedMicroBatch | None = None


class StageRunner:
    """Runs one stage instance. One thread calls its actions.

    Args:
        instance: the stage instance.
        stage: its stage.
        module: the stage's module, or a copy with its own gradients.
        wiring: its channels.
        units: micro-batches per batch.
        needs_grad: numbers of the values that need a gradient, and the stages that make them.
        labels: value number of the labels.
        recomputed: micro-batches of a batch whose forwards keep only their inputs; a REC follows each.
        batches: batches of the process.
        loss: loss of a head.
        device, seed: device and seed of the random numbers.
        earlier: batches of earlier jobs, which their seeds count too.
        loss_scale: of the batch under way: multiplies the loss, and thereby every gradient.
        can_leave_out: batches can be left out (`settle`).
        versions: weights of an asynchronous schedule; None: every batch has the newest ones.
        parameters: trainable parameters of the module, in the order of `versions`.
        alternates: forwards of a batch can precede backwards of the batch before, so losses are kept by batch.
        activations: of the lane, moved to the host between F and B; None: they stay on the device.
        places: of the stage's whole parameters, which come and go: what the backward needs of them is saved as places;
            None: they stay.
        partial_backward: which backwards are left out; None: none.
        capture: how the stage is recorded; None: it runs operator by operator.

    Attributes:
        peak_live: peak number of micro-batches between F and B or W.
        loss_sum: float64 on the device; sum of the loss over all examples so far; of settled batches, if they can be
            left out.
        unchecked: batch, and loss sum of a micro-batch, until someone has looked whether it is finite.
    """

    def __init__(
        self,
        *,
        instance: StageInstance,
        stage: StageModule,
        module: nn.Module,
        wiring: Wiring,
        units: int,
        needs_grad: Mapping[int, int],
        labels: int,
        recomputed: frozenset[int],
        batches: Batches,
        loss: LossSum,
        device: torch.device,
        seed: int,
        earlier: int = 0,
        loss_scale: Callable[[], float] = lambda: 1.0,
        can_leave_out: bool = False,
        versions: StageVersions | None = None,
        parameters: Sequence[nn.Parameter] = (),
        alternates: bool = False,
        activations: LaneActivations | None = None,
        places: SavedPlaces | None = None,
        partial_backward: PartialBackward | None = None,
        capture: GraphCapture | None = None,
    ) -> None:
        self.instance = instance
        self.module = module
        self.peak_live = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.unchecked: deque[tuple[int, Tensor]] = deque()
        self._stage = stage
        self._wiring = wiring
        self._units = units
        self._needs_grad = needs_grad
        self._labels = labels
        self._recomputed = recomputed
        self._batches = batches
        self._loss = loss
        self._device = device
        self._seed = seed
        self._earlier = earlier
        self._loss_scale = loss_scale
        self._versions = versions
        self._parameters = parameters
        self._activations = activations
        self._is_compiled = getattr(module, "is_compiled", False) is True  # as `bagpipe.dense.stage_module` says
        self._places = places
        self._partial_backward = partial_backward
        self._live: dict[int, _MicroBatch] = {}
        self._sums_before: dict[int, Tensor] | None = (
            {} if alternates and not can_leave_out else None
        )  # of the latest batches
        # Of the batches under way that can be left out: their loss sums, and the module's buffers before them.
        self._unsettled: dict[int, Tensor] | None = {} if can_leave_out else None
        self._buffers_before: dict[int, dict[str, Tensor]] = {}
        self._split = SplitBackward([p for p in module.parameters() if p.requires_grad])
        self._sent = sorted({number for channel in wiring.outputs for number in channel.numbers})
        self._grad_values = sorted({number for channels in wiring.output_grads for number in channels[0].numbers})
        replying = {channel.sender for channels in wiring.output_grads for channel in channels}
        self._recordings: InstanceRecordings | None = None
        if capture is not None:
            self._recordings = InstanceRecordings(
                capture,
                stage,
                module,
                sent=self._sent,
                graded=self._grad_values,
                labels=labels,
                loss=loss,
                splits=instance.number in capture.split,
                versions=versions,
                parameters=parameters,
            )
        self._replied = [channel for channel in wiring.outputs if channel.receiver in replying]

    def forward(self, index: int) -> None:
        batch, unit = divmod(index, self._units)
        given, division = self._batches.get(batch)
        if self._sums_before is not None and batch not in self._sums_before:
            latest = {b: total for b, total in self._sums_before.items() if b > batch - _SUMS_KEPT}
            self._sums_before = {**latest, batch: self.loss_sum.clone()}  # another thread can be reading the last one
        if self._unsettled is not None and batch not in self._unsettled:
            self._unsettled[batch] = torch.zeros_like(self.loss_sum)
            self._buffers_before[batch] = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        first, end = division.instances[self.instance.number][unit]
        if first == end:
            return
        torch.get_num_threads()  # applies torch.set_num_threads to a new thread, which MKL does not do
        is_trained = self._computes(self.instance.stage, batch, unit)
        live = _MicroBatch(self._take_inputs(division, batch, unit))
        if is_trained:
            self._live[index] = live
            self.peak_live = max(self.peak_live, len(self._live))
        kept = is_trained and unit not in self._recomputed
        if is_trained and not kept:
            live.buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        activations = self._activations if kept else None
        saving = None
        if activations is not None:
            others = None if self._versions is None else self._versions.weights("forward", batch)
            saving = activations.saving(self.module, [*live.leaves.values(), *(others or ())], self._places)
        recordings = self._recordings_for(given)
        if recordings is not None:
            scale = self._loss_scale()
            live.graph, outputs, total = recordings.forward(live.leaves, batch, scale, trains=is_trained, keeps=kept)
        else:
            # Code that is compiled without gradients can round in another way than that of the repetition.
            with torch.set_grad_enabled(kept or self._is_compiled), saving or self._saving():
                outputs, total = self._run(live, given, division, batch, unit, saving=saving)
            if kept:
                live.graph = self._graph(live, outputs, total, given)
        if activations is not None and saving is not None:
            activations.saved(self.instance.number, index, saving, outputs.values())
        if total is not None:
            counted = self.counted(batch)
            counted += total.detach()
            self.unchecked.append((batch, total.detach()))
        sent = {number: owned(outputs[number]) for number in self._sent}
        for channel in self._wiring.outputs:
            division.put(channel, index, [sent[number] for number in channel.numbers])

    def counted(self, batch: int) -> Tensor:
        """The sum to which the losses of a batch are added before its end; by the lane of the forwards."""
        return self.loss_sum if self._unsettled is None else self._unsettled.get(batch, torch.zeros_like(self.loss_sum))

    def restore(self, batch: int) -> None:
        """Give the module the buffers that it had before a batch that is left out; before its next forward."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self._buffers_before[batch][name])

    def settle(self, batch: int, *, is_left_out: bool) -> None:
        """Count the losses of a batch, or forget them; batches in their order, after their forwards."""
        assert self._unsettled is not None, "batches can be left out"
        counted = self._unsettled.pop(batch)
        self._buffers_before.pop(batch)
        if not is_left_out:
            keep_for_current_stream(counted)  # of the lane of the forwards
            self.loss_sum += counted

    def _saving(self) -> AbstractContextManager[object]:
        """Around forwards whose activations stay."""
        return nullcontext() if self._places is None else self._places.saving()

    def loss_sum_before(self, batch: int, is_left_out: Callable[[int], bool] = lambda b: False) -> Tensor:
        """The loss sum of the batches before this one, the next one to end. From any thread.

        Args:
            batch: the batch.
            is_left_out: whether a batch is, whose forwards are over and which is not settled.
        """
        if self._unsettled is not None:
            sums = [total for b, total in sorted(self._unsettled.items()) if b < batch and not is_left_out(b)]
            return sum(sums, self.loss_sum)
        if self._sums_before is None:
            return self.loss_sum
        so_far = self.loss_sum.clone()
        # A forward of the batch may have changed the sum, but it kept the one before first.
        return self._sums_before.get(batch, so_far)

    def num_examples(self, index: int) -> int:
        """Examples of a micro-batch."""
        batch, unit = divmod(index, self._units)
        first, end = self._batches.get(batch)[1].instances[self.instance.number][unit]
        return end - first

    def recompute(self, index: int) -> None:
        live = self._live.get(index)
        if live is not None:
            batch, unit = divmod(index, self._units)
            given, division = self._batches.get(batch)
            # The first forward has already updated the buffers (running means); this one updates copies of older ones.
            recordings = self._recordings_for(given)
            if recordings is not None:
                live.graph = recordings.again(live.leaves, batch, self._loss_scale(), live.buffers)
                return
            with self._saving():
                again = self._run(live, given, division, batch, unit, live.buffers)
            live.graph = self._graph(live, *again, given)

    def backward(self, index: int) -> None:
        live = self._live.pop(index, None)
        if live is not None:
            _present(live.graph).backward(self._take_gradients(index))
            self._give_gradients(index, live)

    def backward_inputs(self, index: int) -> None:
        live = self._live.get(index)
        if live is not None:
            _present(live.graph).backward_inputs(self._take_gradients(index))
            self._give_gradients(index, live)
            live.leaves = {}

    def backward_weights(self, index: int) -> None:
        live = self._live.pop(index, None)
        if live is not None:
            _present(live.graph).backward_weights()

    def _recordings_for(self, given: StageBatch) -> InstanceRecordings | None:
        """Those that a batch replays; None: it runs operator by operator."""
        found = self._recordings
        return None if found is None or given.num_global_examples != found.full_batch else found

    def _computes(self, stage: int, batch: int, unit: int) -> bool:
        """Whether a stage of this pipe computes the backward of a micro-batch."""
        return self._partial_backward is None or self._partial_backward.computes(stage, self.instance.pipe, batch, unit)

    def _take_inputs(self, division: BatchDivision, batch: int, unit: int) -> dict[int, Tensor]:
        """By value number. Those that get a gradient require it."""
        is_trained = self._computes(self.instance.stage, batch, unit)
        wanted = {n for n, maker in self._needs_grad.items() if is_trained and self._computes(maker, batch, unit)}
        leaves: dict[int, Tensor] = {}
        for channels in self._wiring.inputs:
            for number, tensor in zip(channels[0].numbers, division.take(channels, batch, unit), strict=True):
                # A separate leaf: another stage can take the same tensor.
                leaf = tensor.detach()
                leaves[number] = leaf.requires_grad_() if number in wanted else leaf
        return leaves

    def _run(
        self,
        live: _MicroBatch,
        given: StageBatch,
        division: BatchDivision,
        batch: int,
        unit: int,
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        saving: Saving | None = None,
    ) -> tuple[dict[int, Tensor], Tensor | None]:
        """Outputs by value number, and the loss sum if there are heads. `buffers` replace those of the module."""
        stage, leaves = self._stage, live.leaves
        arguments = tuple(leaves[number] for number in stage.inputs)
        if stage.uses_random:
            first = (
                given.first_example
                + division.pipes[self.instance.pipe]
                + division.instances[self.instance.number][unit][0]
            )
            with seeded(mix_seed(self._seed, self._earlier + batch, self.instance.stage, first), self._device):
                results = self._call(arguments, buffers, batch, saving)
        else:
            results = self._call(arguments, buffers, batch, saving)
        outputs: dict[int, Tensor] = dict(zip(stage.outputs, results, strict=True))
        return outputs, summed_loss(stage, outputs, leaves.get(self._labels), self._loss)

    def _call(
        self, arguments: tuple[Tensor, ...], buffers: Mapping[str, Tensor], batch: int, saving: Saving | None
    ) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...]
        if self._versions is not None:
            results = self._versions.call(
                self.module, arguments, batch, parameters=self._parameters, buffers=buffers, around=saving
            )
            return results
        results = functional_call(self.module, dict(buffers), arguments) if buffers else self.module(*arguments)
        return results

    def _graph(self, live: _MicroBatch, outputs: dict[int, Tensor], total: Tensor | None, given: StageBatch) -> Graph:
        roots = [outputs[number] for number in self._grad_values]
        if total is not None:
            roots.append(total / given.num_global_examples * self._loss_scale())
        return Graph([leaf for leaf in live.leaves.values() if leaf.requires_grad], roots, self._split)

    def _take_gradients(self, index: int) -> list[Tensor]:
        """One gradient per output that gets one."""
        if not self._wiring.output_grads:
            return []
        batch, unit = divmod(index, self._units)
        division = self._batches.get(batch)[1]
        sums: dict[int, Tensor] = {}
        for channels in self._wiring.output_grads:
            for number, gradient in zip(channels[0].numbers, division.take(channels, batch, unit), strict=True):
                sums[number] = sums[number] + gradient if number in sums else gradient
        for channel in self._replied:
            channel.wait_sent(index)
        return [sums[number] for number in self._grad_values]

    def _give_gradients(self, index: int, live: _MicroBatch) -> None:
        """Put gradients to producers. Messages must be contiguous; the gradient of a concatenated input is a slice."""
        if not self._wiring.input_grads:
            return
        division = self._batches.get(index // self._units)[1]
        for channel in self._wiring.input_grads:
            if not live.leaves[channel.numbers[0]].requires_grad:
                continue  # the other end has no backward of this micro-batch
            gradients = []
            for number in channel.numbers:
                leaf = live.leaves[number]
                gradients.append(torch.zeros_like(leaf) if leaf.grad is None else owned(leaf.grad))
            division.put(channel, index, gradients)


def _present(kept: Graph | RecordedMicroBatch | None) -> Graph | RecordedMicroBatch:
    """What an earlier action of the same micro-batch kept.

    Raises:
        JobError: there is none.
    """
    if kept is None:
        raise JobError("a backward came before its forward: the schedule was not checked")
    return kept
