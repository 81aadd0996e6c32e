"""Zero bubble: separate input and weight gradients; weight gradients fill idle time (Qi et al. 2024).

zb-h1                   1F1B's order and memory; W fills part of the drain
zb-h2                   about twice as many forwards ahead: no rank waits if F = I = W and M >= 2P - 1
interleaved-zero-bubble zb-h1 on v stages per rank in a loop, in the rounds of `interleaved`
zb-v                    two stages per rank in a V: rank r holds stages r and 2P - 1 - r; no rank waits if F = I = W
                        and M >= 2P - 1
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.schedule.builders.interleaved import loop_turns, round_size
from bagpipe.schedule.builders.row import Row
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program


def zb_h1(graph: StageGraph, chunks: int) -> Program:
    """One stage per rank. Rank r delays r weight gradients, so every rank has ``min(M, P)`` micro-batches in flight."""
    last, turns = graph.num_stages - 1, graph.microbatches
    rows = [_delayed([stage] * turns, [stage] * turns, ahead=last - stage, delay=stage) for stage in range(last + 1)]
    return dense_program(graph, rows)


def zb_h2(graph: StageGraph, chunks: int) -> Program:
    """One stage per rank. Forwards ahead and delay of W are twice those of zb-h1: ``min(M, 2P - 1)`` in flight."""
    last, turns = graph.num_stages - 1, graph.microbatches
    rows = [
        _delayed([stage] * turns, [stage] * turns, ahead=2 * (last - stage), delay=2 * stage)
        for stage in range(last + 1)
    ]
    return dense_program(graph, rows)


def interleaved_zero_bubble(graph: StageGraph, chunks: int) -> Program:
    """Stage s on rank s mod P. M must be a multiple of the number of rounds, ``max(1, M // P)``."""
    ranks, size = graph.num_stages // chunks, round_size("interleaved-zero-bubble", graph, chunks)
    rows = [
        _delayed(*loop_turns(graph, chunks, rank, size), ahead=(chunks - 1) * size + ranks - 1 - rank, delay=rank)
        for rank in range(ranks)
    ]
    return dense_program(graph, rows)


def _delayed(forwards: Sequence[int], backwards: Sequence[int], *, ahead: int, delay: int) -> tuple[Action, ...]:
    """`ahead` forwards; then F, I and the oldest W in turn, where the first `delay` turns have no W.

    Args:
        forwards, backwards: stages in the order of their actions, equally many.
        ahead: forwards before the first turn; at most all.
        delay: weight gradients that wait at any time.
    """
    row = Row()
    ahead = min(ahead, len(forwards))
    for stage in forwards[:ahead]:
        row.add(stage, "F")
    for turn, stage in enumerate(backwards):
        for forward in forwards[turn + ahead : turn + ahead + 1]:
            row.add(forward, "F")
        row.add(stage, "I")
        if turn >= delay:
            row.weight()
    for _ in range(delay):
        row.weight()
    return row.actions


def zb_v(graph: StageGraph, chunks: int) -> Program:
    """Rank r holds stages r and 2P - 1 - r. A batch too small to fill the V is the beginning of one that does."""
    ranks = graph.num_stages // 2
    micro = max(2 * ranks - 1, graph.microbatches)
    rows = []
    for rank in range(ranks):
        row, down, up = Row(), rank, graph.num_stages - 1 - rank
        row.add(down, "F", 2 * (ranks - rank) - 1)
        for _ in range(rank):
            row.add(up, "F")
            row.add(down, "F")
        row.add(up, "FIW", ranks - rank)
        for turn in range(micro - ranks):
            row.add(down, "F" if turn <= micro - 2 * ranks + rank else "")
            row.add(down, "IW")
            row.add(up, "FIW")
        for _ in range(rank):
            row.add(down, "I")
            row.add(up, "I")
        row.add(down, "IW", ranks - rank)
        row.add(up, "W", rank)
        row.add(down, "W", rank)
        rows.append([action for action in row.actions if (action.index or 0) < graph.microbatches])
    return dense_program(graph, rows)
