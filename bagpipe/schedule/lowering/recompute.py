"""Recomputation by ratio: which micro-batches of a stage are recomputed, so that all ranks keep the same activations.

    "0.5,0.25,0"  one share per stage     "0.5"  of the first stage     "auto"  the least within a limit of bytes
                                          └──────────── the rows of the program ────────────┘
    shares ──recomputed_units──> micro-batches, evenly spread ──add_recompute──> a REC before each of their backwards

The rule is Merak's stage-aware recomputation (Lai et al., TPDS 2023, arXiv:2206.04959): a stage in front keeps more
micro-batches in flight, so it recomputes a larger share, and all stages need the same bytes. Merak's shares count the
layers of a stage; here they count its micro-batches, because a stage is one module and REC an action of the schedule,
which is checked, simulated and drawn. In 1F1B, S - 1 - i micro-batches are in flight on stage i besides the current
one, and the rule is Merak's formula ``1 - (1 - first) (S - 1) / (S - 1 - i)``, in whole micro-batches. For other rows
the memory analysis counts instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.memory import Memory, peak_bytes
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, Program
from bagpipe.schedule.lowering.rewrite import rewrite_lanes

__all__ = ["AUTO", "add_recompute", "least_limit", "shares_of_text", "shares_within"]

AUTO = "auto"

#: Stage, micro-batch and pipe.
_Unit = tuple[int, int | None, int]


def add_recompute(program: Program, shares: Mapping[int, float]) -> Program:
    """A REC right before the first backward (B or I) of that share of a stage's micro-batches, if it has none yet.

    Args:
        program: compute actions.
        shares: of the stages' micro-batches, 0 to 1; a stage that is not listed recomputes none.
    """
    units = recomputed_units(program.atoms(), shares)
    # Edges are between ops of all micro-batches. Where only some have a REC, the order of its lane says the same.
    edges = [
        edge
        for stage in sorted(stage for stage, share in shares.items() if share == 1)
        for edge in (
            Edge(src="F", dst="REC", src_stage=stage, dst_stage=stage),
            Edge(src="REC", dst="I", src_stage=stage, dst_stage=stage),
        )
    ]
    return rewrite_lanes(program, lambda actions: _recomputing(actions, units), edges)


def shares_of_text(
    text: str, program: Program, memory: Memory | None = None, limit_bytes: float = 0
) -> dict[int, float]:
    """The share of its micro-batches that each stage recomputes.

    Args:
        text: one number per stage; or that of the first stage and those that share its rank, from which the others
            follow (`shares_within` what this rank then keeps, a micro-batch of any stage counted as one, or all where
            that is too little); or `AUTO`.
        program: compute actions of one batch, without REC.
        memory: of AUTO: bytes of the stages; None: a micro-batch of any stage counts as one.
        limit_bytes: of AUTO: most bytes of activations of a lane; 0: `least_limit`.

    Raises:
        ScheduleError: another number of shares than stages, a share is not 0 to 1, or no share is within the limit.
    """
    stages = sorted({stage.number for stage in program.stages})
    one = Memory(activation_bytes=dict.fromkeys(stages, 1))
    if text == AUTO:
        known = memory or one
        return shares_within(program, known, limit_bytes or least_limit(program, known))
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        raise ScheduleError(f"expected recomputed shares such as 0.5 or 0.5,0.25,0, or {AUTO}, got {text!r}") from None
    if not all(0 <= share <= 1 for share in shares):
        raise ScheduleError(f"recomputed shares must be 0 to 1, got {text}")
    if len(shares) == 1:
        lanes, together = next(group for group in _groups(program) if stages[0] in group[1])
        given = dict.fromkeys(together, shares[0])
        return {**shares_within(program, one, _peak(program, lanes, one, given), or_all=True), **given}
    if len(shares) != len(stages):
        raise ScheduleError(f"expected 1 recomputed share or {len(stages)}, one per stage, got {text}")
    return dict(zip(stages, shares, strict=True))


def shares_within(program: Program, memory: Memory, limit_bytes: float, *, or_all: bool = False) -> dict[int, float]:
    """Per stage the least share with which no lane keeps more activations; with one micro-batch less a lane would.

    Stages that share a lane have the same share.

    Args:
        program: compute actions of one batch, without REC.
        memory: bytes of the stages' micro-batches.
        limit_bytes: most of a lane.
        or_all: where a lane needs more even then, its stages recompute everything.

    Raises:
        ScheduleError: a lane needs more even if it recomputes everything, and not `or_all`.
    """
    found: dict[int, float] = {}
    for lanes, stages in _groups(program):
        # All actions of these stages: those of other lanes would only take time.
        atoms = [atom for lane in lanes for action in program.lanes[lane] for atom in action.atoms]
        count = max(len({atom.index for atom in atoms if atom.stage == stage}) for stage in stages)
        if not or_all and _peak(program, lanes, memory, dict.fromkeys(stages, 1.0), atoms) > limit_bytes:
            lane = max(lanes, key=lambda each: _peak(program, [each], memory, dict.fromkeys(stages, 1.0), atoms))
            least = _peak(program, [lane], memory, dict.fromkeys(stages, 1.0), atoms)
            raise ScheduleError(
                f"stage {max(stages & _stages_on(program, lane))} is on a rank that keeps {least:g} bytes of "
                f"activations even if it recomputes all micro-batches, got a limit of {limit_bytes:g}"
            )
        below, fits = -1, count
        while fits - below > 1:
            middle = (below + fits) // 2
            if _peak(program, lanes, memory, dict.fromkeys(stages, middle / count), atoms) <= limit_bytes:
                fits = middle
            else:
                below = middle
        found |= dict.fromkeys(stages, fits / count)
    return found


def least_limit(program: Program, memory: Memory) -> float:
    """Bytes that the rank of the last stage keeps without recomputation, or a rank's that cannot keep as few."""
    stages = {stage.number for stage in program.stages}
    last = _peak(program, _lanes_of(program, max(stages)), memory, {})
    return max(last, _peak(program, program.lanes, memory, dict.fromkeys(stages, 1.0)))


