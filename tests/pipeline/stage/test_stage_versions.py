"""Stages of asynchronous schedules keep exactly the weights of the table: equal to the serial reference in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from bagpipe.errors import InputError
from bagpipe.pipeline.interpret import interpret
from bagpipe.pipeline.stage.batches import StageBatch, bounds
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.stage.mesh import Mesh
from bagpipe.pipeline.stage.serial_versions import SerialStage, SerialVersions
from bagpipe.pipeline.stage.stage_versions import StageVersions
from bagpipe.schedule.analysis.versions import kept_weights
from bagpipe.schedule.builders.asynchronous import drained
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.ir.version_lags import VersionLags
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES
from tests.effort import some_of
from tests.pipeline.stage.steps import batch_of, loss_sum
from tests.split.models import make

BATCHES = 30
LR = 0.1
OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(  # the groups are in another order than the parameters
        [{"params": p[1:]}, {"params": p[:1], "weight_decay": 0.0}], lr=0.01, weight_decay=0.1
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}
#: Of one example up to more than two per micro-batch.
SIZES = [(8, 7, 3, 8)[number % 4] for number in range(BATCHES)]


class Run:
    """A staged model in one process, trained batch by batch.

    Attributes:
        losses: by batch.
    """

    def __init__(
        self, model: str, schedule: str, micro: int, optimizer: str, *, recompute: bool = False, rows_delay: int = 0
    ) -> None:
        self.staged = make(model)
        step = step_program(
            self.staged.graph(micro), self.staged.embedding_edges, schedule, recompute=recompute, rows_delay=rows_delay
        )
        self.pipeline = DensePipeline(
            staged=self.staged,
            mesh=Mesh(step=step, world_size=1),
            rank=0,
            make_optimizer=OPTIMIZERS[optimizer],
            dtype=torch.float64,
            device=torch.device("cpu"),
            seed=5,
        )
        self.earlier = 0
        self.runtime = self.pipeline.runtime(self._batch, loss_sum, label_shape=())
        self.losses: list[float] = []
        for versions in self.pipeline.versions.values():
            versions.start(0)

    def train(self, first: int = 0, end: int = BATCHES) -> None:
        step, number = self.pipeline.step, self.pipeline.step.embedding_stages[0].number
        handlers = {
            **self.runtime.handlers(),
            f"{number}X_EMBED": self._embed,
            f"{number}X_EMBED_GRAD": self._embed_grad,
            **{f"{stage}OPT": weights.step for stage, weights in self.pipeline.weights.items()},
        }
        micro = step.graph.microbatches
        for versions in self.pipeline.versions.values():
            versions.start(first, self.earlier)
        for b in range(first, end):
            units = {text: 1 if OPS[text.lstrip("0123456789")].unit == "batch" else micro for text in handlers}
            before = float(sum(self.runtime.loss_sums().values()))
            interpret(
                step.program, {text: partial(_later, handler, b * units[text]) for text, handler in handlers.items()}
            )
            self.losses.append(float(sum(self.runtime.loss_sums().values())) - before)

    def _batch(self, b: int) -> StageBatch:
        b += self.earlier
        return self.pipeline.batch(batch_of(b, SIZES[b]), SIZES[b])

    def _embed(self, b: int) -> None:
        self.staged.embedding.zero_grad()
        self.runtime.embed(self.pipeline.step.embedding_stages[0].number, b)

    def _embed_grad(self, b: int) -> None:
        self.runtime.embed_grad(self.pipeline.step.embedding_stages[0].number, b)
        descend(self.staged.embedding)


def _later(handler: Callable[[int], None], offset: int, index: int) -> None:
    handler(index + offset)


def descend(embedding: nn.Module) -> None:
    with torch.no_grad():
        for rows in embedding.parameters():
            if rows.grad is not None:
                rows -= LR * rows.grad


def serial(model: str, schedule: str, micro: int, optimizer: str) -> tuple[list[float], nn.Module]:
    """Losses and trained model of the reference; rows are read after the updates of the batch before."""
    staged = make(model)
    stages = [
        SerialStage(module=s.module, inputs=tuple(map(str, s.inputs)), outputs=tuple(map(str, s.outputs)))
        for s in staged.stages
    ]
    heads = [head for stage in staged.stages for head in stage.heads]

    def loss(values: Mapping[str, Tensor]) -> Tensor:
        terms = [loss_sum(head, values[str(number)], values["labels"]) for head, number in heads]
        return torch.stack(terms).sum() / values["size"]

    program = ASYNCHRONOUS_SCHEDULES[schedule].loop(staged.graph(micro)).unroll(BATCHES)
    reference = SerialVersions(stages, lambda number, parameters: OPTIMIZERS[optimizer](parameters), loss, program)
    losses = []
    for b, size in enumerate(SIZES):
        inputs = batch_of(b, size)
        staged.embedding.zero_grad()
        numbers = staged.embedding_values
        values = dict(zip(numbers, staged.embedding(inputs.dense, inputs.sparse), strict=True))
        wants = {n for n in numbers if staged.values[n].wants_grad}
        units = [
            {
                **{str(n): v[first:end].detach().requires_grad_(n in wants) for n, v in values.items()},
                "labels": inputs.labels[first:end],
                "size": torch.tensor(float(size)),
            }
            for first, end in pairwise(bounds(size, micro))
        ]
        trained = reference.train(units)
        losses.append(trained.loss * size)
        gradients = {n: torch.cat([unit[str(n)] for unit in trained.gradients]) for n in sorted(wants)}
        if gradients:
            torch.autograd.backward([values[n] for n in gradients], list(gradients.values()))
        descend(staged.embedding)
    return losses, staged.model


CASES = [
    (model, schedule, micro)
    for model, micro in (("chain2", 2), ("chain4", 3), ("chain4", 1), ("skips", 4))
    for schedule in ASYNCHRONOUS_SCHEDULES
    if (schedule != "pipedream-2bw" or micro > 1) and (model != "skips" or schedule == "pipeoptim")
]


@pytest.mark.parametrize(
    ("model", "schedule", "micro", "optimizer"),
    some_of([(*case, list(OPTIMIZERS)[number % 4]) for number, case in enumerate(CASES)], range(0, len(CASES), 2)),
)
def test_stages_equal_the_serial_reference(model: str, schedule: str, micro: int, optimizer: str) -> None:
    run = Run(model, schedule, micro, optimizer)
    run.train()
    losses, reference = serial(model, schedule, micro, optimizer)
    assert run.losses == pytest.approx(losses, rel=1e-12, abs=1e-12)
    for (name, found), expected in zip(run.staged.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("model", "schedule", "micro"), CASES)
def test_stages_equal_the_serial_reference_with_every_optimizer(
    model: str, schedule: str, micro: int, optimizer: str
) -> None:
    test_stages_equal_the_serial_reference(model, schedule, micro, optimizer)


@pytest.mark.parametrize("schedule", ["pipedream-2bw", "spectrain-v2", "pipeoptim"])
def test_recomputed_forwards_have_the_weights_of_the_first(schedule: str) -> None:
    plain, again = (Run("chain4", schedule, 3, "adam", recompute=recompute) for recompute in (False, True))
    for run in (plain, again):
        run.train(0, 6)
    assert plain.losses == again.losses
    assert all(map(torch.equal, plain.staged.model.parameters(), again.staged.model.parameters()))


@pytest.mark.parametrize("earlier", [0, 5])
@pytest.mark.parametrize("schedule", ASYNCHRONOUS_SCHEDULES)
def test_a_resumed_run_has_the_same_bits(schedule: str, earlier: int) -> None:
    """Weights, optimizer state and what `tensors` gives are all there is; also to a job that begins at batch 0."""
    micro = 1 if schedule != "pipedream-2bw" else 3
    whole, first, second = (Run("chain4", schedule, micro, "adagrad") for _ in range(3))
    whole.train(0, 12)
    first.train(0, 5)
    second.staged.model.load_state_dict(first.staged.model.state_dict())
    for stage, optimizer in first.pipeline.optimizers.items():
        second.pipeline.optimizers[stage].load_state_dict(optimizer.state_dict())
    kept = {k: t.clone() for versions in first.pipeline.versions.values() for k, t in versions.tensors().items()}
    for versions in second.pipeline.versions.values():
        versions.load(kept)
    second.earlier = earlier
    second.train(5 - earlier, 12 - earlier)
    assert second.losses == pytest.approx(whole.losses[5:], rel=1e-12)  # differences of sums
    assert all(map(torch.equal, second.staged.model.parameters(), whole.staged.model.parameters()))


@pytest.mark.parametrize(("micro", "rows_delay"), [(1, 0), (2, 0), (8, 0), (3, 1), (8, 1)])
@pytest.mark.parametrize("schedule", ASYNCHRONOUS_SCHEDULES)
def test_the_bytes_kept_are_those_of_the_table(schedule: str, micro: int, rows_delay: int) -> None:
    if schedule == "pipedream-2bw" and micro < 3:
        return
    run = Run("chain4", schedule, micro, "adam", rows_delay=rows_delay)
    graph = run.staged.graph(micro)
    loop = ASYNCHRONOUS_SCHEDULES[schedule].loop(graph)
    order = loop if rows_delay else drained(graph, loop)
    kept = kept_weights(order.unroll(order.ramp()))
    for stage, versions in run.pipeline.versions.items():
        one = sum(parameter.nbytes for _, parameter in run.staged.parameters_of(stage))
        shared = schedule == "spectrain" and loop_shares(run.pipeline.step.version_lags[stage])
        expected = kept[stage].versions - 1 + kept[stage].predictions - shared
        assert versions.num_bytes() == expected * one


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [
        ("pipedream", [4, 3, 2, 1]),
        ("pipedream-vertical", [4, 4, 4, 4]),
        ("spectrain", [4, 3, 3, 2]),  # ranks 2 and 3 aim ahead of the batch
        ("spectrain-v2", [4, 3, 2, 1]),
        ("pipeoptim", [4, 3, 2, 1]),
    ],
)
def test_copies_of_four_stages_with_one_micro_batch(schedule: str, kept: list[int]) -> None:
    """Copies of a stage's weights, the parameters included, by measured bytes.

    The papers keep one prediction of pipeoptim, made before its forward. Here the forward comes after the steps of the
    batches before, so its prediction is older, and one is kept for each of them.
    """
    run = Run("chain4", schedule, 1, "adam")
    copies = []
    for stage, versions in run.pipeline.versions.items():
        one = sum(parameter.nbytes for _, parameter in run.staged.parameters_of(stage))
        copies.append(1 + versions.num_bytes() / one)
    assert copies == kept


def loop_shares(lags: VersionLags) -> bool:
    """Forward and backward predict the same, which is kept once."""
    return lags.predicts_forward and lags.is_same


def test_weights_of_another_schedule_are_refused() -> None:
    module = nn.Linear(2, 1)
    parameters = tuple(module.named_parameters())
    optimizer = torch.optim.Adam(module.parameters())
    lags = {name: step_program(chain(2, 2), [(0, True)], name).version_lags[0] for name in ("pipedream", "pipeoptim")}
    stash, predicts = (StageVersions(lags[name], parameters, optimizer) for name in ("pipedream", "pipeoptim"))
    with pytest.raises(InputError, match=r"expected prediction0 of weight \[1, 2\] in the checkpoint, got none"):
        predicts.load(stash.tensors())
    with pytest.raises(InputError, match=r"expected prediction0 of weight \[1, 2\] in the checkpoint, got none"):
        predicts.start(3)  # nothing was loaded


def test_a_job_from_other_weights_begins_with_them() -> None:
    """Without versions in its checkpoint all versions are the present weights, whatever was before `load`."""
    module = nn.Linear(2, 1, bias=False)
    lags = step_program(chain(2, 2), [(0, True)], "pipedream").version_lags[0]
    versions = StageVersions(lags, tuple(module.named_parameters()), torch.optim.Adam(module.parameters()))
    with torch.no_grad():
        module.weight.fill_(3.0)
    versions.load({})
    versions.start(0)
    kept = versions.tensors()
    assert kept
    assert all(torch.equal(tensor, module.weight) for tensor in kept.values())
