"""One stage instance with its channels: a stage that concatenates two inputs into one output."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bagpipe.errors import JobError
from bagpipe.pipeline.stage.batches import Batches, StageBatch
from bagpipe.pipeline.stage.channel import Channel, Link, MicrobatchSlice, Wiring
from bagpipe.pipeline.stage.graphs import Graphs
from bagpipe.pipeline.stage.instance import StageRunner
from bagpipe.pipeline.stage.recorded_stage import GraphCapture
from bagpipe.schedule.ir.step_program import StageInstance
from bagpipe.split.staged_model import StageModule, StageValue
from tests.pipeline.stage.test_channel import ManualLinks
from tests.split.models import WIDTH, Node

MICRO = 2
SIZE = 6
CPU = torch.device("cpu")
WHOLE = [MicrobatchSlice(0, 0, SIZE // MICRO, True)]


class Bench:
    """Instance 1 between two producers (0 and 3) and two consumers (2 and 4). Gradients of the first go over a link."""

    def __init__(
        self,
        *,
        dropout: float = 0.0,
        recomputes: bool = False,
        is_compiled: bool = False,
        size: int = SIZE,
        seed: int = 0,
        graphs: Graphs | None = None,
    ) -> None:
        self.pile = ManualLinks()
        torch.manual_seed(1)
        self.module = Node(2 * WIDTH, 1, dropout).double()
        self.module.is_compiled = is_compiled  # type: ignore[assignment] # as a DenseStage says
        self.inputs = [self.channel(0, sender, 1, value) for value, sender in ((0, 0), (1, 3))]
        self.outputs = [self.channel(0, 1, receiver, 2) for receiver in (2, 4)]
        self.output_grads = [self.channel(0, sender, 1, 2) for sender in (2, 4)]
        self.input_grads = [self.channel(0, 1, 0, 0, Link(self.pile, 1, 9)), self.channel(0, 1, 3, 1)]
        channels = [*self.inputs, *self.outputs, *self.output_grads, *self.input_grads]
        for number, channel in enumerate(channels):
            channel.number = number
        self.runner = StageRunner(
            instance=StageInstance(number=1, stage=1, pipe=0, position=0, process=0),
            stage=StageModule(name="node", module=self.module, inputs=(0, 1), outputs=(2,), uses_random=dropout > 0),
            module=self.module,
            wiring=Wiring(
                inputs=tuple((channel,) for channel in self.inputs),
                outputs=tuple(self.outputs),
                output_grads=tuple((channel,) for channel in self.output_grads),
                input_grads=tuple(self.input_grads),
            ),
            units=MICRO,
            needs_grad={0: 0, 1: 0, 2: 0},
            labels=3,
            recomputed=frozenset(range(MICRO)) if recomputes else frozenset(),
            batches=Batches(
                lambda number: StageBatch(inputs=None, num_examples=size, num_global_examples=size),
                num_pipes=1,
                units={1: (0, MICRO, 0, 1)},
                channels=channels,
            ),
            loss=lambda head, logits, labels: pytest.fail("no head"),
            device=CPU,
            seed=seed,
            capture=None if graphs is None else GraphCapture(graphs=graphs, full_batch=SIZE, split=frozenset({1})),
        )

    @staticmethod
    def channel(number: int, sender: int, receiver: int, value: int, link: Link | None = None) -> Channel:
        described = StageValue(
            name=f"v{value}", producer=0, consumers=(1,), shape=(WIDTH,), dtype=torch.float64, wants_grad=True
        )
        return Channel(
            number=number,
            sender=sender,
            receiver=receiver,
            pipe=0,
            numbers=(value,),
            values=(described,),
            units=MICRO,
            receiver_units=MICRO,
            copies=False,
            link=link,
            device=CPU,
        )

    def forward(self, index: int) -> tuple[Tensor, Tensor]:
        """Values received by the two consumers."""
        for number, channel in enumerate(self.inputs):
            channel.put(index, [torch.full((3, WIDTH), index + number / 2, dtype=torch.float64)], 1)
        self.runner.forward(index)
        first, second = (channel.take(index, WHOLE)[0] for channel in self.outputs)
        return first, second

    def give(self, index: int, *factors: float) -> None:
        for channel, factor in zip(self.output_grads, factors, strict=True):
            channel.put(index, [torch.full((3, WIDTH), factor, dtype=torch.float64)], 1)

    def weight_grad(self) -> Tensor:
        gradient = self.module.layer.weight.grad
        assert gradient is not None
        return gradient


def test_gradients_of_consumers_are_summed() -> None:
    once, twice = Bench(), Bench()
    for bench, factors in ((once, (3.0, 0.0)), (twice, (1.0, 2.0))):
        first, second = bench.forward(0)
        assert torch.equal(first, second)
        bench.give(0, *factors)
        bench.runner.backward(0)
    assert torch.equal(once.weight_grad(), twice.weight_grad())
    assert torch.equal(once.input_grads[1].take(0, WHOLE)[0], twice.input_grads[1].take(0, WHOLE)[0])


def test_a_gradient_that_is_a_slice_is_sent_contiguous() -> None:
    """A concatenation at a stage's entry makes its inputs' gradients slices, which gloo does not send."""
    bench = Bench()
    bench.forward(0)
    bench.give(0, 1.0, 1.0)
    bench.runner.backward(0)
    sent = bench.input_grads[0]._outbox[0][0]
    assert sent.is_contiguous()
    assert sent.storage_offset() == 0
    bench.input_grads[0].send(0)
    assert bench.pile.log == [f"send [3, {WIDTH}] to 1, tag 9"]
    assert bench.input_grads[1].take(0, WHOLE)[0].is_contiguous()


def test_recomputing_draws_the_same_numbers() -> None:
    kept, again = Bench(dropout=0.5), Bench(dropout=0.5, recomputes=True)
    outputs = []
    for bench in (kept, again):
        outputs.append(bench.forward(1)[0])
        torch.rand(7)  # draws of other code in between
        bench.give(1, 1.0, 2.0)
        if bench is again:
            bench.runner.recompute(1)
        bench.runner.backward(1)
    assert torch.equal(*outputs)
    assert torch.equal(kept.weight_grad(), again.weight_grad())


def test_recomputing_moves_running_means_once() -> None:
    kept, again = Bench(), Bench(recomputes=True)
    for bench in (kept, again):
        bench.module.dropout = nn.BatchNorm1d(WIDTH).double()  # type: ignore[assignment] # what follows the layer
        bench.forward(0)
        bench.give(0, 1.0, 2.0)
        if bench is again:
            bench.runner.recompute(0)
        bench.runner.backward(0)
    buffers = dict(kept.module.named_buffers())
    assert len(buffers) == 3
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in again.module.named_buffers())
    assert torch.equal(kept.weight_grad(), again.weight_grad())


@pytest.mark.parametrize("is_compiled", [False, True])
def test_code_is_compiled_for_gradients_only(is_compiled: bool) -> None:
    """Without gradients it could round in another way than when it is repeated."""
    bench, seen = Bench(recomputes=True, is_compiled=is_compiled), []
    bench.module.register_forward_hook(lambda *given: seen.append(torch.is_grad_enabled()))
    bench.forward(0)
    bench.give(0, 1.0, 2.0)
    bench.runner.recompute(0)
    bench.runner.backward(0)
    assert seen == [is_compiled, True]


def test_random_numbers_depend_on_seed_batch_and_micro_batch() -> None:
    def zeros(bench: Bench, index: int) -> tuple[bool, ...]:
        return tuple((bench.forward(index)[0] == 0).flatten().tolist())

    bench = Bench(dropout=0.5)
    drawn = [zeros(bench, index) for index in range(4)] + [zeros(Bench(dropout=0.5, seed=1), 0)]
    assert len(set(drawn)) == 5
    assert zeros(Bench(dropout=0.5), 2) == drawn[2]


def test_live_micro_batches_are_counted_and_released() -> None:
    bench = Bench()
    for index in range(2):
        bench.forward(index)
        bench.give(index, 1.0, 1.0)
    assert bench.runner.peak_live == 2
    for index in range(2):
        bench.runner.backward_inputs(index)
        assert len(bench.runner._live) == 2 - index
        bench.runner.backward_weights(index)
    assert not bench.runner._live
    bench.forward(2)
    assert bench.runner.peak_live == 2


def test_an_empty_micro_batch_does_nothing() -> None:
    bench = Bench(size=1)
    for action in (
        bench.runner.forward,
        bench.runner.recompute,
        bench.runner.backward_inputs,
        bench.runner.backward_weights,
    ):
        action(0)
    bench.runner.backward(0)
    assert bench.runner.peak_live == 0
    assert bench.module.layer.weight.grad is None


def test_a_backward_needs_its_activations() -> None:
    bench = Bench(recomputes=True)
    bench.forward(0)
    with pytest.raises(JobError, match="a backward came before its forward"):
        bench.runner.backward(0)
