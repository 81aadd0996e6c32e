"""Dense programs by name on a chain of stages, and the values predicted by closed forms."""

from __future__ import annotations

from collections.abc import Mapping

from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.simulate import Simulation, simulate
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.registry import DENSE_SCHEDULES

#: (ranks, micro-batches) of the closed forms.
SIZES = [(p, m) for p in (2, 4, 8, 16) for m in (p, 2 * p, 4 * p)]


def dense(name: str, num_ranks: int, micro: int, chunks: int | None = None) -> Program:
    schedule = DENSE_SCHEDULES[name]
    return schedule.build(chain(num_ranks * schedule.chunks_or_default(chunks), micro), chunks)


def run(
    name: str,
    num_ranks: int,
    micro: int,
    *,
    chunks: int | None = None,
    costs: Mapping[str, float] | None = None,
    latency: float = 0,
) -> Simulation:
    """Simulation of a program that passed the check."""
    program = dense(name, num_ranks, micro, chunks)
    check(program)
    return simulate(program, costs, latency=latency)


def peaks(result: Simulation) -> list[int]:
    return [use.peak_in_flight for use in result.lanes.values()]


def rows(program: Program) -> list[str]:
    """Comma-separated actions per lane."""
    return [",".join(action.text for action in actions) for actions in program.lanes.values()]


def spelt(text: str, stage: int) -> str:
    """Full texts of short ones: ``F0 F1 B0`` -> ``1F0,1F1,1B0``."""
    return ",".join(f"{stage}{cell}" for cell in text.split())
