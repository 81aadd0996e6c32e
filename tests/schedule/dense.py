"""Small dense programs for the tests, written out from the rules of the papers: GPipe and 1F1B on a chain of stages."""

from __future__ import annotations

from collections.abc import Callable

from bagpipe.schedule.actions import Action
from bagpipe.schedule.program import Edge, Program, Stage


def chain_edges(num_stages: int) -> tuple[Edge, ...]:
    forward = [Edge(src="F", dst="F", src_stage=s, dst_stage=s + 1) for s in range(num_stages - 1)]
    backward = [Edge(src="I", dst="I", src_stage=s + 1, dst_stage=s) for s in range(num_stages - 1)]
    turn = [Edge(src="F", dst="I", src_stage=s, dst_stage=s) for s in range(num_stages)]
    return (*forward, *backward, *turn)


def chain(num_stages: int, num_micro: int, order: Callable[[int, int, int], list[tuple[str, int]]]) -> Program:
    return Program(
        lanes={
            f"rank{s}": tuple(Action(s, op, m) for op, m in order(s, num_stages, num_micro)) for s in range(num_stages)
        },
        edges=chain_edges(num_stages),
        stages=tuple(Stage(number=s, micro_per_batch=num_micro) for s in range(num_stages)),
    )


def gpipe(stage: int, num_stages: int, num_micro: int) -> list[tuple[str, int]]:
    return [(op, m) for op in "FB" for m in range(num_micro)]


def one_f_one_b(stage: int, num_stages: int, num_micro: int) -> list[tuple[str, int]]:
    warm_up = min(num_micro, num_stages - 1 - stage)
    order = [("F", m) for m in range(warm_up)]
    for m in range(num_micro - warm_up):
        order += [("F", m + warm_up), ("B", m)]
    return order + [("B", m) for m in range(num_micro - warm_up, num_micro)]
