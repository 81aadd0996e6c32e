from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.gpipe import gpipe
from bagpipe.schedule.formats import render
from bagpipe.schedule.ir.backward_shares import BackwardShares, backward_shares
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from bagpipe.schedule.lowering.optimizer import reduce_lane
from bagpipe.schedule.lowering.partial_backward import cut_backwards, shares_of_program
from bagpipe.schedule.lowering.passes import PASSES
from bagpipe.schedule.registry import DENSE_SCHEDULES, dense_schedule

QUARTERS = (0.25, 0.5, 0.75, 1.0)

ROWS = """\
rank0 |0F0|0F1|0F2|0F3............................................|0B1----........|
rank1 ....|1F0|1F1|1F2|1F3................................|1B1----........|1B3----|
rank2 ........|2F0|2F1|2F2|2F3............|2B0----|2B1----........|2B3----........|
rank3 ............|3F0|3F1|3F2|3F3|3B0----|3B1----|3B2----|3B3----................|
"""


def built(name: str) -> Program:
    schedule = dense_schedule(name)
    return schedule.configured({"costs": {}} if schedule.uses_costs else {}).build(chain(4, 8))


def lowered(program: Program) -> Program:
    home = {lane: process for process, lane in enumerate(program.lanes)}
    home |= {reduce_lane(process): process for process in range(len(home))}
    for name in ("flatten-pipes", "recompute", "embedding", "reduce-grad", "optimizer", "sends"):
        program = PASSES[name](program, home)
    return program


def test_a_batch_in_a_picture() -> None:
    program = gpipe(chain(4, 4), 1)
    assert render.RENDERERS["grid"](simulate(cut_backwards(program, shares_of_program(program, QUARTERS)))) == ROWS


@pytest.mark.parametrize("name", sorted(DENSE_SCHEDULES))
def test_every_synchronous_schedule_stays_valid(name: str) -> None:
    whole = built(name)
    rule = shares_of_program(whole, QUARTERS)
    for program in (whole, lowered(whole)):
        times, forwards, backwards = [], set(), []
        for batch in range(rule.num_shares):
            cut = cut_backwards(program, rule, batch=batch)
            check(cut)
            times.append(simulate(cut).makespan)
            atoms = list(cut.atoms())
            forwards.add(sum(atom.op == "F" for atom in atoms))
            backwards += [(a.stage % 4, a.index, a.pipe) for a in atoms if a.op in ("B", "I")]
        count = sum(atom.op == "F" for atom in program.atoms())
        assert forwards == {count}, "a forward is never left out"
        # Over a rotation, stage s of the four has the backwards of s + 1 of the four shares.
        found = [sum(stage == s for stage, _, _ in backwards) for s in range(4)]
        assert found == [count // 4 * n for n in (1, 2, 3, 4)]
        assert max(times) <= simulate(program).makespan


def test_a_stage_without_a_backward_takes_no_step() -> None:
    program = lowered(built("1f1b"))
    rule = BackwardShares(depths=(2, 4), places=(0,), order=(0, 1, 2, 3))
    steps = [
        sorted(atom.text for atom in cut_backwards(program, rule, batch=batch).atoms() if atom.op == "OPT")
        for batch in (0, 1)
    ]
    assert steps == [["2OPT0", "3OPT0"], ["0OPT0", "1OPT0", "2OPT0", "3OPT0"]]


def test_stages_of_a_graph_keep_their_gradients() -> None:
    graph = StageGraph(micro_per_batch=(4,) * 4, edges=((0, 3), (1, 2), (2, 3)))
    program = dense_schedule("graph").build(graph)
    for share in (0.25, 0.5, 0.75):
        rule = shares_of_program(program, (share, 1.0))
        for batch in (0, 1):
            check(cut_backwards(program, rule, batch=batch))


@given(
    name=st.sampled_from(["1f1b", "gpipe", "zb-h1", "interleaved", "chimera", "dualpipe-v"]),
    shares=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4),
)
def test_time_and_messages_fall_as_the_shares_do(name: str, shares: list[tuple[int, int]]) -> None:
    program = lowered(built(name))
    pipes = dense_schedule(name).num_pipes

    def cost(depths: list[int]) -> tuple[float, int, int]:
        rule = BackwardShares(
            depths=tuple(depths),
            places=tuple(unit % len(depths) for unit in range(8)),
            order=(0, 1, 2, 3),
            pipes=pipes,
            microbatches=8 // pipes,
        )
        cut = cut_backwards(program, rule)
        atoms = [atom.op for atom in cut.atoms()]
        return simulate(cut).makespan, sum(op.startswith("SEND") for op in atoms), len(atoms)

    less, more = (cost([pick(*pair) for pair in shares]) for pick in (min, max))
    assert all(a <= b for a, b in zip(less, more, strict=True))
    assert cost([4])[0] == simulate(program).makespan
    assert cost([0])[0] < cost([4])[0]


def test_only_synchronous_programs_can_be_cut() -> None:
    program = gpipe(chain(2, 2), 1)
    rule = shares_of_program(program, (0.5, 1.0))
    cut = cut_backwards(program, rule)
    with pytest.raises(ScheduleError, match="need a synchronous program, got one of semantics partial"):
        cut_backwards(cut, rule)
    with pytest.raises(ScheduleError, match="need a synchronous schedule, got one of semantics partial"):
        shares_of_program(cut, (0.5, 1.0))


def test_micro_batches_must_be_the_same_in_all_stages() -> None:
    program = dense_schedule("graph").build(StageGraph(micro_per_batch=(4, 2), edges=((0, 1),)))
    with pytest.raises(ScheduleError, match="expected one number of micro-batches for all stages"):
        shares_of_program(program, (0.5, 1.0))
    by_replica = backward_shares((0.5, 1.0), (0, 1), microbatches=None)
    check(cut_backwards(program, by_replica))
