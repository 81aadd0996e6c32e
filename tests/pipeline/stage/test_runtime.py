"""Every schedule on every shape of model equals one device. Lanes, one thread, and ranks give equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bagpipe.errors import JobError
from bagpipe.pipeline.stage.runtime import StageRuntime
from bagpipe.schedule.analysis.check import in_flight
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.distributed.threads import run_threads
from tests.effort import some_of
from tests.pipeline.stage.steps import Case, Worker, loss_sum, merge, reference, run_in_process, run_ranks_of
from tests.split import models
from tests.split.models import MODELS, make

#: Models of four stages, supported by every schedule.
OF_FOUR = ("chain4", "dropout", "diamond", "skips", "two-heads", "aside")
SCHEDULES = tuple(DENSE_SCHEDULES)
RANDOM = "dropout"


def half() -> Iterator[Any]:
    """Every model under every schedule; by default each schedule with half of the models, and the other way round."""
    for turn, schedule in enumerate(SCHEDULES):
        for number, model in enumerate((*(model for model in OF_FOUR if model != RANDOM), "branches")):
            yield pytest.param(model, schedule, marks=() if (turn + number) % 2 else pytest.mark.slow)


@pytest.mark.parametrize(("model", "schedule"), list(half()))
def test_a_schedule_equals_one_device(model: str, schedule: str) -> None:
    case = Case(model=model, schedule=schedule, micro=8, sizes=(16, 13))
    run_in_process(case).assert_close(reference(case))


@pytest.mark.parametrize("model", ["diamond", "skips", "two-heads", "aside", "chain4"])
def test_stages_with_replicas_of_their_own_equal_one_device(model: str) -> None:
    """Every edge leads between different numbers of ranks; the last batch has fewer examples than parts."""
    for replicas, micro in (((2, 1, 3, 2), 4), ((1, 3, 2, 1), (2, 1, 4, 3)), ((3, 2, 1, 2), (1, 4, 2, 1))):
        case = Case(model=model, schedule="graph", micro=micro, sizes=(16, 13, 1), replicas=replicas)
        run_in_process(case).assert_close(reference(case))


def pairs() -> Iterator[Any]:
    """Every model under every schedule; by default each of them in one or two pairs."""
    for turn, schedule in enumerate(SCHEDULES):
        for number, model in enumerate((*OF_FOUR, "branches")):
            default = turn % (len(OF_FOUR) + 1) == number
            yield pytest.param(model, schedule, marks=() if default else pytest.mark.slow)


@pytest.mark.parametrize(("model", "schedule"), list(pairs()))
def test_lanes_give_the_bits_of_the_interpreter(model: str, schedule: str) -> None:
    one = Case(model=model, schedule=schedule, micro=8, sizes=(16,))
    Worker(one, one.step()).interpret().assert_same(run_in_process(one))


@pytest.mark.parametrize("model", OF_FOUR)
def test_runs_are_the_same_bits_with_and_without_recomputation(model: str) -> None:
    for schedule in ("1f1b", "zb-h1", "chimera"):
        case = Case(model=model, schedule=schedule, micro=4, sizes=(16, 13))
        again = Case(model=model, schedule=schedule, micro=4, sizes=(16, 13), recompute=True)
        run_in_process(again).assert_same(run_in_process(case))


class Counting(nn.Module):
    """Each forward multiplies by a buffer and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(models.WIDTH, models.WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        scale = self.scale.clone()
        self.scale.add_(0.1)
        return (torch.tanh(self.layer(hidden) * scale),)


def test_recomputation_sees_the_buffers_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = models.Plan(takes=("h0",), makes=("h1",), module=Counting)
    stages = [models._node("dense", "first", makes="h0"), counting, models._node("h1", makes="h2")]
    monkeypatch.setitem(models.MODELS, "counting", [*stages, models._top("h2", "second")])
    kept = run_in_process(Case(model="counting", schedule="gpipe"))
    for recompute in (True, (0.5, 0.5, 0, 0)):
        run_in_process(Case(model="counting", schedule="gpipe", recompute=recompute)).assert_same(kept)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "breadth-first", "zb-v", "dynamic", "chimera"])
def test_shares_of_the_stages_can_be_recomputed(schedule: str) -> None:
    case = Case(model=RANDOM, schedule=schedule, micro=4, sizes=(16, 13))
    again = Case(model=RANDOM, schedule=schedule, micro=4, sizes=(16, 13), recompute=(1, 0.75, 0.5, 0))
    number = sum(atom.op == "REC" for atom in again.step().program.atoms())
    assert number == 4 + 3 + 2 if schedule != "chimera" else 4 + 2 + 2
    run_in_process(again).assert_same(run_in_process(case))


@pytest.mark.parametrize("model", [RANDOM, "diamond"])
def test_some_micro_batches_can_be_recomputed(model: str) -> None:
    """1f1b-shifted adds gradients in the order of 1f1b."""
    case = Case(model=model, schedule="1f1b-shifted", micro=8, sizes=(16, 13))
    half = Case(model=model, schedule="1f1b-shifted", micro=8, sizes=(16, 13), settings=(("recompute_share", "0.5"),))
    kept = run_in_process(Case(model=model, schedule="1f1b", micro=8, sizes=(16, 13)))
    assert 0 < sum(a.op == "REC" for a in half.step().program.atoms()) < 2 * 8
    for other in (case, half):
        run_in_process(other).assert_same(kept)


