"""The rules of a valid program, as a table of functions that yield complaints.

    edges · complete (R1) · gradients-arrive · order (R2) · pairs, tags, messages (R4, in `messages`) ·
    versions (R7, in `versions`) · row-hazards (R8) · one-lane (R9) · gradients (R10) ·
    whole-parameters (in `residency`) · factors (in `factors`)

R3, no deadlock, is checked by `Graph.order`; R5, stages cover a model, in `cover`; R6, memory, in `memory`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from bagpipe.schedule.analysis.factors import factor_problems
from bagpipe.schedule.analysis.messages import misplaced_messages, unmatched_pairs, unmatched_tags
from bagpipe.schedule.analysis.residency import residency_problems
from bagpipe.schedule.analysis.versions import version_problems
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program, unit_counts, units_per_batch

__all__ = ["RULES", "Rule"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """A rule.

    Attributes:
        name: in messages.
        demand: what a program must satisfy, in words.
        complaints: yields the violations.
    """

    name: str
    demand: str
    complaints: Callable[[T], Iterator[str]]


def _edges_connect(program: Program) -> Iterator[str]:
    present = {(a.stage, op) for a in program.atoms() for op in (a.op, *OPS[a.op].provides)}
    for edge in program.edges:
        for key in (edge.src_key, edge.dst_key):
            if present and key not in present:
                yield f"edge {edge.text} names {key[0]}{key[1]}, which no lane performs"


def _complete(program: Program) -> Iterator[str]:
    """R1: per stage and pipe, every op covers 0 … n-1 once; F once per micro-batch; B, or I and W, once per F.

    REC appears at most once per micro-batch: those without it keep their activations. Of a partial backward, those of
    some F are missing, with their messages.
    """
    indices: dict[tuple[int, int, str, int | None], Counter[int]] = defaultdict(Counter)
    num_batches, units = program.num_batches(), unit_counts(program.stages)
    is_partial = program.semantics == "partial"
    for atom in program.atoms():
        if atom.index is not None:
            indices[atom.stage, atom.pipe, atom.op, atom.peer][atom.index] += 1
    for (stage, pipe, op, peer), counts in indices.items():
        first = Action(stage, op, 0, peer=peer, pipe=pipe)
        twice = next((index for index, count in sorted(counts.items()) if count > 1), None)
        if twice is not None:
            yield f"{replace(first, index=twice).text} appears {counts[twice]} times"
        # Either form of backward is valid; they are counted together below.
        if op not in ("B", "I", "W", "REC") and not (is_partial and op in _OF_BACKWARDS):
            yield from _gap(first, set(counts), num_batches * units_per_batch(units, (stage, op), peer))
    trained = {(stage, pipe) for stage, pipe, op, _ in indices if op in ("B", "I", "W")}
    for stage, pipe in sorted(trained):
        forwards, full = set(indices[stage, pipe, "F", None]), set(indices[stage, pipe, "B", None])
        for half in ("I", "W"):
            done = set(indices[stage, pipe, half, None])
            if full & done:
                yield f"stage {stage}: micro-batch {min(full & done)} has both B and {half}"
            if full | done != forwards and not is_partial:
                yield f"stage {stage}: micro-batch {min((full | done) ^ forwards)} must have F and either B or I and W"
        halves = set(indices[stage, pipe, "I", None]) ^ set(indices[stage, pipe, "W", None])
        if is_partial and (halves or full - forwards):
            yield f"stage {stage}: micro-batch {min(halves or full - forwards)} must have F and none or both of I and W"


#: Operations that a stage without a backward in a batch must not have.
_OF_BACKWARDS = ("SEND_B", "RECV_B", "SENDX_B", "RECVX_B", "REDUCE_GRAD", "OPT")


def _gradients_arrive(program: Program) -> Iterator[str]:
    """Where backwards are partial: a backward has those of every stage that gives it a gradient."""
    if program.semantics != "partial":
        return
    micro = program.micro_per_batch
    done: dict[int, set[tuple[int, int]]] = defaultdict(set)  # by stage: pipe and micro-batch
    for atom in program.atoms():
        if OPS[atom.op].role in ("backward", "input_grad"):
            done[atom.stage].add((atom.pipe, atom.index or 0))
    for edge in program.edges:
        if edge.src != "I" or edge.dst != "I" or edge.delay:
            continue
        stage, giver = edge.dst_stage, edge.src_stage
        for pipe, index in sorted(done[stage]):
            batch, unit = divmod(index, micro.get(stage, 1))
            for source in edge.source_units(unit, micro.get(stage, 1), micro.get(giver, 1)):
                missing = batch * micro.get(giver, 1) + source
                if (pipe, missing) not in done[giver]:
                    yield f"stage {stage}: the backward of micro-batch {index} needs that of {missing} in stage {giver}"


def _gap(first: Action, found: set[int], expected: int) -> Iterator[str]:
    missing = sorted(set(range(expected)) - found)
    if missing:
        lacking, last = (replace(first, index=index).text for index in (missing[0], expected - 1))
        yield f"{lacking} is missing; expected {first.text} to {last}"


_ORDER = (
    ("F", "B"), ("F", "I"), ("F", "REC"), ("REC", "B"), ("REC", "I"), ("I", "W"),
    ("F", "COV_A"), ("REC", "COV_A"), ("B", "COV_G"), ("W", "COV_G"),
)  # fmt: skip


def _lane_order(program: Program) -> Iterator[str]:
    """R2: in a lane, F precedes its backward, I precedes W, and REC lies between F and the backward.

    Covariances come after what makes their values.
    """
    for lane, actions in program.lanes.items():
        positions = {
            (atom.stage, atom.op, atom.index, atom.pipe): position
            for position, action in enumerate(actions)
            for atom in action.atoms
        }
        for (stage, op, index, pipe), position in positions.items():
            for first, second in _ORDER:
                if op == second and positions.get((stage, first, index, pipe), -1) >= position:
                    yield f"lane {lane}: {stage}{second}{index} comes before {stage}{first}{index}"


def _one_lane(program: Program) -> Iterator[str]:
    """R9: all actions of an op, stage and pipe are on one lane, since progress is counted per op.

    F, B, I, W, REC and the work of K-FAC of a stage share a lane, which holds its activations and parameters.
    """
    home: dict[tuple[int, str, int], tuple[str, str]] = {}
    for lane, actions in program.lanes.items():
        for atom in (atom for action in actions for atom in action.atoms):
            # Progress is counted per peer.
            kind = "compute" if atom.op in _COMPUTE else atom.op if atom.peer is None else f"{atom.op}:{atom.peer}"
            other, op = home.setdefault((atom.stage, kind, atom.pipe), (lane, atom.op))
            if other != lane:
                where = f"is on two lanes, {other} and {lane}"
                if op != atom.op:
                    where = f"is on lane {lane}, {atom.stage}{op} on {other}"
                yield f"{atom.stage}{atom.op} {where}"
                return


_COMPUTE = ("F", "B", "I", "W", "REC", "COV_A", "COV_G", "X_INV", "PRECOND")


#: (src, dst) of the row hazards: actions that touch the same rows, which the plan orders.
_ROW_HAZARDS = (("X_WRITEBACK", "X_FETCH"), ("X_ACK", "X_FETCH"), ("X_UPDATE", "X_EVICT"), ("X_UPDATE_LATE", "X_EVICT"))


def _row_hazards(program: Program) -> Iterator[str]:
    """R8: rows can be fetched after a write-back, and evicted after an update: both need a hazard edge."""
    present = {atom.op for atom in program.atoms()}
    if "X_ACK" in present:  # it follows the X_WRITEBACKs of all ranks
        present.discard("X_WRITEBACK")
    covered = {(edge.src, edge.dst) for edge in program.edges if edge.kind == "hazard" or edge.delay == 0}
    for src, dst in _ROW_HAZARDS:
        if {src, dst} <= present and (src, dst) not in covered:
            yield f"{dst} must wait for {src} by a hazard edge, there is none"


def _whole_gradients(program: Program) -> Iterator[str]:
    """R10: an optimizer acts once per batch, after all gradients of the batch, by lane order or edges; so does PRECOND.

    Row gradients come from the backwards of the rows' stage, or from X_EMBED_GRAD.
    """
    counts = unit_counts(program.stages)
    gradients: dict[tuple[str, int, int], dict[str, tuple[int, Action]]] = defaultdict(dict)  # by lane, the last one
    optimizers: list[tuple[str, int, Action]] = []
    for lane, actions in program.lanes.items():
        for position, action in enumerate(actions):
            for atom in action.atoms:
                if atom.index is None:
                    continue
                if OPS[atom.op].role in ("backward", "weight_grad"):
                    batch = atom.index // units_per_batch(counts, (atom.stage, atom.op))
                    gradients["stage", atom.stage, batch][lane] = (position, atom)
                elif atom.op == "X_EMBED_GRAD":
                    gradients["rows", 0, atom.index][lane] = (position, atom)
                elif atom.op in _OPTIMIZERS:
                    optimizers.append((lane, position, atom))
    before = _edges_before(program) if optimizers else {}
    pooled = any(kind == "rows" for kind, _, _ in gradients)
    for lane, position, atom in optimizers:
        source = ("rows", 0) if pooled and atom.op == "X_UPDATE" else ("stage", atom.stage)
        for other, (gradient_position, gradient) in gradients.get((*source, atom.index or 0), {}).items():
            ops = {gradient.op, *OPS[gradient.op].provides}
            waits = any((gradient.stage, op) in before.get((atom.stage, atom.op), ()) for op in ops)
            if not waits and (other != lane or gradient_position > position):
                where = "comes before" if other == lane else "does not wait for"
                yield f"{atom.text} {where} {gradient.text} of the same batch"


_OPTIMIZERS = ("OPT", "X_UPDATE", "PRECOND")


def _edges_before(program: Program) -> dict[tuple[int, str], set[tuple[int, str]]]:
    """(stage, op) of an optimizer -> all ops of its batch that it waits for, directly or indirectly."""
    into: dict[tuple[int, str], list[tuple[int, str]]] = defaultdict(list)
    for edge in program.edges:
        if edge.delay == 0:
            into[edge.dst_key].append(edge.src_key)
    found: dict[tuple[int, str], set[tuple[int, str]]] = {}
    for key in list(into):
        if key[1] in _OPTIMIZERS:
            reached = [key]
            for at in reached:  # grows during the iteration
                # Only through batch ops: behind micro-batch ops lies the rest of the step.
                if OPS[at[1]].unit == "batch":
                    reached += [source for source in into[at] if source not in reached]
            found[key] = set(reached)
    return found


RULES: tuple[Rule[Program], ...] = (
    Rule("edges", "both ends of every edge are performed by some lane", _edges_connect),
    Rule("complete", "every op covers every batch exactly once", _complete),
    Rule("gradients-arrive", "a partial backward has its gradients", _gradients_arrive),
    Rule("order", "forward before backward, I before W, in every lane", _lane_order),
    Rule("one-lane", "an op of a stage is on one lane", _one_lane),
    Rule("pairs", "sends and receives match one to one, in the same order between two lanes", unmatched_pairs),
    Rule("tags", "sends and receives along an edge are in the same order", unmatched_tags),
    Rule("messages", "a SEND follows the producer of its value, a RECV precedes the consumer", misplaced_messages),
    Rule("versions", "actions use the weight versions that the semantics allow, and that exist", version_problems),
    Rule("row-hazards", "row hazards have an edge", _row_hazards),
    Rule("gradients", "optimizers act after every backward of the batch", _whole_gradients),
    Rule("factors", "inverses are of whole factors, and come before the gradients they precondition", factor_problems),
    Rule("whole-parameters", "stages compute between UNSHARD and RESHARD, and step outside", residency_problems),
)
