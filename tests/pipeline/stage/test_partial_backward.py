"""Partial backwards of small staged models: each stage's gradient is that of the mean loss of the units it computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from bagpipe.pipeline.interpret import interpret
from bagpipe.pipeline.stage.batches import bounds
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stage.mesh import Mesh
from bagpipe.pipeline.stage.partial_backward import PartialBackward
from bagpipe.pipeline.stage.runtime import StageRuntime
from bagpipe.schedule.ir.backward_shares import BackwardShares, backward_shares
from bagpipe.schedule.ir.stage_graph import StageGraph
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import DENSE_SCHEDULES
from bagpipe.split.staged_model import StagedModel
from tests.pipeline.stage.steps import batch_of, loss_sum
from tests.split.models import make

MICRO = 4
#: Model, schedule, examples; recomputed or not. Sizes leave micro-batches of different lengths, and empty ones.
CASES = [
    ("skips", "graph", 15, False),
    ("skips", "graph", 3, True),
    ("branches", "graph", 16, False),
    ("two-heads", "1f1b", 14, False),
    ("chain4", "1f1b", 16, True),
    ("chain4", "gpipe", 13, False),
    ("chain4", "zb-h1", 15, False),
    ("chain4", "interleaved", 15, False),
    ("chain4", "zb-v", 16, False),
    ("chain4", "chimera", 14, False),
]
ROWS = "embedding.rows.weight"


class Bench:
    """One process with a model, whose gradients stay where the stages left them."""

    def __init__(self, model: str, schedule: str, size: int, shares: tuple[float, ...], *, recompute: bool = False):
        self.staged = make(model)
        self.size = size
        graph = StageGraph(micro_per_batch=(MICRO,) * len(self.staged.stages), edges=self.staged.edges)
        self.step: StepProgram = step_program(
            graph, self.staged.embedding_edges, DENSE_SCHEDULES[schedule], recompute=recompute
        )
        self.rule = backward_shares(
            shares, graph.order, microbatches=MICRO // self.step.num_pipes, pipes=self.step.num_pipes, seed=3
        )
        self.pipeline = DensePipeline(
            staged=self.staged,
            mesh=Mesh(step=self.step, world_size=1),
            rank=0,
            make_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            dtype=torch.float64,
            device=torch.device("cpu"),
            seed=5,
            backward_shares=self.rule,
        )

    def gradients(self, batch: int) -> tuple[dict[str, Tensor | None], StageRuntime]:
        """By name, after a batch; the rows' too."""
        inputs = batch_of(1, self.size)
        runtime = self.pipeline.runtime(lambda b: self.pipeline.batch(inputs, self.size), loss_sum)
        self.staged.model.zero_grad()
        embedding = self.step.embedding_stages[0].number
        handlers: dict[str, Callable[[int], None]] = {
            f"{embedding}X_EMBED": lambda b: runtime.embed(embedding, batch),
            f"{embedding}X_EMBED_GRAD": lambda b: runtime.embed_grad(embedding, batch),
            "OPT": lambda b: None,
            "REDUCE_GRAD": lambda b: None,
        }
        for text, handler in runtime.handlers().items():
            units = self.step.program.micro_per_batch[int(text.rstrip("FBIWREC"))]
            handlers[text] = partial(_at, handler, batch * units)
        interpret(self.step.program, handlers)
        for stage in range(len(self.staged.stages)):
            runtime.sum_pipes(stage)
            self.pipeline.scale(stage, batch, self.size, self.pipeline.weights[stage].stepped)
        named = dict(self.staged.model.named_parameters())
        return {name: None if p.grad is None else p.grad.clone() for name, p in named.items()}, runtime


def _at(handler: Callable[[int], None], first: int, index: int) -> None:
    """Call the handler of an action of batch 0 for a later batch, whose first micro-batch is `first`."""
    handler(first + index)


