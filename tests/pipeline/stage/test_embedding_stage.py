"""The embedding stage alone: two values of a small lookup, two consumers, gradients in micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bagpipe.errors import JobError
from bagpipe.pipeline.stage.batches import Batches, StageBatch
from bagpipe.pipeline.stage.channel import Channel, MicrobatchSlice
from bagpipe.pipeline.stage.embedding_stage import EmbeddingStageRunner
from bagpipe.schedule.ir.step_program import EmbeddingStage
from bagpipe.split.staged_model import StageValue
from bagpipe.types.model_inputs import ModelInputs

SIZE, WIDTH, MICRO = 5, 3, 2
POOLED, DENSE, LABELS = 0, 1, 2


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, WIDTH)
        self.backwards = 0

    def forward(self, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.rows(sparse)
        pooled.register_hook(self._count)
        return pooled, dense

    def _count(self, gradient: Tensor) -> None:
        self.backwards += 1


def channel(number: int, sender: int, receiver: int, values: tuple[int, ...], units: int, into: int) -> Channel:
    described = tuple(
        StageValue(name=f"v{v}", producer=2, consumers=(), shape=(WIDTH,), dtype=torch.float32, wants_grad=v == POOLED)
        for v in values
    )
    return Channel(
        number=number,
        sender=sender,
        receiver=receiver,
        pipe=0,
        numbers=values,
        values=described,
        units=units,
        receiver_units=into,
        copies=units == 1,
        link=None,
        device=torch.device("cpu"),
    )


class Bench:
    def __init__(self, num_read: int | None = SIZE) -> None:
        self.module = Lookup()
        self.outputs = [channel(0, 2, 0, (POOLED, DENSE), 1, MICRO), channel(1, 2, 1, (POOLED, LABELS), 1, 1)]
        self.output_grads = [channel(2, 0, 2, (POOLED,), MICRO, 1), channel(3, 1, 2, (POOLED,), 1, 1)]
        self.inputs = None
        if num_read is not None:
            self.inputs = ModelInputs(
                dense=torch.rand(num_read, WIDTH), sparse=torch.arange(num_read) % 4, labels=torch.rand(num_read)
            )
        given = StageBatch(inputs=self.inputs, num_examples=SIZE, num_global_examples=SIZE)
        self.runner = EmbeddingStageRunner(
            embedding=EmbeddingStage(number=2, pipes=(0,), process=0, position=0),
            module=self.module,
            numbers=(POOLED, DENSE),
            labels=LABELS,
            outputs={0: self.outputs},
            output_grads={0: [[channel] for channel in self.output_grads]},
            batches=Batches(
                lambda number: given,
                num_pipes=1,
                units={0: (0, MICRO, 0, 1), 1: (0, 1, 0, 1)},
                channels=[*self.outputs, *self.output_grads],
            ),
        )


def test_stages_get_their_share_of_pooled_values() -> None:
    bench = Bench()
    bench.runner.embed(4)
    assert bench.inputs is not None
    first = bench.outputs[0].take(4, [MicrobatchSlice(0, 0, 2, False)])
    second = bench.outputs[0].take(4, [MicrobatchSlice(0, 2, 5, False)])
    assert torch.equal(torch.cat([first[1], second[1]]), bench.inputs.dense)
    pooled, labels = bench.outputs[1].take(4, [MicrobatchSlice(0, 0, SIZE, True)])
    assert torch.equal(pooled, bench.module.rows.weight[bench.inputs.sparse])
    assert torch.equal(labels, bench.inputs.labels)
    assert not pooled.requires_grad


def test_one_backward_takes_the_gradients_of_all() -> None:
    bench = Bench()
    bench.runner.embed(0)
    bench.output_grads[0].put(0, [torch.full((2, WIDTH), 1.0)], 1)
    bench.output_grads[0].put(1, [torch.full((3, WIDTH), 2.0)], 1)
    bench.output_grads[1].put(0, [torch.full((SIZE, WIDTH), 10.0)], 1)
    bench.runner.embed_grad(0)
    gradient = bench.module.rows.weight.grad
    assert gradient is not None
    assert gradient[:, 0].tolist() == [11 + 12, 11, 12, 12]
    assert bench.module.backwards == 1


@pytest.mark.parametrize("num_read", [None, 4])
def test_a_batch_without_the_sources_examples_is_an_error(num_read: int | None) -> None:
    with pytest.raises(JobError, match=rf"batch 3: expected 5 examples of the replica's 5 .* got {num_read or 0}"):
        Bench(num_read).runner.embed(3)


def test_empty_micro_batches_do_no_work() -> None:
    given = StageBatch(inputs=None, num_examples=SIZE, num_global_examples=SIZE)
    runner = EmbeddingStageRunner(
        embedding=EmbeddingStage(number=2, pipes=(), process=1, position=1),
        module=Lookup(),
        numbers=(POOLED, DENSE),
        labels=LABELS,
        outputs={},
        output_grads={},
        batches=Batches(lambda number: given, num_pipes=1, units={}, channels=[]),
    )
    runner.embed(0)
    runner.embed_grad(0)
