"""PyTorch's pipelining tables: the CSV of torch.distributed.pipelining to a program, and back.

    0F0,0F1,,0B0,,0B1          one row per rank, one action per cell, an empty cell is an idle step
    ,1F0,1B0,1F1,1B1,          compute only, or with SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD

The stages of a table form a chain, the only graph that PyTorch runs. PyTorch's parser reads a prefix of a cell, so
`to_torch` writes only cells that it reads in full. `from_torch` rejects tables that are known to mean something else.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.ir.actions import Action, parse, torch_reads
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, chain, dense_program
from bagpipe.schedule.lowering.sends import add_sends
from bagpipe.schedule.schedule import DenseSchedule

__all__ = ["from_torch", "table_schedule", "to_torch", "torch_cells"]

#: Roles of actions that lowering adds.
_LOWERED = ("send", "recv", "weights")

#: In tables of the zero-bubble papers B is the input half of a backward, and BW the whole.
_OTHER_NAMES = "tables that call the input half B, and the whole BW, must be renamed: B to I, then BW to B"


def torch_cells(text: str) -> dict[str, tuple[Action | None, ...]]:
    """Lane (``rank0``, …) -> cells with idle steps (None), which pace `add_sends`.

    Raises:
        ScheduleError: a cell is not an action of PyTorch's, or a rank has no action.
    """
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"not a table: {error}") from None
    found = {f"rank{rank}": tuple(_cell(rank, cell.strip()) for cell in cells) for rank, cells in enumerate(rows)}
    if not found:
        raise ScheduleError("expected a row per rank, got an empty table")
    for lane, cells in found.items():
        if not any(cells):
            raise ScheduleError(f"{lane} has no action: expected a row per rank and no empty ones")
    return found


def _cell(rank: int, text: str) -> Action | None:
    if not text:
        return None
    try:
        action = parse(text)
    except ScheduleError as error:
        hint = f"; {_OTHER_NAMES}" if "BW" in text else ""
        raise ScheduleError(f"rank {rank}: {error}{hint}") from None
    if not torch_reads(action):
        raise ScheduleError(f"rank {rank}: {text} is not an action of PyTorch's tables")
    return action


def from_torch(text: str, *, num_stages: int, microbatches: int) -> Program:
    """The checked program of a table.

    Args:
        text: the table, in either format; idle steps are dropped.
        num_stages: stages of the chain.
        microbatches: micro-batches per batch.

    Raises:
        ScheduleError: the text is not a table of PyTorch's, names an unknown stage or micro-batch, or is not a valid
            schedule.
    """
    rows = [[cell for cell in cells if cell is not None] for cells in torch_cells(text).values()]
    for rank, row in enumerate(rows):
        for atom in (atom for action in row for atom in action.atoms):
            if atom.stage >= num_stages:
                raise ScheduleError(f"rank {rank}: {atom.text}: expected stages 0 to {num_stages - 1}")
            if OPS[atom.op].unit == "micro" and (atom.index is None or atom.index >= microbatches):
                raise ScheduleError(f"rank {rank}: {atom.text}: expected micro-batches 0 to {microbatches - 1}")
    _refuse_other_names(rows)
    program = dense_program(chain(num_stages, microbatches), rows)
    check(program)
    for complaint in (*_early_reductions(program), *_missing_messages(program)):
        raise ScheduleError(complaint)
    return program


def table_schedule(name: str, text: str) -> DenseSchedule:
    """A table as a dense schedule. Its messages are dropped, since lowering adds them.

    Args:
        name: name of the schedule in messages.
        text: the table.

    Raises:
        ScheduleError: the text is not a table of PyTorch's. A mismatch with the stages is found by `build`.
    """
    cells = torch_cells(text)

    def build(graph: StageGraph, chunks: int) -> Program:
        try:
            program = from_torch(text, num_stages=graph.num_stages, microbatches=graph.microbatches)
        except ScheduleError as error:
            raise ScheduleError(f"{name}: {error}") from None
        return dense_program(graph, _compute_rows(program))

    return DenseSchedule(name=name, summary="a table of PyTorch's", builder=build, ranks=len(cells))


def _compute_rows(program: Program) -> list[list[Action]]:
    return [[a for a in row if OPS[a.op].role not in _LOWERED] for row in program.lanes.values()]


def _early_reductions(program: Program) -> Iterator[str]:
    """REDUCE_GRAD comes once per stage, after its last gradient."""
    for lane, actions in program.lanes.items():
        reduced: set[int] = set()
        for atom in (atom for action in actions for atom in action.atoms):
            if atom.stage in reduced and (atom.op == "REDUCE_GRAD" or OPS[atom.op].role in ("backward", "weight_grad")):
                yield f"{lane}: {atom.text} comes after REDUCE_GRAD of stage {atom.stage}"
            if atom.op == "REDUCE_GRAD":
                reduced.add(atom.stage)


def _missing_messages(program: Program) -> Iterator[str]:
    """A table has all SENDs between ranks or none. The checker matches their RECVs."""
    sends = {atom for atom in program.atoms() if OPS[atom.op].role == "send"}
    if not sends:
        return
    rows = map(tuple, _compute_rows(program))
    compute = dataclasses.replace(program, lanes=dict(zip(program.lanes, rows, strict=True)))
    home = {lane: rank for rank, lane in enumerate(compute.lanes)}
    needed = [atom for atom in add_sends(compute, home, torch_names=True).atoms() if OPS[atom.op].role == "send"]
    for send in needed:
        if send not in sends:
            yield f"{send.text} is missing; expected all messages between ranks, or none"
    for send in sorted(sends - set(needed), key=lambda atom: atom.text):
        yield f"{send.text}: no value passes there between two ranks"


def _refuse_other_names(rows: Sequence[Sequence[Action]]) -> None:
    """A micro-batch with B and W: its B cannot be a whole backward."""
    atoms = [atom for row in rows for action in row for atom in action.atoms]
    whole = {(atom.stage, atom.index) for atom in atoms if atom.op == "B"}
    for atom in atoms:
        if atom.op == "W" and (atom.stage, atom.index) in whole:
            raise ScheduleError(f"{atom.text}: micro-batch has both B, a whole backward, and W; {_OTHER_NAMES}")


def to_torch(program: Program) -> str:
    """The table of a program of one batch; each lane is a row.

    Raises:
        ScheduleError: PyTorch cannot run the program or would misread it; the message names the first obstacle.
    """
    for complaint in _obstacles(program):
        raise ScheduleError(f"not a table of PyTorch's: {complaint}")
    check(program)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for actions in program.lanes.values():
        writer.writerow([_text(action) for action in actions])
    return out.getvalue()


def _text(action: Action) -> str:
    """The action's text, without the index for weight actions."""
    return Action(action.stage, action.op).text if OPS[action.op].role == "weights" else action.text


