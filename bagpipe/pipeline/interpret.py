"""Sequential interpreter: runs actions in a topological order. The reference for the runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.program import Hazards, Program

__all__ = ["Handler", "find_handler", "interpret"]

#: Runs one action. Its argument is the action's index: a batch or micro-batch number, depending on the op's unit.
Handler = Callable[[int], None]


def find_handler(handlers: Mapping[str, Handler], text: str, op: str) -> Handler:
    """The handler of ``1F`` (or ``1SENDX_F:3``) if there is one, else that of ``F``.

    Raises:
        ScheduleError: neither exists.
    """
    handler = handlers.get(text, handlers.get(op))
    if handler is None:
        raise ScheduleError(f"no handler for {text}; handlers given: {', '.join(handlers) or 'none'}")
    return handler


def interpret(program: Program, handlers: Mapping[str, Handler], hazards: Hazards | None = None) -> None:
    """Run every action of the program in the calling thread.

    Args:
        program: the program; an overlap's parts run one after the other, actions without an index get -1.
        handlers: as for `Runner`.
        hazards: as for `Graph`.

    Raises:
        ScheduleError: the program deadlocks or a handler is missing. Errors of handlers pass through.
    """
    graph = Graph(program, hazards)
    for node in graph.order():
        for atom in graph.actions[node].atoms:
            find_handler(handlers, _name(atom), atom.op)(-1 if atom.index is None else atom.index)


def _name(atom: Action) -> str:
    """As `Template.text`: without the index."""
    peer = "" if atom.peer is None else f":{atom.peer}"
    return f"{atom.stage}{atom.op}{peer}"
