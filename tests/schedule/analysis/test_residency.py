"""Programs of divided parameters that lack one dependency, or whose lanes differ, are refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from bagpipe.schedule.analysis.residency import residency_problems
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.program import Edge, Program
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.lowering.gathers import add_gathers
from bagpipe.schedule.lowering.optimizer import add_optimizer, add_reduce_grad, add_unshard
from bagpipe.schedule.lowering.rewrite import add_unshard_reshard, flatten_pipes
from bagpipe.schedule.lowering.step_program import step_program
from tests.schedule.dense import dense
from tests.schedule.tables import lanes

HOME = {f"rank{rank}": rank for rank in range(4)}


def two_batches(name: str, **step: object) -> Program:
    """Two batches of all processes."""
    program = step_program(chain(4, 4), [], name, num_processes=1, replicas=2, **step).program  # type: ignore[arg-type]
    loops = {lane: program.lanes[lane] for lane in program.lanes}

    def again(text: str) -> str:
        action = parse(text)
        units = program.units_per_batch((action.stage, action.op), action.peer)
        return dataclasses.replace(action, index=(action.index or 0) + units).text

    return dataclasses.replace(
        program,
        lanes={
            lane: (*row, *(parse(again(atom.text)) for action in row for atom in action.atoms))
            for lane, row in loops.items()
        },
    )


def without(program: Program, fits: Callable[[Edge], bool]) -> list[str]:
    edges = tuple(edge for edge in program.edges if not fits(edge))
    assert len(edges) < len(program.edges)
    return list(residency_problems(dataclasses.replace(program, edges=edges)))


@pytest.mark.parametrize("name", ["1f1b", "breadth-first", "interleaved", "chimera", "zb-h1"])
def test_a_program_that_lacks_a_dependency_is_refused(name: str) -> None:
    program = two_batches(name, gathers=True)
    assert not list(residency_problems(program))
    cases = {
        r"0F\d waits for no UNSHARD|0RESHARD0 does not wait for 0F\d": ("UNSHARD", "F"),
        r"\dRESHARD\d does not wait for \d[BIW]\d": ("I", "RESHARD"),
        r"0OPT0 does not wait for 0RESHARD": ("REDUCE_GRAD", "OPT"),
        r"0UNSHARD\d does not wait for 0OPT0": ("OPT", "UNSHARD"),
    }
    for complaint, (src, dst) in cases.items():
        ends = (
            {(src, dst), ("RESHARD", "OPT"), ("W", "RESHARD")} if dst != "F" else {(src, dst), (src, "I"), (src, "W")}
        )
        if src == "OPT":
            ends = {(src, dst)}
        found = without(program, lambda edge, ends=ends: (edge.src, edge.dst) in ends)  # type: ignore[misc]
        assert any(re.match(complaint, each) for each in found), (complaint, found[:4])


def test_whole_parameters_are_those_of_the_last_step() -> None:
    program = two_batches("1f1b", shards=True)
    assert not list(residency_problems(program))
    assert without(program, lambda edge: edge.src == "OPT")[0] == "0UNSHARD0 does not wait for 0OPT0"
    assert without(program, lambda edge: (edge.src, edge.dst_stage) == ("UNSHARD", 0))[0].endswith("wait for 0UNSHARD0")


def test_holders_exchange_in_one_order() -> None:
    home = {f"rank{rank}": rank for rank in range(2)}
    program = add_unshard(add_optimizer(add_reduce_grad(flatten_pipes(dense("chimera", 2, 2)), home), home), home)
    assert not list(residency_problems(program))
    turned = {**program.lanes, "reduce1": program.lanes["reduce1"][::-1]}
    (complaint,) = residency_problems(dataclasses.replace(program, lanes=turned))
    assert complaint.startswith("lanes reduce0 and reduce1 hold the same parameters, and the one comes to REDUCE_GRAD0")


def test_tables_without_numbers_gather_in_the_lane_that_computes() -> None:
    assert not list(residency_problems(add_unshard_reshard(dense("interleaved", 2, 4, 4), 2)))
    broken = {
        "0UNSHARD 0F0 0RESHARD 0B0": "lane a: 0B0 comes before 0UNSHARD",
        "0UNSHARD 0UNSHARD 0F0": "lane a: 0UNSHARD of a stage that is whole",
        "0UNSHARD 0F0 0RESHARD 0RESHARD": "lane a: 0RESHARD of a stage that is not whole",
    }
    for cells, complaint in broken.items():
        assert complaint in list(residency_problems(Program(lanes=lanes(a=cells))))


def test_gathers_of_one_process_keep_their_order() -> None:
    """Two pipes of one process: all stages are whole from the first forward to the last backward."""
    one = dict.fromkeys(HOME, 0)
    program = add_gathers(add_optimizer(add_reduce_grad(flatten_pipes(dense("chimera", 2, 2)), one), one), one)
    texts = [action.text for action in program.lanes["reduce0"]]
    assert texts == ["0UNSHARD0", "1UNSHARD0", "0RESHARD0", "0REDUCE_GRAD0", "1RESHARD0", "1REDUCE_GRAD0"]
    assert not list(residency_problems(program))
