"""A stage instance that replays its micro-batches: what it sends is not overwritten, and it ends as without replays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bagpipe.pipeline.stage.graphs import Recording, Work
from bagpipe.testing.repeated_calls import RepeatedCalls
from tests.pipeline.stage.test_instance import WHOLE, Bench
from tests.split.models import WIDTH


class Counted(RepeatedCalls):
    """Counts captures."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, *works: Work) -> tuple[Recording, ...]:
        self.recorded += 1
        return super().record(*works)


def test_what_is_sent_outlives_later_replays() -> None:
    bench, plain = Bench(graphs=RepeatedCalls()), Bench()
    kept: list[Tensor] = []
    for index in range(3):
        for each in (bench, plain):
            outputs = each.forward(index)
            each.give(index, 1.0, 2.0)
            each.runner.backward(index)
            kept += [*outputs, each.input_grads[1].take(index, WHOLE)[0]]
    ours, theirs = [*kept[:3], *kept[6:9], *kept[12:15]], [*kept[3:6], *kept[9:12], *kept[15:]]
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert torch.equal(bench.weight_grad(), plain.weight_grad())
    assert all(tensor.is_contiguous() and not tensor.storage_offset() for tensor in ours)


@pytest.mark.parametrize("halves", [False, True])
def test_a_full_backward_and_its_halves_add_the_same(halves: bool) -> None:
    bench, plain = Bench(graphs=RepeatedCalls()), Bench()
    for each in (bench, plain):
        for index in range(2):
            each.forward(index)
            each.give(index, 1.0, 3.0)
        for index in range(2):
            if halves and each is bench:
                each.runner.backward_inputs(index)
                each.runner.backward_weights(index)
            else:
                each.runner.backward(index)
    assert torch.equal(bench.weight_grad(), plain.weight_grad())


def test_recomputing_moves_running_means_once() -> None:
    graphs = Counted()
    kept, again = Bench(), Bench(recomputes=True, graphs=graphs)
    outputs = []
    for bench in (kept, again):
        bench.module.dropout = nn.BatchNorm1d(WIDTH).double()  # type: ignore[assignment] # what follows the layer
        for index in range(2):
            outputs.append(bench.forward(index)[0])
            bench.give(index, 1.0, 2.0)
        for index in range(2):
            if bench is again:
                bench.runner.recompute(index)
            bench.runner.backward(index)
    assert torch.equal(torch.cat(outputs[:2]), torch.cat(outputs[2:]))
    assert torch.equal(kept.weight_grad(), again.weight_grad())
    buffers = dict(kept.module.named_buffers())
    assert len(buffers) == 3
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in again.module.named_buffers())
    assert graphs.recorded == 2, "forwards that keep nothing have one, and repetitions one, with other buffers"


def test_a_smaller_batch_runs_operator_by_operator() -> None:
    graphs = Counted()
    bench = Bench(size=2, graphs=graphs)
    for channel in bench.inputs:
        channel.put(1, [torch.ones((1, WIDTH), dtype=torch.float64)], 1)
    bench.runner.forward(1)
    assert graphs.recorded == 0


def test_a_forward_and_its_repetition_share_recordings() -> None:
    graphs = Counted()
    bench = Bench(recomputes=True, graphs=graphs)
    for index in range(2):
        bench.forward(index)
        bench.give(index, 1.0, 2.0)
        bench.runner.recompute(index)
        bench.runner.backward(index)
    assert graphs.recorded == 1
