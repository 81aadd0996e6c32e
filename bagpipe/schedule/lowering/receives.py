"""`separate_receives`: RECVs in lanes of their own, one per pair of processes, for lanes that choose their order.

    before   compute1: X_EMBED  RECV_F0 F0  RECV_F1 F1 …        a lane that waits in a receive cannot choose
    after    recv2:    RECV_F0 RECV_F1 …                        F0 waits for RECV_F0 by an edge, on the board
             compute1: X_EMBED  F0 F1 …

A process sends to a later one in its prefix (X_EMBED) and after forwards, to an earlier one after backwards. Both keep
the order of micro-batches, so the messages of a pair have one order, however forwards and backwards are interleaved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import partner
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, Program, Resource

__all__ = ["receive_lane", "separate_receives"]


def receive_lane(receiver: int, sender: int, num_processes: int) -> str:
    """Name of the lane in which a process receives what another one sends."""
    return f"recv{receiver * num_processes + sender}"


def separate_receives(program: Program, home: Mapping[str, int]) -> Program:
    """The program with its RECVs in lanes of their own.

    Args:
        program: of one batch, with SEND and RECV; its edges lead to later processes.
        home: lane -> the process that runs it.
    """
    num_processes = len(set(home.values()))
    embedded = {home[lane]: a.stage for lane, row in program.lanes.items() for a in row if a.op == "X_EMBED"}
    lanes = {lane: tuple(a for a in row if OPS[a.op].role != "recv") for lane, row in program.lanes.items()}
    receiver_of = {recv: lane for lane, row in program.lanes.items() for recv in row if OPS[recv.op].role == "recv"}
    received: dict[str, list[Action]] = {}
    edges: list[Edge] = []
    for lane, row in lanes.items():
        for send in (action for action in row if OPS[action.op].role == "send"):
            recv = partner(send)
            process = home[receiver_of[recv]]
            received.setdefault(receive_lane(process, home[lane], num_processes), []).append(recv)
            edges += _edges(recv, embedded.get(process))
    return dataclasses.replace(
        program,
        lanes={**lanes, **{name: tuple(received[name]) for name in sorted(received)}},
        edges=tuple(dict.fromkeys((*program.edges, *edges))),
        resources=(*program.resources, *(Resource(name=name, kind="nic") for name in sorted(received))),
    )


def _edges(recv: Action, embedding: int | None) -> Iterator[Edge]:
    """A batch is known to its process from X_EMBED on; what is received is used by F, I or X_EMBED_GRAD."""
    if embedding is not None:
        yield Edge(src="X_EMBED", src_stage=embedding, dst=recv.op, dst_stage=recv.stage)
    user = "F" if recv.op.endswith("_F") else "X_EMBED_GRAD" if recv.stage == embedding else "I"
    yield Edge(src=recv.op, src_stage=recv.stage, dst=user, dst_stage=recv.stage)
