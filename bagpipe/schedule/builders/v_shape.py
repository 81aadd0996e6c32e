"""V-shaped schedules with less memory than zb-v (Qi et al., Pipeline Parallelism with Controllable Memory, 2024).

v-half  half of 1F1B's activation memory: P // 2 + 1 micro-batches per rank, for about half of its bubble
v-min   a third: (P + 4) // 3 micro-batches per rank, for about two thirds of its bubble

Rank r holds stages r and 2P - 1 - r. With F = I = W = 1 the six actions of a micro-batch on a rank repeat every six
slots and never collide. How long a micro-batch lives on a rank is the memory, so the hops say how much there is:

                       F down   F up   I down   I up                              lives about
    v-min    hop in      1       1       1       1     slots per rank             4 P slots
    v-half               1       2       1       2                                6 P slots

    F(down) ──turn──> F(up) ──top──> I(up stage, down the ranks) ──turn──> I(down stage, up the ranks); W in free slots

After a rank's last F no memory grows, so I runs as early as it can, and W fills the gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program

#: Slots after which the actions of the next micro-batch repeat those of the last.
_PERIOD = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hops:
    """Slots of a micro-batch's way: per hop away from rank 0, per hop towards it, and waits at the two turns.

    The waits keep the actions of a rank apart, modulo the period.
    """

    down: int
    up: int
    forward_turn: int = 0
    backward_turn: int = 0


def v_half(graph: StageGraph, chunks: int) -> Program:
    """Rank r holds stages r and 2P - 1 - r; at most P // 2 + 1 micro-batches, each of two stages, in flight."""
    is_odd = graph.num_stages // 2 % 2
    turns = (0, 1) if is_odd else (3, 4)
    return _v_shape(graph, _Hops(down=1, up=2, forward_turn=turns[0], backward_turn=turns[1]))


def v_min(graph: StageGraph, chunks: int) -> Program:
    """Rank r holds stages r and 2P - 1 - r; at most (P + 4) // 3 micro-batches, each of two stages, in flight."""
    wait = 0 if graph.num_stages // 2 % 3 else 2
    return _v_shape(graph, _Hops(down=1, up=1, forward_turn=wait, backward_turn=wait))


def _v_shape(graph: StageGraph, hops: _Hops) -> Program:
    rows = []
    for rank in range(graph.num_stages // 2):
        slots = _slots(graph.num_stages, rank, hops)
        timed = [
            (slot + _PERIOD * index, Action(stage, op, index))
            for (stage, op), slot in slots.items()
            for index in range(graph.microbatches)
        ]
        rows.append([action for _, action in sorted(timed, key=lambda cell: cell[0])])
    return dense_program(graph, _drained(rows, last_stage=graph.num_stages - 1))


def _slots(num_stages: int, rank: int, hops: _Hops) -> dict[tuple[int, str], int]:
    """(stage, op) -> slot of the first micro-batch on a rank."""
    last, up = num_stages // 2 - 1, num_stages - 1 - rank
    turn = hops.down * last + 1 + hops.forward_turn
    top = turn + hops.up * last + 1
    back = top + hops.down * last + 1 + hops.backward_turn
    slots = {
        (rank, "F"): hops.down * rank,
        (up, "F"): turn + hops.up * (last - rank),
        (up, "I"): top + hops.down * rank,
        (rank, "I"): back + hops.up * (last - rank),
    }
    taken = {slot % _PERIOD for slot in slots.values()}
    free = [slot for slot in range(_PERIOD) if slot not in taken]
    waits = [
        tuple((slot - slots[stage, "I"]) % _PERIOD for stage, slot in zip((up, rank), order, strict=True))
        for order in (free, free[::-1])
    ]
    best = min(waits, key=sum)  # W as soon as possible after I: it frees the activations
    return slots | {(stage, "W"): slots[stage, "I"] + wait for stage, wait in zip((up, rank), best, strict=True)}


def _drained(rows: Sequence[Sequence[Action]], last_stage: int) -> list[list[Action]]:
    """The rows with a new order after each row's last F: every I as early as it can run, W in the gaps (unit times)."""
    ends = [max(n for n, action in enumerate(row) if action.op == "F") + 1 for row in rows]
    heads = [list(row[:end]) for row, end in zip(rows, ends, strict=True)]
    tails = [sorted(row[end:], key=lambda action: action.op) for row, end in zip(rows, ends, strict=True)]  # I before W
    built: list[list[Action]] = [[] for _ in rows]
    done: set[tuple[int, str, int | None]] = set()

    def is_ready(action: Action) -> bool:
        stage, index = action.stage, action.index
        if action.op == "F":
            return stage == 0 or (stage - 1, "F", index) in done
        if action.op == "W":
            return (stage, "I", index) in done
        return (stage, "F", index) in done and (stage == last_stage or (stage + 1, "I", index) in done)

    while any(heads) or any(tails):
        slot = []
        for head, tail, row in zip(heads, tails, built, strict=True):
            found = next((action for action in (head[:1] or tail) if is_ready(action)), None)
            if found is not None:
                (head or tail).remove(found)
                row.append(found)
                slot.append(found)
        done |= {(action.stage, action.op, action.index) for action in slot}
    return built
