"""Programs with second-order work, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from bagpipe.schedule.analysis.costs import Costs
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.embedding import add_embedding
from bagpipe.schedule.lowering.optimizer import add_optimizer, add_reduce_grad, holders_of
from bagpipe.schedule.lowering.precondition import Placement, Preconditioning, place_preconditioning
from bagpipe.schedule.lowering.recompute import add_recompute
from bagpipe.schedule.lowering.rewrite import flatten_pipes
from bagpipe.schedule.registry import DENSE_SCHEDULES
from bagpipe.schedule.schedule import AsynchronousSchedule, DynamicSchedule

#: Schedules that take second-order work.
ORDERED = [n for n, s in DENSE_SCHEDULES.items() if not isinstance(s, AsynchronousSchedule | DynamicSchedule)]

_TIMES = st.sampled_from([0, 1, 2, 3, 0.5, 0.1, 4.75])
#: Ops of the steps and of second-order work; computations take some time.
_OPS = ("COV_A", "COV_G", "X_INV", "PRECOND", "X_BCAST", "X_KL", "REDUCE_COV", "REDUCE_GRAD", "OPT", "X_EMBED")


def plain(
    name: str,
    stages: int,
    micro: int,
    *,
    processes: bool = True,
    replicas: int = 1,
    recompute: float = 0,
    embedding: bool = False,
) -> tuple[Program, dict[str, int]]:
    """A chain's program with reductions and steps, and the processes of its lanes."""
    schedule = DENSE_SCHEDULES[name]
    program = add_recompute(schedule.build(chain(stages, micro)), dict.fromkeys(range(stages), recompute))
    program = flatten_pipes(program)
    home = {lane: number if processes else 0 for number, lane in enumerate(program.lanes)}
    if embedding:
        program = add_embedding(program, home, [(0, True)])
    if replicas * schedule.num_pipes > 1:
        program = add_reduce_grad(program, home)
    return add_optimizer(program, home), home


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program before and after, and what it was made with.

    Attributes:
        base: the program without second-order work.
        program, placement: with it.
        work, costs: what was asked for.
        is_bounded: `Placement.bound` holds; see `lowering.precondition`.
    """

    base: Program
    program: Program
    placement: Placement
    work: Preconditioning
    costs: Costs
    is_bounded: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Schedules, sizes, processes, layers and durations."""
    name = draw(st.sampled_from(ORDERED))
    stages = draw(st.sampled_from([2, 4])) * DENSE_SCHEDULES[name].chunks
    processes, replicas = draw(st.booleans()), draw(st.sampled_from([1, 2]))
    base, home = plain(
        name,
        stages,
        8,
        processes=processes,
        replicas=replicas,
        recompute=draw(st.sampled_from([0, 0.5, 1])),
        embedding=draw(st.booleans()),
    )
    layers = {stage: draw(st.integers(0, 3)) for stage in range(1, stages)} | {0: draw(st.integers(1, 3))}
    work = Preconditioning(
        layers=layers, lag=draw(st.sampled_from([0, 1])), limits=draw(st.booleans()), summed=draw(st.booleans())
    )
    costs: dict[str, float] = {op: draw(_TIMES) for op in _OPS}
    costs |= {f"{s.number}{op}": draw(st.sampled_from([1, 2, 0.7])) for s in base.stages for op in "FBIW"}
    program, placement = place_preconditioning(base, home, work, costs)
    lanes = [{holder.lane for holder in holders} for holders in holders_of(base, home)]
    return Case(
        base=base,
        program=program,
        placement=placement,
        work=work,
        costs=costs,
        is_bounded=max(map(len, lanes)) == 1 and (processes or not work.summed),
    )
