"""The measured job in stages: every rank is a replica that runs all stages of a schedule with several stages per rank.

Each layer is a stage, and a batch has four micro-batches. Actions run in one thread, in an order of the program, so
times show the work and the exchanges without their overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.stage_shards import StageShards
from bagpipe.dense.parallel.stage_sums import StageSums
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stage.mesh import Mesh, held_stages
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.split.staged_model import StagedModel, StageModule, StageValue
from bagpipe.types.model_inputs import ModelInputs
from bagpipe.types.shard_level import ShardLevel

__all__ = ["MICRO", "Stages", "num_passes"]

MICRO = 4


class _Layer(nn.Module):
    """A stage: a layer whose result is a tuple; the last one gives a logit per example."""

    def __init__(self, layer: nn.Module, *, is_last: bool) -> None:
        super().__init__()
        self.layer = layer
        self._is_last = is_last

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """One value ``[examples, width]``, or ``[examples]``."""
        x = torch.relu(self.layer(x))
        return (x.sum(1) if self._is_last else x,)


class _Source(nn.Module):
    """The embedding stage: it passes the inputs on, and has no rows."""

    def forward(self, dense: Tensor, sparse: object) -> tuple[Tensor]:
        """Its inputs ``[examples, width]``."""
        return (dense,)


def _staged(layers: Sequence[nn.Module], width: int) -> StagedModel:
    stages = len(layers)
    modules = [_Layer(layer, is_last=number == stages - 1) for number, layer in enumerate(layers)]
    model = nn.Module()
    model.stages = nn.ModuleList(modules)
    values = [
        StageValue(
            name=f"value{number}",
            producer=(number - 1) % (stages + 1),
            consumers=(number,) if number < stages else (),
            shape=(width,) if number < stages else (),
            dtype=torch.float32,
            wants_grad=0 < number < stages,
        )
        for number in range(stages + 1)
    ]
    return StagedModel(
        model=model,
        embedding=_Source(),
        stages=tuple(
            StageModule(
                name=f"stage{number}",
                module=module,
                inputs=(number,),
                outputs=(number + 1,),
                heads=((0, stages),) if number == stages - 1 else (),
            )
            for number, module in enumerate(modules)
        ),
        values=tuple(values),
    )


def num_passes(schedule: str, level: ShardLevel, num_stages: int) -> float:
    """Times that all elements of the parameters travel in a step: gathers, and one reduction."""
    if level != "parameters":
        return 2.0
    step = _step(schedule, num_stages, 2, level)
    return 1 + sum(stage.gathers for stage in step.program.stages[:num_stages]) / num_stages


def _step(schedule: str, num_stages: int, replicas: int, level: ShardLevel) -> StepProgram:
    graph = _staged([nn.Identity()] * num_stages, 1).graph(MICRO)
    return step_program(
        graph,
        [(0, False), (num_stages - 1, False)],
        schedule,
        chunks=num_stages,
        replicas=replicas,
        shards=level in ("optimizer", "gradients"),
        gathers=level == "parameters",
    )


class Stages:
    """A replica.

    Args:
        layers: one per stage, equal on all ranks.
        width: inputs and outputs of each.
        level: what is divided.
        schedule: with any number of stages per rank.
        peers: the replicas.

    Attributes:
        parameters: of the model.
        num_sent_bytes: of gradients and parameters, so far; of level none by its formula.
        most_whole_bytes: most bytes of parameters at once, shares included.
    """

    def __init__(
        self, layers: Sequence[nn.Module], width: int, level: ShardLevel, schedule: str, peers: TorchPeers
    ) -> None:
        staged = _staged(layers, width)
        self._step = _step(schedule, len(layers), peers.world_size, level)
        mesh = Mesh(step=self._step, world_size=peers.world_size)
        held = held_stages(staged, mesh)
        groups = peers.open_stage_groups([stage.holders for stage in held])
        self._shares = {} if level == "none" else StageShards(staged.model, held, groups, rank=peers.rank, level=level)
        self._pipeline = DensePipeline(
            staged=staged,
            mesh=mesh,
            rank=peers.rank,
            make_optimizer=torch.optim.Adam,
            dtype=torch.float32,
            device=torch.device("cpu"),
            seed=0,
            reduce=StageSums(held, groups, rank=peers.rank).reduce if level == "none" else None,
            shares=self._shares,
        )
        self._inputs: ModelInputs
        self._num_examples = 0
        self._num_ranks = peers.world_size
        self._runtime = self._pipeline.runtime(
            lambda b: self._pipeline.batch(self._inputs, self._num_examples), lambda head, logits, labels: logits.sum()
        )
        self._pipeline.parameters.begin(self._runtime)
        graph = Graph(self._step.program)
        order = [atom for node in graph.order() for atom in graph.actions[node].atoms]
        # Steps last, and behind them what nothing of the batch waits for: the gathers of new parameters.
        last = {"OPT": 1, "UNSHARD": 0 if level == "parameters" else 2}
        self._order = sorted(order, key=lambda atom: last.get(atom.op, 0))
        self._handlers = self._make_handlers()
        self.parameters = [*staged.model.parameters()]
        self._look: Callable[[], None] = lambda: None
        self._undivided_bytes = 0
        self.most_whole_bytes = 0
        self._num_steps = 0

    @property
    def own(self) -> list[nn.Parameter]:
        """What the optimizers step."""
        return [parameter for weights in self._pipeline.weights.values() for parameter in weights.stepped]

    @property
    def states(self) -> list[Tensor]:
        """The optimizers' state."""
        return [
            value
            for optimizer in self._pipeline.optimizers.values()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.ndim
        ]

    @property
    def num_sent_bytes(self) -> int:
        """Bytes sent so far."""
        return self._undivided_bytes + sum(share.num_sent_bytes for share in self._shares.values())

    def step(self, inputs: Tensor, look: Callable[[], None]) -> None:
        """One batch; `look` is called before the steps, when all gradients are summed."""
        self._inputs = ModelInputs(dense=inputs, sparse=inputs[:, :0], labels=inputs[:, 0])
        self._num_examples = len(inputs) * self._num_ranks
        self._look = look
        units = self._step.program.units_per_batch
        for atom in self._order:
            index = (atom.index or 0) + self._num_steps * units((atom.stage, atom.op), atom.peer)
            self._handlers[f"{atom.stage}{atom.op}"](index)
        self._num_steps += 1
        if not self._shares:
            whole = sum(parameter.nbytes for parameter in self.parameters)
            self._undivided_bytes += 2 * whole * (self._num_ranks - 1) // self._num_ranks

    def _make_handlers(self) -> dict[str, Handler]:
        number = self._step.embedding_stages[0].number
        found: dict[str, Handler] = {
            **self._runtime.handlers(),
            f"{number}X_EMBED": partial(self._runtime.embed, number),
            f"{number}X_EMBED_GRAD": partial(self._runtime.embed_grad, number),
        }
        ops: dict[str, Callable[[int, int], None]] = {
            "OPT": self._optimize,
            "REDUCE_GRAD": self._pipeline.reduce,
            "UNSHARD": self._unshard,
            "RESHARD": lambda stage, index: self._pipeline.weights[stage].reshard(),
        }
        atoms: Iterable[Action] = (atom for atom in self._step.program.atoms() if atom.op in ops)
        for atom in atoms:
            found[f"{atom.stage}{atom.op}"] = partial(ops[atom.op], atom.stage)
        return found

    def _optimize(self, stage: int, b: int) -> None:
        if stage == self._pipeline.stages[0]:
            self._look()
        self._pipeline.weights[stage].step(b)

    def _unshard(self, stage: int, index: int) -> None:
        self._pipeline.weights[stage].unshard(index)
        here = [p.untyped_storage() for p in (*self.parameters, *self.own)]
        whole = sum({storage._cdata: storage.nbytes() for storage in here}.values())
        self.most_whole_bytes = max(self.most_whole_bytes, whole)
