"""Shifted critical path: 1F1B with recomputation where it does not lengthen the step (Merak, Lai et al. 2023).

    rank0  F0 F1 F2 F3     REC0 B0 F4 REC1 B1 …      REC waits for nothing but its F: it runs before the gradient comes
    rank2  F0 F1 F2 REC0 B0 REC1 B1 F3 REC2 B2 …     the first backward and the third forward change places
    rank3  F0 B0 F1 B1 …                             the last stage has its activations still: no REC

A rank in front keeps more micro-batches, so it recomputes a larger share of them, and the activations of all ranks need
about as much memory. Merak's shares count layers; here a stage is a single module, so they count micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.one_f_one_b import one_f_one_b
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program

__all__ = ["first_share", "recompute_shares"]

#: Fewest micro-batches: with fewer, the forward that changes places would be among the last.
_LEAST = 4


def one_f_one_b_shifted(graph: StageGraph, chunks: int, *, recompute_share: str | float = 1.0) -> Program:
    """One stage per rank. M must be at least 4.

    Args:
        graph: the stages.
        chunks: 1.
        recompute_share: share of the micro-batches that the first stage recomputes; the others follow from it. Other
            words (one share per stage, or auto) add no REC: `bagpipe.schedule.lowering.recompute` does.
    """
    ranks, micro = graph.num_stages, graph.microbatches
    if micro < _LEAST:
        raise ScheduleError(f"1f1b-shifted: micro-batches must be at least {_LEAST}, got {micro}")
    shares = [0.0] * ranks
    if first_share(recompute_share) is not None:
        shares = list(recompute_shares(float(recompute_share), ranks))
        if ranks > 2:
            shares[-2] = shares[-3]  # it keeps as many micro-batches as the rank before it
    plain = [list(actions) for actions in one_f_one_b(graph, chunks).lanes.values()]
    if ranks > 1:
        plain[-2][2:4] = plain[-2][3:1:-1]
    return dense_program(graph, [_recomputing(row, share) for row, share in zip(plain, shares, strict=True)])


def first_share(text: str | float) -> float | None:
    """The share of the first stage, if that is all that the text says."""
    try:
        return float(text)
    except ValueError:
        return None


def recompute_shares(first: float, num_stages: int) -> tuple[float, ...]:
    """Per stage the share of micro-batches to recompute, so that all need the memory of the first.

    Of S stages, stage i < S - 1 holds S - 1 - i micro-batches besides the current one, and so recomputes
    ``1 - (1 - first) (S - 1) / (S - 1 - i)``, at least 0; the last stage recomputes none.

    Raises:
        ScheduleError: `first` is not between 0 and 1.
    """
    if not 0 <= first <= 1:
        raise ScheduleError(f"1f1b-shifted: the recomputed share must be 0 to 1, got {first:g}")
    last = num_stages - 1
    return (*(max(0.0, 1 - (1 - first) * last / (last - stage)) for stage in range(last)), 0.0)


def _recomputing(row: Sequence[Action], share: float) -> list[Action]:
    """The row with a REC before the backwards of that share of the micro-batches, evenly spread."""
    found: list[Action] = []
    for action in row:
        index = action.index or 0
        if action.op == "B" and int((index + 1) * share) > int(index * share):
            found.append(replace(action, op="REC"))
        found.append(action)
    return found
