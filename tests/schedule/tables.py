"""Hand-written tables and PyTorch's."""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import Any

from hypothesis import strategies as st
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from bagpipe.schedule.ir.actions import Action, parse
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program

#: PyTorch's name -> stages per rank, except 1F1B, whose table is wrong.
TORCH = {
    "GPipe": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
#: (ranks, micro-batches) supported by all of them.
TORCH_SIZES = [(2, 4), (2, 8), (4, 8), (4, 10)]


def lanes(**cells: str) -> dict[str, tuple[Action, ...]]:
    """A program from text: one lane per line, cells separated by spaces."""
    return {lane: tuple(parse(cell) for cell in text.split()) for lane, text in cells.items()}


def read_csv(text: str) -> dict[str, tuple[Action, ...]]:
    """Lane by lane, what `render.csv` wrote; without a header the lanes are ``rank0``, …."""
    rows = list(csv.reader(io.StringIO(text)))
    names = [f"rank{number}" for number in range(len(rows))]
    if rows[0][0].startswith("#resource="):
        names, rows = [rows[0][0].removeprefix("#resource="), *rows[0][1:]], rows[1:]
    return {name: tuple(parse(cell) for cell in cells if cell) for name, cells in zip(names, rows, strict=True)}


def torch_rows(name: str, ranks: int, micro: int, *, comms: bool = False) -> dict[int, list[Any]]:
    """Rank -> PyTorch's own actions, with idle steps (None)."""
    rows = get_schedule_ops(name, ranks, micro, TORCH[name], with_comms=comms)
    return {rank: list(row) for rank, row in enumerate(rows)}


def torch_text(rows: dict[int, list[Any]]) -> str:
    """The table as PyTorch writes it to a file."""
    return "".join(",".join("" if cell is None else str(cell) for cell in row) + "\n" for row in rows.values())


def with_torch_reductions(program: Program) -> Program:
    """The rows with an unindexed REDUCE_GRAD after each stage's last gradient, as in PyTorch's lowering."""
    lowered: dict[str, tuple[Action, ...]] = {}
    for lane, actions in program.lanes.items():
        row: list[Action] = []
        for place, action in enumerate(actions):
            row.append(action)
            later = {atom.stage for cell in actions[place + 1 :] for atom in cell.atoms if atom.op in ("B", "W")}
            row += [
                Action(atom.stage, "REDUCE_GRAD")
                for atom in action.atoms
                if atom.op in ("B", "W") and atom.stage not in later
            ]
        lowered[lane] = tuple(row)
    return dataclasses.replace(program, lanes=lowered)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, dict[str, int]]:
    """A valid program of any DAG with any micro-batch sizes, stages spread over lanes, and lanes over processes.

    The order is that of a random run: each step draws one of the runnable actions.
    """
    size = draw(st.integers(1, 5))
    pairs = [(src, dst) for dst in range(size) for src in range(dst)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    graph = StageGraph(
        micro_per_batch=tuple(draw(st.lists(st.integers(1, 4), min_size=size, max_size=size))), edges=tuple(edges)
    )
    lane_of = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    split = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    done: set[Action] = set()
    todo = [Action(s, "F", m) for s in range(size) for m in range(graph.micro_per_batch[s])]
    todo += [
        Action(s, op, m)
        for s in range(size)
        for op in ("IW" if split[s] else "B")
        for m in range(graph.micro_per_batch[s])
    ]
    rows: list[list[Action]] = [[] for _ in range(max(lane_of) + 1)]
    while todo:
        ready = [action for action in todo if _is_ready(graph, action, done)]
        action = ready[draw(st.integers(0, len(ready) - 1))]
        todo.remove(action)
        done.add(action)
        rows[lane_of[action.stage]].append(action)
    program = dense_program(graph, rows)
    return program, {lane: draw(st.integers(0, 2)) for lane in program.lanes}


def _is_ready(graph: StageGraph, action: Action, done: set[Action]) -> bool:
    stage, m, own = action.stage, action.index or 0, graph.micro_per_batch[action.stage]

    def overlapping(other: int) -> list[int]:
        units = graph.micro_per_batch[other]
        return [n for n in range(units) if n * own < (m + 1) * units and m * units < (n + 1) * own]

    if action.op == "F":
        return all(Action(p, "F", n) in done for p in graph.producers[stage] for n in overlapping(p))
    if action.op == "W":
        return Action(stage, "I", m) in done
    behind = [(c, n) for c in graph.consumers[stage] for n in overlapping(c)]
    return Action(stage, "F", m) in done and all(
        Action(c, "I", n) in done or Action(c, "B", n) in done for c, n in behind
    )