def expected(staged: StagedModel, rule: BackwardShares, size: int, batch: int) -> dict[str, Tensor | None]:
    """By autograd: of every stage, the mean of its units' gradients. Rows: of what each stage takes, apart."""
    inputs = batch_of(1, size)
    found: dict[str, Tensor | None] = {name: None for name, _ in staged.model.named_parameters()}
    names = {id(p): name for name, p in staged.model.named_parameters()}
    total = dict.fromkeys(range(len(staged.stages)), 0)
    sums: dict[tuple[int, str], Tensor] = {}
    pipes = bounds(size, rule.pipes)
    for pipe in range(rule.pipes):
        cuts = bounds(pipes[pipe + 1] - pipes[pipe], rule.microbatches or 1)
        for micro in range(rule.microbatches or 1):
            part = slice(pipes[pipe] + cuts[micro], pipes[pipe] + cuts[micro + 1])
            computed = [s for s in total if rule.computes(s, batch, rule.unit(0, pipe, micro))]
            if part.start == part.stop:
                continue
            staged.model.zero_grad()
            pooled = staged.embedding(inputs.dense[part], inputs.sparse[part])
            values = dict(zip(staged.embedding_values, pooled, strict=True))
            taken: dict[int, list[tuple[Tensor, Tensor]]] = {}
            loss = torch.zeros((), dtype=torch.float64)
            for number in StageGraph(micro_per_batch=(1,) * len(total), edges=staged.edges).order:
                stage = staged.stages[number]
                arguments = []
                for value in stage.inputs:
                    argument = values[value]
                    if value in staged.embedding_values and argument.requires_grad:
                        leaf = argument.detach().requires_grad_()
                        taken.setdefault(number, []).append((argument, leaf))
                        argument = leaf
                    arguments.append(argument)
                values.update(zip(stage.outputs, stage.module(*arguments), strict=True))
                for head, value in stage.heads:
                    loss = loss + loss_sum(head, values[value], inputs.labels[part])
            loss.backward()
            for stage in computed:
                total[stage] += part.stop - part.start
                for name, parameter in staged.parameters_of(stage):
                    assert parameter.grad is not None
                    sums[stage, name] = sums.get((stage, name), torch.zeros_like(parameter)) + parameter.grad
            for stage in computed:
                rows = next(staged.embedding.parameters())
                rows.grad = None
                for value, leaf in taken.get(stage, ()):
                    torch.autograd.backward(value, leaf.grad, retain_graph=True)
                if rows.grad is not None:
                    key = stage, names[id(rows)]
                    sums[key] = sums.get(key, torch.zeros_like(rows)) + rows.grad
    for (stage, name), gradient in sums.items():
        mean = gradient / total[stage]
        before = found[name]
        found[name] = mean if before is None else before + mean
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_stage_has_the_mean_gradient_of_its_units(case: tuple[str, str, int, bool]) -> None:
    model, schedule, size, recompute = case
    bench = Bench(model, schedule, size, (0.3, 0.0, 1.0), recompute=recompute)
    for batch in range(3):
        ours, _ = bench.gradients(batch)
        reference = expected(bench.staged, bench.rule, size, batch)
        for name, gradient in reference.items():
            if gradient is None:
                assert ours[name] is None, name
            else:
                torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("shares", [(0.25, 0.5, 0.75, 1.0), (0.5, 1.0)])
def test_a_rotation_has_the_whole_gradient_on_average(shares: tuple[float, ...]) -> None:
    bench, whole = Bench("chain4", "1f1b", 16, shares), Bench("chain4", "1f1b", 16, (1.0,))
    found = [bench.gradients(batch)[0] for batch in range(len(shares))]
    plain, _ = whole.gradients(0)
    for name, gradient in plain.items():
        mean = sum(one for each in found if (one := each[name]) is not None) / len(shares)
        torch.testing.assert_close(mean, gradient, rtol=0, atol=1e-12, msg=name)


def test_a_forward_without_a_backward_keeps_nothing() -> None:
    _, whole = Bench("chain4", "gpipe", 16, (1.0,)).gradients(0)
    _, part = Bench("chain4", "gpipe", 16, (0.25, 0.5, 0.75, 1.0)).gradients(0)
    assert list(whole.peak_live().values()) == [4, 4, 4, 4]
    assert list(part.peak_live().values()) == [1, 2, 3, 4]


def test_factors_count_the_examples_of_all_replicas() -> None:
    """Eleven examples on two replicas of two micro-batches: 2, 3 and 3, 3."""
    staged = make("chain4")
    step = step_program(staged.graph(2), staged.embedding_edges, "1f1b", replicas=2)
    mesh = Mesh(step=step, world_size=2)
    rule = BackwardShares(depths=(2, 4), places=(0, 1, 1, 0), order=(0, 1, 2, 3), microbatches=2)
    ours = PartialBackward(rule, step, replica=1, num_replicas=2, examples=mesh.examples)
    assert [ours.factor(stage, 0, 11) for stage in (0, 3)] == [11 / 6, 1]
    assert [ours.factor(stage, 1, 11) for stage in (0, 3)] == [11 / 5, 1]
    assert [ours.computes(0, 0, 0, micro) for micro in (0, 1)] == [True, False], "of replica 1"
    assert ours.computes(4, 0, 0, 1), "an embedding stage takes what there is"
    whole = BackwardShares(depths=(2, 4), places=(0, 0), order=(0, 1, 2, 3))
    by_replica = PartialBackward(whole, step, replica=0, num_replicas=2, examples=mesh.examples)
    assert by_replica.factor(0, 0, 11) is None
    assert [by_replica.gives(stage, 0, 1, (0,)) for stage in range(4)] == [False, False, True, True]
