"""`turns`: what the lanes repeat when forwards of batch b + 1 precede backwards of batch b, rows included.

    one process   compute0   F B …  X_EMBED(b+1) F(b+1) B …  X_EMBED_GRAD OPT          the row update of b follows
    several       compute0   the same, with RECV and SEND
                  compute2   F B F B  X_EMBED(b), the row update of b - 1,  F B …  X_EMBED_GRAD OPT

A lookup of batch b + 1 comes before the row update of batch b in the lane of every embedding stage, and after that of
batch b - 1. A process where no pipe begins looks nothing up, but owns rows: the update of batch b - 1 would keep it
waiting for the last backward of stage 0, which ends about s micro-batches after its own of stage s. So it comes s
micro-batches later. Every part of a stage has the order of the stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.step_program import EmbeddingStage
from bagpipe.schedule.lowering.sends import add_sends

__all__ = ["turn_loop", "turns"]


def turns(
    program: Program, loop: Loop, embedding_stages: tuple[EmbeddingStage, ...], home: Mapping[str, int]
) -> Mapping[str, tuple[Template, ...]]:
    """Lane -> its templates of one turn, messages included.

    Args:
        program: one batch of the stages, without messages.
        loop: the order and the offsets of their forwards and backwards; row s is that of stage s.
        embedding_stages: of the program.
        home: lane -> the process that runs it.
    """
    rows = tuple(loop.lanes.values())
    parameters = {stage.number: stage.parameters for stage in program.stages}
    lanes: dict[str, tuple[Template, ...]] = {}
    for position, (lane, actions) in enumerate(program.lanes.items()):
        repeated = {action.index for action in actions if action.op == "REC"}
        turn = [_template(action) for action in actions if action.op not in ("F", "B", "REC", "X_EMBED")]
        for stage in {action.stage for action in actions if action.op == "F"}:  # one, and none in a lane of exchanges
            computed: list[Template] = []
            for template in rows[parameters[stage]]:
                if template.op == "B" and template.unit in repeated:
                    computed.append(Template(op="REC", stage=stage, unit=template.unit, offset=template.offset))
                if template.op in ("F", "B"):
                    computed.append(dataclasses.replace(template, stage=stage, version_lag=None))
            turn = [*computed, *turn]
            for embedding in (each for each in embedding_stages if each.position == position):
                place, offset = _lookup(turn, parameters[stage], has_examples=bool(embedding.pipes))
                turn.insert(place, Template(op="X_EMBED", stage=embedding.number, offset=offset))
        lanes[lane] = tuple(turn)
    # In the order of turns, every message is received in the turn in which it is sent, so ramps cut off both ends.
    units = program.units_per_batch
    actions_of = {
        lane: tuple(Action(t.stage, t.op, t.offset * units(t.key, t.peer) + t.unit, peer=t.peer) for t in templates)
        for lane, templates in lanes.items()
    }
    sent = add_sends(dataclasses.replace(program, lanes=actions_of, semantics="partial"), home, lookup_first=False)
    return {
        lane: tuple(
            Template(op=action.op, stage=action.stage, unit=unit, offset=offset, peer=action.peer)
            for action in row
            for offset, unit in (divmod(action.index or 0, units((action.stage, action.op), action.peer)),)
        )
        for lane, row in sent.lanes.items()
    }


def turn_loop(program: Program, lanes: Mapping[str, tuple[Template, ...]], source: EmbeddingStage) -> Loop:
    """The loop of all processes of a replica, for checks and simulation."""
    return Loop(
        lanes=lanes,
        edges=program.edges,
        source=(source.number, "X_EMBED"),
        sink=(source.number, "X_EMBED_GRAD"),
        stages=program.stages,
        resources=program.resources,
    )


def _template(action: Action) -> Template:
    return Template(op=action.op, stage=action.stage, unit=action.index or 0, peer=action.peer)


def _lookup(turn: list[Template], stage: int, *, has_examples: bool) -> tuple[int, int]:
    """Place and offset of the lookup in a turn of a stage."""
    if not has_examples:
        backwards = [place for place, template in enumerate(turn) if template.op == "B"]
        return (backwards[stage - 1] + 1 if stage else 0), 0
    ahead = [place for place, template in enumerate(turn) if template.offset == 1]
    return (ahead or [place for place, t in enumerate(turn) if t.op == "X_EMBED_GRAD"])[0], 1
