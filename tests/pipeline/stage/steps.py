"""Training of small staged models: on one device, and by runtimes in one process, in threads, or in processes.

    reference(case)   the whole model on each batch           run_in_process(case)      all lanes in this process
    run_ranks_of(peers, cases)   one rank's part of each case; `merge` combines the ranks' parts

Every batch ends with a plain gradient step, so a wrong gradient changes everything after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.stage_sums import StageSums
from bagpipe.distributed.interface import Peers
from bagpipe.pipeline.interpret import interpret
from bagpipe.pipeline.runner import EndOfBatches, Runner
from bagpipe.pipeline.stage.activations import LaneActivations
from bagpipe.pipeline.stage.batches import bounds
from bagpipe.pipeline.stage.runtime import StageBatch, StageRuntime
from bagpipe.pipeline.stream import NullStreams
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, Resource
from bagpipe.schedule.ir.stage_graph import StageGraph
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.stage_lanes import lane_templates, stage_lanes
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import DENSE_SCHEDULES
from bagpipe.split.staged_model import StagedModel
from bagpipe.types.model_inputs import ModelInputs
from tests.split.models import NUM_DENSE, NUM_IDS, make

__all__ = ["Case", "Result", "Worker", "batch_of", "loss_sum", "merge", "reference", "run_in_process", "run_ranks_of"]

LR = 0.1
ROWS = "embedding.rows.weight"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model, schedule and batches of a training run.

    Attributes:
        model: a name of `tests.split.models.MODELS`.
        schedule: a dense schedule.
        micro: micro-batches of all stages, or of each.
        sizes: examples of each batch.
        recompute: forwards keep only inputs; or this share of the micro-batches of each stage.
        settings: values of the schedule's own settings, by name.
        replicas: ranks of each stage; empty: one each.
        activations: to the host between F and B, or only counted.
    """

    model: str
    schedule: str
    micro: int | tuple[int, ...] = 4
    sizes: tuple[int, ...] = (16, 13)
    recompute: bool | tuple[float, ...] = False
    settings: tuple[tuple[str, object], ...] = ()
    replicas: tuple[int, ...] = ()
    activations: Literal["", "host", "counted"] = ""

    @property
    def num_ranks(self) -> int:
        return sum(self.replicas) or DENSE_SCHEDULES[self.schedule].num_ranks(len(make(self.model).stages))

    def step(self, num_processes: int = 1, replicas: int = 1) -> StepProgram:
        staged = make(self.model)
        edges = staged.edges
        micro = self.micro if isinstance(self.micro, tuple) else (self.micro,) * len(staged.stages)
        return step_program(
            StageGraph(micro_per_batch=micro, edges=edges),
            staged.embedding_edges,
            DENSE_SCHEDULES[self.schedule].configured(dict(self.settings)),
            num_processes=num_processes,
            replicas=replicas,
            stage_replicas=self.replicas,
            recompute=dict(enumerate(self.recompute)) if isinstance(self.recompute, tuple) else self.recompute,
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """Final values: name -> parameter, rows included; gradients of the last batch; the sum of all losses."""

    parameters: Mapping[str, NDArray[np.float64]]
    gradients: Mapping[str, NDArray[np.float64] | None]
    loss_sum: float
    peak_live: Mapping[int, int]
    peak_bytes: Mapping[str, int] = field(default_factory=dict)

    def assert_close(self, other: Result) -> None:
        """Assert equality within 1e-12. A missing gradient equals zero."""
        assert abs(self.loss_sum - other.loss_sum) < 1e-12 * max(1, abs(other.loss_sum))
        for name, values in self.parameters.items():
            np.testing.assert_allclose(values, other.parameters[name], rtol=0, atol=1e-12, err_msg=name)
        for name, gradient in self.gradients.items():
            own, others = (0 if g is None else g for g in (gradient, other.gradients[name]))
            np.testing.assert_allclose(own, others, rtol=0, atol=1e-12, err_msg=name)

    def assert_same(self, other: Result) -> None:
        """Assert bitwise equality."""
        assert self.loss_sum == other.loss_sum
        for name, values in self.parameters.items():
            assert np.array_equal(values, other.parameters[name]), name
        for name, gradient in self.gradients.items():
            expected = other.gradients[name]
            assert (gradient is None) == (expected is None), name
            assert gradient is None or (expected is not None and np.array_equal(gradient, expected)), name


def batch_of(number: int, size: int) -> ModelInputs:
    generator = torch.Generator().manual_seed(number)
    return ModelInputs(
        dense=torch.randn(size, NUM_DENSE, generator=generator, dtype=torch.float64),
        sparse=torch.randint(NUM_IDS, (size, 3), generator=generator),
        labels=torch.randint(2, (size,), generator=generator).double(),
    )


def loss_sum(head: int, logits: Tensor, labels: Tensor) -> Tensor:
    """Heads have different weights, so that a swap shows."""
    return binary_cross_entropy_with_logits(logits, labels, reduction="sum") * (1 + head / 2)


def reference(case: Case) -> Result:
    """Train on one device without micro-batches."""
    staged, total = make(case.model), 0.0
    parameters = list(staged.model.parameters())
    for number, size in enumerate(case.sizes):
        inputs = batch_of(number, size)
        staged.model.zero_grad()
        logits = staged.model(inputs.dense, inputs.sparse)
        loss = torch.stack([loss_sum(head, one, inputs.labels) for head, one in enumerate(logits)]).sum()
        total += float(loss.detach())
        if size:
            (loss / size).backward()
        _descend(parameters)
    return _result(staged, total, {})


def _descend(parameters: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= LR * parameter.grad


def _result(staged: StagedModel, total: float, peak_live: Mapping[int, int]) -> Result:
    named = dict(staged.model.named_parameters())
    return Result(
        parameters={name: p.detach().numpy().copy() for name, p in named.items()},
        gradients={name: None if p.grad is None else p.grad.numpy().copy() for name, p in named.items()},
        loss_sum=total,
        peak_live=peak_live,
    )


class Worker:
    """One process: its runtime, and handlers of all actions in its lanes.

    Args:
        case: the run.
        step: its step program.
        peers: the ranks, several per replica; None: one process.
        num_replicas: replicas of the pipeline.
    """

    def __init__(self, case: Case, step: StepProgram, peers: Peers | None = None, num_replicas: int = 1) -> None:
        self.staged = make(case.model)
        self._case = case
        self._step = step
        self._peers = peers
        self._num_replicas = num_replicas
        self._replica, self.process = divmod(0 if peers is None else peers.rank, step.num_processes)
        self._embedding_stage = step.embedding_stages[self.process]
        self._sums: StageSums | None = None
        links = None
        if peers is not None:
            links = peers.open_links(step.num_processes)
            stages = [
                HeldStage(holders=self._holders(stage), parameters=tuple(self.staged.parameters_of(stage)))
                for stage in range(step.graph.num_stages)
            ]
            groups = peers.open_stage_groups([stage.holders for stage in stages])
            self._sums = StageSums(stages, groups, rank=peers.rank)
        self.activations = {
            lane: LaneActivations(
                lane,
                lane_templates(step, lane),
                step.program.micro_per_batch,
                streams=NullStreams(),
                moves=case.activations == "host",
            )
            for lane in step.lanes_of(self.process)
            if case.activations
        }
        self.runtime = StageRuntime(
            self.staged,
            step,
            process=self.process,
            links=links,
            batch=self._batch,
            loss=loss_sum,
            dtype=torch.float64,
            device="cpu",
            seed=5,
            activations=self.activations,
        )

    def _holders(self, stage: int) -> tuple[int, ...]:
        own = [instance.process for instance in self._step.instances if instance.stage == stage]
        count = self._step.num_processes
        return tuple(dict.fromkeys(replica * count + p for replica in range(self._num_replicas) for p in own))

    def _batch(self, number: int) -> StageBatch:
        size = self._case.sizes[number]
        replicas = bounds(size, self._num_replicas)
        first, end = replicas[self._replica : self._replica + 2]
        pipes, inputs = bounds(end - first, self._step.num_pipes), None
        if self._embedding_stage.pipes:
            share = slice(
                first + pipes[self._embedding_stage.pipes[0]], first + pipes[self._embedding_stage.pipes[-1] + 1]
            )
            whole = batch_of(number, size)
            inputs = ModelInputs(dense=whole.dense[share], sparse=whole.sparse[share], labels=whole.labels[share])
        return StageBatch(inputs=inputs, num_examples=end - first, num_global_examples=size, first_example=first)

    def handlers(self) -> dict[str, Callable[[int], None]]:
        number = self._embedding_stage.number
        found = {**self.runtime.handlers(), f"{number}X_EMBED": self._pool, f"{number}X_EMBED_GRAD": self._unpool}
        for template in (t for templates in self._templates().values() for t in templates):
            own = [each.stage for each in self._step.instances if each.number == template.stage]
            stage = own[0] if own else 0
            if template.op == "REDUCE_GRAD":
                found[template.text] = partial(self._reduce, stage)
            elif template.op == "OPT":
                found[template.text] = partial(self._optimize, stage)
        return found

    def _pool(self, batch: int) -> None:
        self.staged.embedding.zero_grad()
        self.runtime.embed(self._embedding_stage.number, batch)

    def _unpool(self, batch: int) -> None:
        self.runtime.embed_grad(self._embedding_stage.number, batch)
        rows = next(self.staged.embedding.parameters())
        graded = any(self.staged.values[n].wants_grad for n in self.staged.embedding_values)
        if graded and self._peers is not None:  # every rank's part to every rank, summed in rank order
            own = torch.zeros_like(rows) if rows.grad is None else rows.grad
            count, each = self._peers.world_size, len(own)
            parts = own.new_empty(count * each, own.shape[1])
            self._peers.exchange("push", parts, own.repeat(count, 1), [each] * count, [each] * count)
            first, *others = parts.split(each)
            rows.grad = sum(others, first)
        _descend([rows])

    def _reduce(self, stage: int, batch: int) -> None:
        self.runtime.sum_pipes(stage)
        if self._sums is not None:
            self._sums.reduce(stage)

    def _optimize(self, stage: int, batch: int) -> None:
        own = self.runtime.parameters(stage)[0]
        _descend(own)
        if batch + 1 < len(self._case.sizes):
            for parameter in own:
                parameter.grad = None

    def _templates(self) -> dict[str, tuple[Template, ...]]:
        """Templates of the own lanes for one batch."""
        lanes = (*self._step.lanes_of(self.process), f"reduce{self.process}")
        if self._step.in_flight:
            return dict(stage_lanes(self._step, self.process).lanes)
        return {
            lane: tuple(
                Template(op=atom.op, stage=atom.stage, unit=atom.index or 0, peer=atom.peer)
                for action in actions
                for atom in action.atoms
            )
            for lane, actions in self._step.program.lanes.items()
            if lane in lanes
        }

    def loop(self) -> Loop:
        """A loop of the own lanes and a reading lane."""
        lanes, read = self._templates(), (self._embedding_stage.number, "X_READ")
        ops = {(t.stage, op) for ts in lanes.values() for t in ts for op in (t.op, *OPS[t.op].provides)}
        edges = [e for e in self._step.program.edges if e.src_key in ops and e.dst_key in ops]
        edges.append(Edge(src="X_READ", src_stage=read[0], dst="X_EMBED", dst_stage=read[0]))
        edges += [
            Edge(src=ts[-1].op, src_stage=ts[-1].stage, dst="X_READ", dst_stage=read[0], delay=2, kind="capacity")
            for ts in lanes.values()
        ]
        return Loop(
            lanes={"data": (Template(op="X_READ", stage=read[0]),), **lanes},
            source=read,
            sink=(read[0], "X_EMBED_GRAD"),
            edges=tuple(edges),
            stages=self._step.program.stages,
            resources=tuple(Resource(name=lane) for lane in ("data", *lanes)),
            in_flight={lane: most for lane, most in self._step.in_flight.items() if lane in lanes},
        )

    def run(self) -> Result:
        """Run all batches with a runner, one thread per lane."""

        def read(batch: int) -> None:
            if batch >= len(self._case.sizes):
                raise EndOfBatches

        with ExitStack() as stack:
            for activations in self.activations.values():
                activations.lane.open()
                stack.callback(activations.lane.close)
            Runner(self.loop(), {**self.handlers(), "X_READ": read}, grace_s=10).run()
        return self._ended()

    def interpret(self) -> Result:
        """Run one batch, every action in this thread."""
        interpret(self._step.program, self.handlers())
        return self._ended()

    def _ended(self) -> Result:
        found = _result(self.staged, float(sum(self.runtime.loss_sums().values())), self.runtime.peak_live())
        return replace(found, peak_bytes={lane: own.peak_bytes for lane, own in self.activations.items()})


def run_in_process(case: Case) -> Result:
    return Worker(case, case.step()).run()


def run_ranks_of(peers: Peers, cases: Sequence[Case], num_processes: int) -> list[Result]:
    """This rank's part of every case. Replicas are groups of so many consecutive ranks."""
    replicas = peers.world_size // num_processes
    return [Worker(case, case.step(num_processes, replicas), peers, replicas).run() for case in cases]


def merge(case: Case, parts: Sequence[Result], num_processes: int) -> Result:
    """Combine the ranks' parts: every parameter from the first rank that has it, and the losses of all replicas."""
    step, staged = case.step(num_processes), make(case.model)
    owner = {
        name: next(instance.process for instance in step.instances if instance.stage == stage)
        for stage in range(step.graph.num_stages)
        for name, _ in staged.parameters_of(stage)
    }
    owner[ROWS] = 0
    return Result(
        parameters={name: parts[rank].parameters[name] for name, rank in owner.items()},
        gradients={name: parts[rank].gradients[name] for name, rank in owner.items()},
        loss_sum=sum(part.loss_sum for part in parts),
        peak_live={instance: peak for part in parts[:num_processes] for instance, peak in part.peak_live.items()},
    )