def recomputed_units(atoms: Iterable[Action], shares: Mapping[int, float]) -> frozenset[_Unit]:
    """(stage, micro-batch, pipe) of those shares, evenly spread, without those that have a REC already."""
    backwards: dict[tuple[int, int], set[int]] = {}
    known: set[_Unit] = set()
    for atom in atoms:
        if OPS[atom.op].role in ("backward", "input_grad") and shares.get(atom.stage):
            backwards.setdefault((atom.stage, atom.pipe), set()).add(atom.index or 0)
        elif atom.op == "REC":
            known.add((atom.stage, atom.index, atom.pipe))
    found = {
        (stage, index, pipe)
        for (stage, pipe), indexes in backwards.items()
        for position, index in enumerate(sorted(indexes))
        if _whole(shares[stage] * (position + 1)) > _whole(shares[stage] * position)
    }
    return frozenset(found - known)


def _whole(micro: float) -> int:
    """Micro-batches without a part, where j / count times count is j."""
    return math.floor(micro + 1e-9)


def _recomputing(actions: Iterable[Action], units: frozenset[_Unit]) -> Iterator[Action]:
    for action in actions:
        for atom in action.atoms:
            if OPS[atom.op].role in ("backward", "input_grad") and (atom.stage, atom.index, atom.pipe) in units:
                yield dataclasses.replace(atom, op="REC", parts=())
        yield action


def _peak(
    program: Program,
    lanes: Collection[str],
    memory: Memory,
    shares: Mapping[int, float],
    atoms: Iterable[Action] | None = None,
) -> float:
    """Most bytes of some lanes; `atoms`: all of the stages that recompute; default: all of the program."""
    units = recomputed_units(program.atoms() if atoms is None else atoms, shares)
    return max(peak_bytes(tuple(_recomputing(program.lanes[lane], units)), memory) for lane in lanes)


def _stages_on(program: Program, lane: str) -> frozenset[int]:
    return frozenset(atom.stage for action in program.lanes[lane] for atom in action.atoms)


def _lanes_of(program: Program, stage: int) -> Sequence[str]:
    return [lane for lane in program.lanes if stage in _stages_on(program, lane)]


def _groups(program: Program) -> list[tuple[list[str], frozenset[int]]]:
    """Lanes and stages that belong together: those of a lane, and of all lanes that run one of its stages."""
    groups: list[tuple[list[str], frozenset[int]]] = []
    for lane in program.lanes:
        lanes, stages = [lane], _stages_on(program, lane)
        for group in [group for group in groups if group[1] & stages]:
            groups.remove(group)
            lanes, stages = group[0] + lanes, stages | group[1]
        groups.append((lanes, stages))
    return groups