@pytest.mark.parametrize("schedule", some_of(SCHEDULES, range(0, len(SCHEDULES), 3)))
def test_micro_batches_may_be_ragged_or_empty(schedule: str) -> None:
    case = Case(model="diamond", schedule=schedule, micro=8, sizes=(5, 1, 16, 3))
    run_in_process(case).assert_close(reference(case))


@settings(max_examples=12)
@given(
    model=st.sampled_from(["diamond", "skips", "two-heads", "aside"]),
    micro=st.tuples(*[st.integers(1, 6)] * 4),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=3),
)
def test_stages_may_differ_in_micro_batches(model: str, micro: tuple[int, ...], sizes: list[int]) -> None:
    case = Case(model=model, schedule="graph", micro=micro, sizes=tuple(sizes))
    result = run_in_process(case)
    result.assert_close(reference(case))
    run_in_process(case).assert_same(result)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_live_activations_are_those_of_the_schedule(schedule: str) -> None:
    case = Case(model="chain4", schedule=schedule, micro=8, sizes=(16,))
    result, step = run_in_process(case), case.step()
    for number, actions in enumerate(step.program.lanes[lane] for lane in step.lanes_of(0)):
        own = {instance.number for instance in step.instances if instance.position == number}
        assert max(result.peak_live[instance] for instance in own) <= in_flight(actions)
        assert sum(result.peak_live[instance] for instance in own) >= in_flight(actions)


@pytest.mark.parametrize("schedule", some_of(SCHEDULES, range(1, len(SCHEDULES), 3)))
def test_ranks_give_the_bits_of_one_process(schedule: str) -> None:
    cases = [
        Case(model="skips", schedule=schedule, micro=4, sizes=(16, 3)),
        Case(model=RANDOM, schedule=schedule, micro=4, sizes=(9, 8), recompute=(1, 0.5, 0.5, 0)),
    ]
    count = cases[0].num_ranks
    for case in cases:
        ended = run_threads(count, run_ranks_of, [case], count, timeout_s=30)
        assert not any(end.error for end in ended), ended
        result = merge(case, [end.value[0] for end in ended], count)
        # With two pipes a row's gradient comes from two sources, so sums are bracketed differently.
        if DENSE_SCHEDULES[schedule].num_pipes > 1:
            result.assert_close(run_in_process(case))
        else:
            result.assert_same(run_in_process(case))


@pytest.mark.parametrize("schedule", ["graph", "1f1b"])
def test_branches_of_different_sizes_over_ranks(schedule: str) -> None:
    micro = (2, 2, 4, 4, 1, 2, 2, 8) if schedule == "graph" else 4
    case = Case(model="branches", schedule=schedule, micro=micro, sizes=(16, 7))
    ended = run_threads(8, run_ranks_of, [case], 8, timeout_s=30)
    assert not any(end.error for end in ended), ended
    merge(case, [end.value[0] for end in ended], 8).assert_same(run_in_process(case))


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "zb-v"])
def test_replicas_share_the_examples(schedule: str) -> None:
    case = Case(model="chain4" if schedule == "zb-v" else "chain2", schedule=schedule, micro=4, sizes=(17, 4))
    ended = run_threads(4, run_ranks_of, [case], 2, timeout_s=30)
    assert not any(end.error for end in ended), ended
    merge(case, [end.value[0] for end in ended], 2).assert_close(reference(case))


@pytest.mark.parametrize("model", ["one", "chain2", "plain2"])
def test_pipelines_of_few_stages(model: str) -> None:
    case = Case(model=model, schedule="1f1b", micro=3, sizes=(16, 13))
    run_in_process(case).assert_close(reference(case))


def test_a_second_pipe_has_gradients_but_not_values_of_its_own() -> None:
    case = Case(model="chain2", schedule="chimera")
    worker = Worker(case, case.step())
    own, twin = worker.runtime.parameters(1)
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in zip(own, twin, strict=True))
    assert {id(p) for p in own} == {id(p) for _, p in worker.staged.parameters_of(1)}
    twin[0].grad = torch.ones_like(twin[0])
    worker.runtime.sum_pipes(1)
    assert torch.equal(own[0].grad, torch.ones_like(own[0]))
    assert twin[0].grad is None


def test_several_processes_need_links() -> None:
    case = Case(model="chain2", schedule="1f1b")
    with pytest.raises(JobError, match="2 processes run stages of a replica, but no links"):
        StageRuntime(
            make("chain2"),
            case.step(2),
            process=0,
            links=None,
            batch=lambda number: pytest.fail("asked"),
            loss=loss_sum,
            dtype=torch.float64,
            device="cpu",
            seed=0,
        )


def test_all_models_are_covered() -> None:
    assert {*OF_FOUR, "branches", "one", "chain2", "chain3", "plain2", "plain4"} == set(MODELS)
