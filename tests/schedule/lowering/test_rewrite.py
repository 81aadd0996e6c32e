from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.formats.torch_csv import torch_cells
from bagpipe.schedule.ir.program import Program, Stage
from bagpipe.schedule.ir.stage_graph import chain, dense_program
from bagpipe.schedule.lowering.rewrite import (
    add_unshard_reshard,
    flatten_pipes,
    merge_input_weight,
)
from bagpipe.schedule.lowering.sends import add_sends
from tests.schedule.dense import dense, rows
from tests.schedule.tables import TORCH, TORCH_SIZES, lanes, torch_rows, torch_text, with_torch_reductions


def torch_program(name: str, ranks: int, micro: int) -> Program:
    cells = torch_cells(torch_text(torch_rows(name, ranks, micro)))
    compute = [[cell for cell in row if cell and cell.op != "REDUCE_GRAD"] for row in cells.values()]
    return dense_program(chain(ranks * TORCH[name], micro), compute)


def torch_compute(name: str, ranks: int, micro: int) -> dict[int, list[object]]:
    table = torch_rows(name, ranks, micro)
    return {rank: [cell for cell in row if "REDUCE_GRAD" not in str(cell)] for rank, row in table.items()}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("ranks", "micro"), TORCH_SIZES)
def test_passes_equal_torchs(name: str, ranks: int, micro: int) -> None:
    program, table = torch_program(name, ranks, micro), torch_compute(name, ranks, micro)
    for ours, theirs in (
        (merge_input_weight(program), lambda row: torch_schedules._merge_bw(row)),
        (add_unshard_reshard(program), lambda row: torch_schedules._add_unshard_reshard(row)),
        (add_unshard_reshard(program, 1), lambda row: torch_schedules._add_unshard_reshard(row, 1)),
        (with_torch_reductions(program), lambda row: torch_schedules._add_reduce_grad(row, micro)),
    ):
        assert rows(ours) == torch_text({rank: theirs(list(row)) for rank, row in table.items()}).splitlines()
        check(ours)


# PyTorch lowers only schedules of several stages per rank.
@pytest.mark.parametrize("name", [name for name in TORCH if TORCH[name] > 1])
def test_all_passes_together_are_torch_s_lowering(name: str) -> None:
    ranks, micro = 4, 8
    program = with_torch_reductions(add_unshard_reshard(torch_program(name, ranks, micro)))
    lowered = add_sends(program, {lane: rank for rank, lane in enumerate(program.lanes)}, torch_names=True)
    assert rows(lowered) == torch_text(torch_rows(name, ranks, micro, comms=True)).splitlines()


def test_merge_keeps_separate_halves() -> None:
    program = Program(
        lanes=lanes(a="0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W2 0W1"), stages=(Stage(number=0, micro_per_batch=3),)
    )
    assert rows(merge_input_weight(program)) == ["0F0,0F1,0F2,0I0,0I1,0W0,0B2,0W1"]


def test_unshard_holds_so_many_stages_at_most() -> None:
    lowered = add_unshard_reshard(dense("interleaved", 1, 2, 4), 2)
    held: set[int] = set()
    for action in lowered.lanes["rank0"]:
        if action.op == "UNSHARD":
            held.add(action.stage)
        elif action.op == "RESHARD":
            held.remove(action.stage)
        else:
            assert action.stage in held
        assert len(held) <= 2
    assert not held
    with pytest.raises(ScheduleError, match="active stages must be at least 1, got 0"):
        add_unshard_reshard(lowered, 0)


def test_flat_pipes_are_stages_of_their_own() -> None:
    flat = flatten_pipes(dense("chimera", 2, 4))
    assert rows(flat) == ["0F0,3F0,3B0,0B0,0F1,3F1,3B1,0B1", "2F0,1F0,1B0,2B0,2F1,1F1,1B1,2B1"]
    assert [(stage.number, stage.micro_per_batch) for stage in flat.stages] == [(n, 2) for n in range(4)]
    assert [stage.parameters for stage in flat.stages] == [0, 1, 0, 1]
    assert "3F(b) <- 2F(b)" in [edge.text for edge in flat.edges]
    check(flat)
    with pytest.raises(ScheduleError, match=r"expected stages 0 to 1, got \[0, 2\]"):
        flatten_pipes(Program(lanes=lanes(a="0F0 2F0")))