def _obstacles(program: Program) -> Iterator[str]:
    lane_of: dict[int, str] = {}
    for lane, actions in program.lanes.items():
        for action in actions:
            if not torch_reads(action):
                yield f"{action.text} has a name or suffix that it does not know"
            for atom in action.atoms:
                if lane_of.setdefault(atom.stage, lane) != lane:
                    yield f"{atom.text} is on {lane}, others of its stage on {lane_of[atom.stage]}"
    if set(lane_of) != set(range(len(lane_of))):
        yield f"stages must be 0 to {len(lane_of) - 1}, got {sorted(lane_of)}"
    counts = {stage.number: stage.micro_per_batch for stage in program.stages}
    for number in sorted(lane_of):
        if counts.get(number, 1) != counts.get(0, 1):
            yield f"stage {number} has {counts.get(number, 1)} micro-batches, stage 0 has {counts.get(0, 1)}"
    passes = {(edge.src_stage, edge.dst_stage) for edge in program.edges if edge.src == edge.dst == "F"}
    for src, dst in sorted(passes ^ {(stage, stage + 1) for stage in range(len(lane_of) - 1)}):
        yield f"edge {src}-{dst} is {'no part of' if (src, dst) in passes else 'missing in'} a chain"
    if program.num_batches() > 1:
        yield f"it has {program.num_batches()} batches"
