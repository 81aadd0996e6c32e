"""`add_agreement`: all stages of all ranks agree on a batch before the first of them makes its optimizer step.

    compute lane   … B  B  X_EMBED_GRAD  X_MEASURE           OPT      X_MEASURE: of every stage, before the lane's OPTs
    reduce lane    …          REDUCE_GRAD           X_AGREE           X_AGREE: one per process, all take part in it

    X_MEASURE(b) <- REDUCE_GRAD(b), or W of b      X_AGREE(b) <- X_MEASURE(b), X_EMBED_GRAD(b) of all processes
    OPT(b) <- X_AGREE(b)

What they agree on is not said here: that the batch is finite, and the norms of its gradients. No cycle can come from
this. Whatever comes before a backward of batch b in its lane needs no step of batch b, or the schedule had that cycle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Edge, OpKey, Program
from bagpipe.schedule.lowering.optimizer import Holder, holders_of, on_reduce_lanes

__all__ = ["add_agreement"]


def add_agreement(program: Program, home: Mapping[str, int]) -> Program:
    """The program with an X_MEASURE per set of parameters and an X_AGREE per process.

    Args:
        program: one batch with embedding stages and OPTs, and with REDUCE_GRADs where several ranks hold a stage;
            without messages, and without gathers behind the OPTs.
        home: lane -> the process that runs it.
    """
    sets = holders_of(program, home)
    reduced = {atom.stage for atom in program.atoms() if atom.op == "REDUCE_GRAD"}
    embeddings = {
        home[lane]: Holder(0, atom.stage, lane)
        for lane, row in program.lanes.items()
        for action in row
        for atom in action.atoms
        if atom.op == "X_EMBED_GRAD"
    }
    lanes, edges = dict(program.lanes), list[Edge]()
    for lane in dict.fromkeys(holders[0].lane for holders in sets):
        row = lanes[lane]
        measures = (Action(holders[0].stage, "X_MEASURE", 0) for holders in sets if holders[0].lane == lane)
        first = next(place for place, action in enumerate(row) if action.op == "OPT")
        lanes[lane] = (*row[:first], *measures, *row[first:])
    complete: list[OpKey] = [(each.stage, "X_EMBED_GRAD") for each in embeddings.values()]
    for holders in sets:
        own = holders[0].stage
        stages = dict.fromkeys(holder.stage for holder in holders)
        sources = [(own, "REDUCE_GRAD")] if own in reduced else [(stage, "W") for stage in stages]
        edges += [Edge(src=op, src_stage=stage, dst="X_MEASURE", dst_stage=own) for stage, op in sources]
        complete.append((own, "X_MEASURE"))
        process = home[holders[0].lane]
        edges.append(Edge(src="X_AGREE", src_stage=embeddings[process].stage, dst="OPT", dst_stage=own))
    for embedding in embeddings.values():
        edges += [Edge(src=op, src_stage=stage, dst="X_AGREE", dst_stage=embedding.stage) for stage, op in complete]
    program = dataclasses.replace(program, lanes=lanes)
    return on_reduce_lanes(program, home, [[each] for _, each in sorted(embeddings.items())], "X_AGREE", edges)
