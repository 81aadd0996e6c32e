"""`StageRuntime`: the dense stages of one process, as handlers of a program's actions.

    StepProgram ──> stage instances and embedding stage of this process, a Channel per edge that begins or ends here
    X_EMBED, X_EMBED_GRAD ─> EmbeddingStageRunner    F B I W REC ─> StageRunner    SEND RECV ─> Channel

The same handlers serve lanes in threads of one process (the runner), lanes in processes, and one thread that takes all
actions in any order their dependencies allow (`interpret`): results are the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from bagpipe.distributed.interface import StageLinks
from bagpipe.errors import JobError
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.stage.batches import Batches, StageBatch
from bagpipe.pipeline.stage.channel import Channel, Link
from bagpipe.pipeline.stage.embedding_stage import EmbeddingStageRunner
from bagpipe.pipeline.stage.instance import LossSum, StageRunner, Wiring
from bagpipe.pipeline.stream import keep_for_current_stream
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import partner
from bagpipe.schedule.ir.loop import Template
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.step_program import StageInstance, StepProgram
from bagpipe.split.staged_model import StagedModel, StageValue

__all__ = ["StageBatch", "StageRuntime"]

_SEAT_ACTIONS: Mapping[str, Callable[[StageRunner], Handler]] = {
    "F": lambda instance: instance.forward,
    "B": lambda instance: instance.backward,
    "I": lambda instance: instance.backward_inputs,
    "W": lambda instance: instance.backward_weights,
    "REC": lambda instance: instance.recompute,
}


class StageRuntime:
    """Runs the stage instances and embedding stages of one process. Each lane's handlers are called by one thread.

    Args:
        staged: the model. Its parameters may be changed in place between batches, not exchanged for others.
        step: the program of a batch.
        process: position of this process in its replica.
        links: to the other processes; None if there is only one.
        batch: number -> the batch; asked by all lanes until the batch's actions are over.
        loss: of a head's logits and labels, both of one micro-batch.
        dtype, label_shape: of the labels; the shape without the examples' dimension.
        device: of all tensors.
        seed: of the stages' random numbers.
        loss_sums: by instance, what to go on counting from.
        loss_scale: what every gradient is multiplied by.

    Raises:
        JobError: several processes and no links between them.
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
        loss_sums: Mapping[int, float] = MappingProxyType({}),
        label_shape: tuple[int, ...] = (),
        loss_scale: float = 1.0,
    ) -> None:
        if links is None and step.num_processes > 1:
            raise JobError(f"{step.num_processes} processes run stages of a replica, but no links lead between them")
        self._staged = staged
        self._step = step
        self._process = process
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
            units={number: (instance.pipe, self._micro[number]) for number, instance in self._instances.items()},
            channels=list(self._channels.values()),
        )
        recomputed = {atom.stage for atom in step.program.atoms() if atom.op == "REC"}
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
                    wanting=frozenset(n for n, value in enumerate(self._values) if value.wants_grad),
                    labels=self._labels,
                    keeps_inputs_only=instance.number in recomputed,
                    batches=self._batches,
                    loss=loss,
                    device=self._device,
                    seed=seed,
                    loss_scale=loss_scale,
                )
                self._runners[instance.number].loss_sum += loss_sums.get(instance.number, 0.0)
        self._embedding_stages = {
            embedding.number: embedding for embedding in step.embedding_stages if embedding.process == process
        }
        self._embedding_runners = {number: self._embedding_runner(number) for number in self._embedding_stages}

    def handlers(self) -> Mapping[str, Handler]:
        """Handlers of this process's F, B, I, W, REC, SEND and RECV actions, by the text of their templates."""
        found: dict[str, Handler] = {}
        for lane in self._step.lanes_of(self._process):
            for atom in (atom for action in self._step.program.lanes[lane] for atom in action.atoms):
                text = Template(op=atom.op, stage=atom.stage, peer=atom.peer).text
                if text in found:
                    continue
                if atom.op in _SEAT_ACTIONS:
                    found[text] = _SEAT_ACTIONS[atom.op](self._runners[atom.stage])
                elif OPS[atom.op].role in ("send", "recv"):
                    found[text] = self._transfer(atom)
        return found

    def pool(self, number: int, batch: int) -> None:
        """X_EMBED of an embedding stage: look up the batch's examples, whose rows are current, for the stages.

        Raises:
            JobError: the batch has not the examples of the embedding stage's pipes.
        """
        self._embedding_runners[number].pool(batch)

    def unpool(self, number: int, batch: int) -> None:
        """X_EMBED_GRAD: the process's last action of a batch that moves tensors between processes.

        The rows get their gradients. Then waits until everything that this process sent in the batch has left.
        """
        self._embedding_runners[number].unpool(batch)
        for channel in self._channels.values():
            if channel.link is not None:
                channel.settle_all()

    def parameters(self, stage: int) -> tuple[tuple[Parameter, ...], ...]:
        """Of a stage that runs here, per pipe its trainable parameters, in the order of `StagedModel.parameters_of`.

        The first pipe's are the model's own. Those of others share their values, but have gradients of their own.
        """
        return tuple(self._parameters[stage])

    def sum_pipes(self, stage: int) -> None:
        """Add the gradients of a stage's further pipes to the model's, in the order of the pipes, and drop them."""
        own, *others = self._parameters[stage]
        for other in others:
            for parameter, twin in zip(own, other, strict=True):
                if twin.grad is not None:
                    # Of another lane, which does not wait for this one. And not given to the lane that makes the step.
                    keep_for_current_stream(twin.grad)
                    parameter.grad = twin.grad.clone() if parameter.grad is None else parameter.grad.add_(twin.grad)
                    twin.grad = None

    def loss_sums(self) -> Mapping[int, Tensor]:
        """Stage instance -> float64, on the device: sum of the losses of all examples whose heads ran there."""
        return {number: runner.loss_sum for number, runner in self._runners.items()}

    def loss_sum(self) -> Tensor:
        """float64, on the device: sum of the losses of all examples whose heads ran here, in instance order."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for runner in self._runners.values():
            total += runner.loss_sum
        return total

    def peak_live(self) -> Mapping[int, int]:
        """Stage instance -> most micro-batches that were between their F and their B, or W, at a time."""
        return {number: runner.peak_live for number, runner in self._runners.items()}

    def _make_channels(self, links: StageLinks | None) -> Iterator[Channel]:
        """One per edge and direction with an end in this process, numbered as they come."""
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
            # A batch as a whole, of which takers copy their shares: values that stay here, and labels, which are small.
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
                copies=whole,
                link=link,
                device=self._device,
            )
            number += 1

    def _edges(self) -> dict[tuple[int, int], tuple[int, tuple[int, ...]]]:
        """(sender, receiver) -> pipe and the values, or those whose gradients, pass."""
        found: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        num_stages = len(self._staged.stages)
        for instance in self._step.instances:
            stage = self._staged.stages[instance.stage]
            by_producer: dict[int, set[int]] = {}
            for value in (*stage.inputs, *((self._labels,) if stage.heads else ())):
                by_producer.setdefault(self._values[value].producer, set()).add(value)
            for producer, values in by_producer.items():
                if producer == num_stages:
                    sender = self._step.embedding_stage_of(instance.pipe).number
                else:
                    sender = instance.pipe * num_stages + producer
                found[sender, instance.number] = (instance.pipe, tuple(sorted(values)))
                graded = tuple(value for value in sorted(values) if self._values[value].wants_grad)
                if graded:
                    found[instance.number, sender] = (instance.pipe, graded)
        return found

    def _module_of(self, instance: StageInstance) -> nn.Module:
        """The stage's module; for its second instance here a copy that shares parameter values and buffers."""
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
        """Whether the channel carries values; otherwise gradients."""
        place = self._instances.get(sender)
        taker = self._instances.get(receiver)
        if place is None or taker is None:
            return place is None
        return (place.stage, taker.stage) in self._staged.edges

    def _wiring(self, number: int) -> Wiring:
        into = [c for (_, receiver), c in sorted(self._channels.items()) if receiver == number]
        out = [c for (sender, _), c in sorted(self._channels.items()) if sender == number]
        return Wiring(
            inputs=tuple(c for c in into if self._is_forward(c.sender, number)),
            outputs=tuple(c for c in out if self._is_forward(number, c.receiver)),
            taken=tuple(c for c in into if not self._is_forward(c.sender, number)),
            given=tuple(c for c in out if not self._is_forward(number, c.receiver)),
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
            taken={p: [c for (_, receiver), c in own if receiver == number and c.pipe == p] for p in embedding.pipes},
            batches=self._batches,
        )

    def _transfer(self, atom: Action) -> Handler:
        """SEND or RECV; does nothing on an edge without values, or inside the process."""
        if OPS[atom.op].role == "send":
            ends = (atom.stage, partner(atom).stage)
        else:
            other = atom.peer if atom.peer is not None else atom.stage + (1 if atom.op == "RECV_B" else -1)
            ends = (other, atom.stage)
        channel = self._channels.get(ends)
        if channel is None or channel.link is None:
            return _nothing
        transfer = channel.send if OPS[atom.op].role == "send" else partial(self._receive, channel)
        units = self._micro[channel.sender] // channel.units
        return transfer if units == 1 else partial(_first, transfer, units)

    def _receive(self, channel: Channel, index: int) -> None:
        batch, unit = divmod(index, channel.units)
        flow = self._batches.get(batch)[1].flows[channel.number]
        num_examples = flow.starts[unit + 1] - flow.starts[unit]
        if num_examples:
            channel.receive(index, num_examples, flow.users[unit])


def _first(transfer: Handler, units: int, index: int) -> None:
    """With the first of a batch's micro-batches, all of them."""
    batch, unit = divmod(index, units)
    if not unit:
        transfer(batch)


def _nothing(index: int) -> None:
    """For an action that moves no tensor."""
