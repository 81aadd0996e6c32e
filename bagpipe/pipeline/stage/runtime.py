"""`StageRuntime`: the dense stages of one process, as handlers of a program's actions.

    StepProgram ──> stage instances and embedding stage of this process, a Channel per edge with an end here
    X_EMBED, X_EMBED_GRAD ─> EmbeddingStageRunner    F B I W REC ─> StageRunner    SEND RECV ─> Channel

The same handlers serve lanes in threads of one process or several, and one thread that runs all actions in a
topological order (`interpret`). Results are bit-identical.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bagpipe.dense.parallel.saved_places import SavedPlaces
from bagpipe.distributed.interface import StageLinks
from bagpipe.errors import JobError
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.stage.activations import LaneActivations
from bagpipe.pipeline.stage.batches import Batches, StageBatch
from bagpipe.pipeline.stage.channel import Channel, Link, Wiring
from bagpipe.pipeline.stage.embedding_stage import EmbeddingStageRunner
from bagpipe.pipeline.stage.instance import LossSum, StageRunner
from bagpipe.pipeline.stage.partial_backward import PartialBackward
from bagpipe.pipeline.stage.recorded_stage import GraphCapture
from bagpipe.pipeline.stage.stage_versions import StageVersions
from bagpipe.pipeline.stream import keep_for_current_stream
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import partner
from bagpipe.schedule.ir.loop import Template
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.step_program import StageInstance, StepProgram
from bagpipe.split.staged_model import StagedModel, StageValue

__all__ = ["StageBatch", "StageRuntime"]

_STAGE_ACTIONS: Mapping[str, Callable[[StageRunner], Handler]] = {
    "F": lambda instance: instance.forward,
    "B": lambda instance: instance.backward,
    "I": lambda instance: instance.backward_inputs,
    "W": lambda instance: instance.backward_weights,
    "REC": lambda instance: instance.recompute,
}


class StageRuntime:
    """Runs the stage instances and embedding stages of one process. One thread calls the handlers of a lane.

    Args:
        staged: the model. Its parameters can be modified in place between batches, but not replaced.
        step: the program of a batch.
        process: position of this process in its replica.
        links: links to the other processes; None for a single process.
        batch: returns a batch by number. All lanes call it until the batch's actions are done.
        loss: loss of a head's logits and labels of one micro-batch.
        dtype, label_shape: of the labels; the shape excludes the example dimension.
        device: device of all tensors.
        seed, earlier: of the stages' random numbers, and the batches of earlier jobs that these count too.
        loss_sums: initial, by instance.
        loss_scale: of the batch under way: multiplies every gradient.
        can_leave_out: batches can be left out (`StageRunner.settle`).
        versions, places: stage -> its weights in an asynchronous schedule; places of whole parameters that come and go.
        activations: compute lane -> what moves its activations to the host; empty: they stay on the device.
        partial_backward: which backwards are left out; None: none.
        capture: how stages are recorded; None: they run operator by operator.

    Raises:
        JobError: there are several processes but no links.
    """

    def __init__(
        self,
        staged: StagedModel,
        step: StepProgram,
        *,
        process: int,
        links: StageLinks | None,
        batch: Callable[[int], StageBatch],
        loss: LossSum,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int,
        earlier: int = 0,
        loss_sums: Mapping[int, float] = MappingProxyType({}),
        label_shape: tuple[int, ...] = (),
        loss_scale: Callable[[], float] = lambda: 1.0,
        can_leave_out: bool = False,
        versions: Mapping[int, StageVersions] = MappingProxyType({}),
        activations: Mapping[str, LaneActivations] = MappingProxyType({}),
        places: Mapping[int, SavedPlaces] = MappingProxyType({}),
        partial_backward: PartialBackward | None = None,
        capture: GraphCapture | None = None,
    ) -> None:
        if links is None and step.num_processes > 1:
            raise JobError(f"{step.num_processes} processes run stages of a replica, but no links lead between them")
        self._staged = staged
        self._step = step
        self._process = process
        self._partial_backward = partial_backward
        self._activations = {
            atom.stage: activations[lane] for lane in activations for a in step.program.lanes[lane] for atom in a.atoms
        }
        self._device = torch.device(device)
        self._labels = len(staged.values)
        labels = StageValue(
            name="labels",
            producer=len(staged.stages),
            consumers=(),
            shape=label_shape,
            dtype=dtype,
            wants_grad=False,
        )
        self._values = (*staged.values, labels)
        self._micro = step.program.micro_per_batch
        self._instances = {instance.number: instance for instance in step.instances}
        self._channels = {(c.sender, c.receiver): c for c in self._make_channels(links)}
        self._batches = Batches(
            batch,
            num_pipes=step.num_pipes,
            units={
                number: (instance.pipe, self._micro[number], instance.part, instance.parts)
                for number, instance in self._instances.items()
            },
            channels=list(self._channels.values()),
        )
        recomputed = {(atom.stage, atom.index) for atom in step.program.atoms() if atom.op == "REC"}
        self._runners: dict[int, StageRunner] = {}
        self._parameters: dict[int, list[tuple[Parameter, ...]]] = {}
        for instance in step.instances:
            if instance.process == process:
                self._runners[instance.number] = StageRunner(
                    instance=instance,
                    stage=staged.stages[instance.stage],
                    module=self._module_of(instance),
                    wiring=self._wiring(instance.number),
                    units=self._micro[instance.number],
                    needs_grad={n: value.producer for n, value in enumerate(self._values) if value.wants_grad},
                    labels=self._labels,
                    recomputed=frozenset(
                        unit for unit in range(self._micro[instance.number]) if (instance.number, unit) in recomputed
                    ),
                    batches=self._batches,
                    loss=loss,
                    device=self._device,
                    seed=seed,
                    earlier=earlier,
                    loss_scale=loss_scale,
                    can_leave_out=can_leave_out,
                    versions=versions.get(instance.stage),
                    parameters=self._parameters[instance.stage][-1],
                    alternates=bool(step.turns),
                    activations=self._activations.get(instance.number),
                    places=places.get(instance.stage),
                    partial_backward=partial_backward,
                    capture=capture,
                )
                self._runners[instance.number].loss_sum += loss_sums.get(instance.number, 0.0)
        self._embedding_stages = {
            embedding.number: embedding for embedding in step.embedding_stages if embedding.process == process
        }
        self._embedding_runners = {number: self._embedding_runner(number) for number in self._embedding_stages}

    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of this process's F, B, I, W, REC, SEND and RECV actions, by the text of their templates."""
        found: dict[str, Handler] = {}
        for lane in (*self._step.lanes_of(self._process), *self._step.receiving_lanes_of(self._process)):
            for atom in (atom for action in self._step.program.lanes[lane] for atom in action.atoms):
                text = Template(op=atom.op, stage=atom.stage, peer=atom.peer).text
                if text in found:
                    continue
                if atom.op in _STAGE_ACTIONS:
                    found[text] = self._computing(atom)
                elif OPS[atom.op].role in ("send", "recv"):
                    found[text] = self._transfer(atom)
        return found

    def _computing(self, atom: Action) -> Handler:
        handler = _STAGE_ACTIONS[atom.op](self._runners[atom.stage])
        moved = self._activations.get(atom.stage)
        return handler if moved is None else moved.before(atom.op, atom.stage, handler)

    def embed(self, number: int, batch: int) -> None:
        """X_EMBED of an embedding stage: look up the batch's examples for the stages. Their rows must be current.

        Raises:
            JobError: the batch has another number of examples than the embedding stage's pipes.
        """
        self._embedding_runners[number].embed(batch)

    def embed_grad(self, number: int, batch: int) -> None:
        """X_EMBED_GRAD: the process's last action of a batch that moves tensors between processes.

        Computes the gradients of the rows. Then waits until all tensors that this process sent in the batch are sent.
        """
        self._embedding_runners[number].embed_grad(batch)
        for channel in self._channels.values():
            if channel.link is not None:
                channel.wait_all_sent((batch + 1) * channel.units)

    def parameters(self, stage: int) -> tuple[tuple[Parameter, ...], ...]:
        """Trainable parameters of a local stage, per pipe, in the order of `StagedModel.parameters_of`.

        The first pipe has the model's parameters. Other pipes share their values but have separate gradients.
        """
        return tuple(self._parameters[stage])

    def runner(self, number: int) -> StageRunner:
        """The runner of a stage instance of this process."""
        return self._runners[number]

    def sum_pipes(self, stage: int) -> None:
        """Add the gradients of a stage's other pipes to the model's gradients, in pipe order, and clear them."""
        own, *others = self._parameters[stage]
        for other in others:
            for parameter, twin in zip(own, other, strict=True):
                if twin.grad is not None:
                    # The tensor belongs to another lane, which does not wait for this one. It is cloned below, because
                    # the lane of the optimizer step must not use it either.
                    keep_for_current_stream(twin.grad)
                    parameter.grad = twin.grad.clone() if parameter.grad is None else parameter.grad.add_(twin.grad)
                    twin.grad = None

    def loss_sums(
        self, before: int | None = None, is_left_out: Callable[[int], bool] = lambda b: False
    ) -> Mapping[int, Tensor]:
        """Stage instance -> loss sum over the examples whose heads ran there; float64 on the device.

        Args:
            before: only of the batches before this one, the next one to end; None: of all forwards so far.
            is_left_out: whether a batch is, whose forwards are over and whose end is not.
        """
        if before is None:
            return {number: runner.loss_sum for number, runner in self._runners.items()}
        return {number: runner.loss_sum_before(before, is_left_out) for number, runner in self._runners.items()}

    def peak_live(self) -> Mapping[int, int]:
        """Stage instance -> peak number of micro-batches between F and B or W."""
        return {number: runner.peak_live for number, runner in self._runners.items()}

    def _make_channels(self, links: StageLinks | None) -> Iterator[Channel]:
        """Channels of all edges and directions with an end in this process, in order of their numbers."""
        processes = {instance.number: instance.process for instance in self._step.instances}
        processes |= {embedding.number: embedding.process for embedding in self._step.embedding_stages}
        embedding_stages = {embedding.number for embedding in self._step.embedding_stages}
        number = 0
        for (sender, receiver), (pipe, numbers) in sorted(self._edges().items()):
            ends = (processes[sender], processes[receiver])
            if self._process not in ends:
                continue
            link = None
            if ends[0] != ends[1]:
                assert links is not None, "checked above"
                link = Link(links, ends[ends[0] == self._process], sender * len(processes) + receiver)
            # Sent as one unit per batch, from which receivers copy their shares: local values, and labels (small).
            sender_part, receiver_part = self._part(sender), self._part(receiver)
            whole = sender in embedding_stages and (link is None or numbers == (self._labels,))
            yield Channel(
                number=number,
                sender=sender,
                receiver=receiver,
                pipe=pipe,
                numbers=numbers,
                values=tuple(self._values[n] for n in numbers),
                units=1 if whole else self._micro[sender],
                receiver_units=1 if receiver in embedding_stages else self._micro[receiver],
                copies=whole or (link is None and (sender_part[1], receiver_part[1]) != (1, 1)),
                link=link,
                device=self._device,
                sender_part=sender_part,
                receiver_part=receiver_part,
            )
            number += 1

    def _edges(self) -> dict[tuple[int, int], tuple[int, tuple[int, ...]]]:
        """(sender, receiver) -> pipe, and the numbers of the values (or of their gradients) on the edge."""
        found: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        num_stages = len(self._staged.stages)
        for instance in self._step.instances:
            stage = self._staged.stages[instance.stage]
            by_producer: dict[int, set[int]] = {}
            for value in (*stage.inputs, *((self._labels,) if stage.heads else ())):
                by_producer.setdefault(self._values[value].producer, set()).add(value)
            for producer, values in by_producer.items():
                if producer == num_stages:
                    senders = [self._step.embedding_stage_of(instance.pipe).number]
                else:
                    senders = [
                        other.number
                        for other in self._step.instances
                        if (other.pipe, other.stage) == (instance.pipe, producer)
                    ]
                graded = tuple(value for value in sorted(values) if self._values[value].wants_grad)
                for sender in senders:
                    found[sender, instance.number] = (instance.pipe, tuple(sorted(values)))
                    if graded:
                        found[instance.number, sender] = (instance.pipe, graded)
        return found

    def _part(self, number: int) -> tuple[int, int]:
        """The part of each micro-batch that an instance takes; an embedding stage has all."""
        instance = self._instances.get(number)
        return (0, 1) if instance is None else (instance.part, instance.parts)

    def _by_stage(self, channels: Iterable[Channel]) -> tuple[tuple[Channel, ...], ...]:
        """Channels into an instance, grouped by the stage that sends, in the order of their first senders."""
        found: dict[int, list[Channel]] = {}
        for channel in channels:
            instance = self._instances.get(channel.sender)
            found.setdefault(-1 if instance is None else instance.stage, []).append(channel)
        return tuple(map(tuple, found.values()))

    def _module_of(self, instance: StageInstance) -> nn.Module:
        """The stage's module. A second local instance gets a copy that shares parameter values and buffers."""
        module = self._staged.stages[instance.stage].module
        own = tuple(parameter for _, parameter in self._staged.parameters_of(instance.stage))
        known = self._parameters.setdefault(instance.stage, [])
        if not known:
            known.append(own)
            return module
        twins: dict[int, object] = {
            id(p): Parameter(p.detach(), requires_grad=p.requires_grad) for p in module.parameters()
        }
        known.append(tuple(twins[id(p)] for p in own))  # type: ignore[misc]
        return copy.deepcopy(module, {**twins, **{id(buffer): buffer for buffer in module.buffers()}})

    def _is_forward(self, sender: int, receiver: int) -> bool:
        """Whether the channel carries values, not gradients."""
        source, target = self._instances.get(sender), self._instances.get(receiver)
        if source is None or target is None:
            return source is None
        return (source.stage, target.stage) in self._staged.edges

    def _wiring(self, number: int) -> Wiring:
        into = [c for (_, receiver), c in sorted(self._channels.items()) if receiver == number]
        out = [c for (sender, _), c in sorted(self._channels.items()) if sender == number]
        return Wiring(
            inputs=self._by_stage(c for c in into if self._is_forward(c.sender, number)),
            outputs=tuple(c for c in out if self._is_forward(number, c.receiver)),
            output_grads=self._by_stage(c for c in into if not self._is_forward(c.sender, number)),
            input_grads=tuple(c for c in out if not self._is_forward(number, c.receiver)),
        )

    def _embedding_runner(self, number: int) -> EmbeddingStageRunner:
        embedding = self._embedding_stages[number]
        own = sorted(self._channels.items())
        return EmbeddingStageRunner(
            embedding=embedding,
            module=self._staged.embedding,
            numbers=self._staged.embedding_values,
            labels=self._labels,
            outputs={p: [c for (sender, _), c in own if sender == number and c.pipe == p] for p in embedding.pipes},
            output_grads={
                p: self._by_stage(c for (_, receiver), c in own if receiver == number and c.pipe == p)
                for p in embedding.pipes
            },
            batches=self._batches,
            stages=[instance.stage for instance in self._step.instances],
            partial_backward=self._partial_backward,
        )

    def _transfer(self, atom: Action) -> Handler:
        """Handler of SEND or RECV. A no-op on an edge without values or inside the process."""
        if OPS[atom.op].role == "send":
            ends = (atom.stage, partner(atom).stage)
        else:
            other = atom.peer if atom.peer is not None else atom.stage + (1 if atom.op == "RECV_B" else -1)
            ends = (other, atom.stage)
        channel = self._channels.get(ends)
        if channel is None or channel.link is None:
            return lambda index: None
        transfer = channel.send if OPS[atom.op].role == "send" else partial(self._receive, channel)
        units = self._micro[channel.sender] // channel.units
        return transfer if units == 1 else partial(_first, transfer, units)

    def _receive(self, channel: Channel, index: int) -> None:
        batch, unit = divmod(index, channel.units)
        cut = self._partial_backward
        if cut is not None and not self._is_forward(channel.sender, channel.receiver):
            # Sent for a stage that computes its backward; an embedding stage takes what there is.
            taker = self._instances.get(channel.receiver) or self._instances[channel.sender]
            if not cut.computes(taker.stage, channel.pipe, batch, unit):
                return
        flow = self._batches.get(batch)[1].flows[channel.number]
        if flow.counts[unit]:
            channel.receive(index, flow.counts[unit], flow.users[unit])
            if self._step.in_flight:
                channel.wait_received(index)


def _first(transfer: Handler, units: int, index: int) -> None:
    """Transfer the whole batch with its first micro-batch."""
    batch, unit = divmod(index, units)
    if not unit:
        transfer(batch)
