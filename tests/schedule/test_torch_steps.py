from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from bagpipe.errors import ScheduleError
from bagpipe.schedule.formats.torch_csv import torch_cells
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import chain, dense_program
from bagpipe.schedule.lowering.rewrite import merge_input_weight
from bagpipe.schedule.lowering.sends import add_sends
from tests.schedule.tables import TORCH, TORCH_SIZES, lanes, torch_rows, torch_text
from tests.schedule.torch_steps import torch_steps

TWO_RANKS = {"rank0": 0, "rank1": 1}

#: Two stages in a row, and four in a V, with the idle steps of their tables.
ROW = "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"
VEE = "0F0,0F1,,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n,1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,2W1,1W0,1W1\n"


def steps(text: str, num_stages: int, micro: int, *, idle: bool = True) -> int:
    cells = torch_cells(text)
    program = dense_program(chain(num_stages, micro), [[cell for cell in row if cell] for row in cells.values()])
    return torch_steps(add_sends(program, TWO_RANKS, torch_names=True, cells=cells if idle else None))


def test_tables_of_torch_s_own_tests() -> None:
    assert steps(ROW, 2, 2) == 11
    assert steps(VEE, 4, 2) == 24
    assert steps(VEE, 4, 2, idle=False) == 23  # the idle steps determine where messages are placed


def test_zero_bubble_with_merged_halves() -> None:
    cells = torch_cells(torch_text(torch_rows("InterleavedZeroBubble", 2, 8)))
    program = dense_program(chain(4, 8), [[cell for cell in row if cell] for row in cells.values()])
    assert torch_steps(add_sends(merge_input_weight(program), TWO_RANKS, torch_names=True)) == 113


@pytest.mark.parametrize("name", [name for name in TORCH if name not in ("GPipe", "DualPipeV")])
@pytest.mark.parametrize(("ranks", "micro"), TORCH_SIZES)
def test_counts_are_torch_s(name: str, ranks: int, micro: int) -> None:
    """Without overlapped actions, which PyTorch's simulator does not support."""
    table, stages = torch_rows(name, ranks, micro), ranks * TORCH[name]
    cells = torch_cells(torch_text(table))
    program = dense_program(chain(stages, micro), [[cell for cell in row if cell] for row in cells.values()])
    home = {lane: rank for rank, lane in enumerate(cells)}
    rank_of = {a.stage_index: rank for rank, row in table.items() for a in row if a is not None}
    lowered = torch_schedules._add_send_recv(table, rank_of.__getitem__, stages)
    theirs = torch_schedules._simulate_comms_compute(lowered, rank_of.__getitem__, stages)
    expected = max(len(row) for row in theirs.values())
    assert torch_steps(add_sends(program, home, torch_names=True, cells=cells)) == expected


def test_a_deadlock_is_named() -> None:
    crossed = Program(lanes=lanes(a="0RECV_B0 0SEND_F0", b="1RECV_F0 1SEND_B0"))
    with pytest.raises(ScheduleError, match="deadlock: 0RECV_B0 waits for 1SEND_B0"):
        torch_steps(crossed)
