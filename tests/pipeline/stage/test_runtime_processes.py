"""Ranks in processes over gloo give the bits of one process, and the results of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import pipelining

from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from tests.distributed.processes import run_ranks
from tests.pipeline.stage.steps import Case, Result, batch_of, loss_sum, merge, reference, run_in_process, run_ranks_of
from tests.split.models import make

pytestmark = pytest.mark.multiproc

#: Schedule -> PyTorch's class, the model, and the stages of each rank; ours are the same.
THEIRS: Mapping[str, tuple[str, str, tuple[tuple[int, ...], ...]]] = {
    "gpipe": ("ScheduleGPipe", "plain2", ((0,), (1,))),
    "1f1b": ("Schedule1F1B", "plain2", ((0,), (1,))),
    "breadth-first": ("ScheduleLoopedBFS", "plain4", ((0, 2), (1, 3))),
    "interleaved": ("ScheduleInterleaved1F1B", "plain4", ((0, 2), (1, 3))),
    "zb-v": ("ScheduleZBVZeroBubble", "plain4", ((0, 3), (1, 2))),
    "dualpipe-v": ("ScheduleDualPipeV", "plain4", ((0, 3), (1, 2))),
}
TIMEOUT_S = 30.0

Gradients = dict[str, NDArray[np.float64]]


def ours_and_theirs(membership: Membership, cases: Sequence[Case]) -> list[tuple[Result, Gradients]]:
    """Our results of all cases, and PyTorch's gradients of the same stages on the same ranks."""
    with TorchPeers(membership, timeout_s=TIMEOUT_S) as peers:
        return [(run_ranks_of(peers, [case], 2)[0], theirs(membership.rank, case)) for case in cases]


def theirs(rank: int, case: Case) -> Gradients:
    class_name, _, placement = THEIRS[case.schedule]
    staged, (size,), inputs = make(case.model), case.sizes, batch_of(0, case.sizes[0])
    count = len(staged.stages)
    stages = [
        pipelining.PipelineStage(staged.stages[number].module, number, count, torch.device("cpu"))
        for number in placement[rank]
    ]

    def loss(outputs: tuple[Tensor, ...] | Tensor, labels: Tensor) -> Tensor:
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        return loss_sum(0, logits, labels) / size

    kind = getattr(pipelining.schedules, class_name)
    given: Any = stages[0] if issubclass(kind, pipelining.schedules.PipelineScheduleSingle) else stages
    schedule = kind(given, case.micro, loss_fn=loss, scale_grads=False)
    schedule.step(
        *([inputs.dense] if 0 in placement[rank] else []),
        target=inputs.labels if count - 1 in placement[rank] else None,
        return_outputs=False,
    )
    return {
        name: parameter.grad.numpy()
        for number in placement[rank]
        for name, parameter in staged.parameters_of(number)
        if parameter.grad is not None
    }


def test_linear_schedules_equal_pytorchs() -> None:
    cases = [Case(model=THEIRS[name][1], schedule=name, micro=4, sizes=(16,)) for name in THEIRS]
    ended = run_ranks(2, ours_and_theirs, cases)
    assert not any(end.error for end in ended), ended
    for number, case in enumerate(cases):
        ours = merge(case, [end.value[number][0] for end in ended], 2)
        ours.assert_same(run_in_process(case))
        found = {name: values for end in ended for name, values in end.value[number][1].items()}
        assert found.keys() == {name for name, gradient in ours.gradients.items() if gradient is not None}
        for name, gradient in found.items():
            np.testing.assert_allclose(gradient, ours.gradients[name], rtol=0, atol=1e-12, err_msg=name)


def ours(membership: Membership, cases: Sequence[Case], num_processes: int) -> list[Result]:
    with TorchPeers(membership, timeout_s=TIMEOUT_S) as peers:
        return [run_ranks_of(peers, [case], num_processes)[0] for case in cases]


def test_graphs_over_four_processes_give_the_bits_of_one() -> None:
    cases = [
        Case(model="skips", schedule="graph", micro=(2, 4, 1, 3), sizes=(16, 5, 1)),
        Case(model="two-heads", schedule="zb-h1", micro=4, sizes=(16, 3)),
        Case(model="dropout", schedule="1f1b", micro=4, sizes=(16, 3), recompute=True),
    ]
    ended = run_ranks(4, ours, cases, 4)
    assert not any(end.error for end in ended), ended
    for number, case in enumerate(cases):
        merge(case, [end.value[number] for end in ended], 4).assert_same(run_in_process(case))


def test_stages_with_replicas_of_their_own_give_the_bits_of_one_process() -> None:
    """Three stages on 2, 1 and 1 ranks, and a graph whose stages differ in replicas and in micro-batches."""
    cases = [
        Case(model="chain3", schedule="1f1b", micro=4, sizes=(16, 13, 3), replicas=(2, 1, 1)),
        Case(model="chain3", schedule="zb-h1", micro=2, sizes=(16, 13), replicas=(1, 2, 1)),
        Case(model="chain3", schedule="graph", micro=(4, 2, 1), sizes=(16, 7), replicas=(1, 1, 2)),
        Case(model="chain2", schedule="gpipe", micro=3, sizes=(16, 7), replicas=(3, 1)),
    ]
    ended = run_ranks(4, ours, cases, 4)
    assert not any(end.error for end in ended), ended
    for number, case in enumerate(cases):
        found = merge(case, [end.value[number] for end in ended], 4)
        found.assert_same(run_in_process(case))
        found.assert_close(reference(case))


def test_two_pipes_of_two_replicas_give_the_same_bits_twice() -> None:
    case = Case(model="chain2", schedule="chimera", micro=4, sizes=(16, 5))
    first, second = (merge(case, [end.value[0] for end in run_ranks(4, ours, [case], 2)], 2) for _ in range(2))
    first.assert_same(second)
    first.assert_close(run_in_process(case))
