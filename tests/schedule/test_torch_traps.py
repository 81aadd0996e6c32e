"""Bugs and misreadings of torch.distributed.pipelining that this package must not follow."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.formats.torch_csv import from_torch, to_torch
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.ops import OPS, TORCH_OPS
from bagpipe.schedule.ir.program import Program
from tests.schedule.dense import dense, peaks, rows
from tests.schedule.tables import torch_text


@pytest.mark.parametrize(("ranks", "micro"), [(2, 2), (2, 4), (4, 8), (8, 8)])
def test_torchs_1f1b_table_is_wrong_on_the_last_rank(ranks: int, micro: int) -> None:
    """It begins with micro-batch 1 and ends with one that does not exist. PyTorch's runtime does not use the table."""
    table = dict(enumerate(get_schedule_ops("1F1B", ranks, micro, 1)))
    with pytest.raises(ScheduleError, match=f"rank {ranks - 1}: {ranks - 1}F{micro}: expected micro-batches 0 to"):
        from_torch(torch_text(table), num_stages=ranks, microbatches=micro)
    program = dense("1f1b", ranks, micro)
    check(program)
    assert rows(program)[-1] == ",".join(f"{ranks - 1}F{m},{ranks - 1}B{m}" for m in range(micro))
    assert peaks(simulate(program)) == [min(micro, ranks - rank) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("text", "taken_for"), [("0FETCH1", "0F"), ("0INSERT1", "0I"), ("0WRITEBACK1", "0W"), ("2BW0", "2B")]
)
def test_torchs_parser_accepts_prefixes_and_ours_refuses_them(text: str, taken_for: str) -> None:
    assert str(torch_schedules._Action.from_str(text)) == taken_for
    for read in (parse, lambda cell: from_torch(f"{cell}\n", num_stages=3, microbatches=9)):
        with pytest.raises(ScheduleError, match=f"got {text!r}"):
            read(text)


@pytest.mark.parametrize("text", ["0F1@3", "0F1~2"])
def test_torchs_parser_drops_suffixes_and_ours_keeps_them(text: str) -> None:
    assert str(torch_schedules._Action.from_str(text)) == "0F1"
    assert parse(text).text == text
    with pytest.raises(ScheduleError, match=f"{text} is not an action of PyTorch's tables"):
        from_torch(f"{text}\n", num_stages=1, microbatches=2)
    with pytest.raises(ScheduleError, match=f"{text} has a name or suffix that it does not know"):
        to_torch(Program(lanes={"rank0": (parse(text),)}))


@pytest.mark.parametrize("op", sorted(OPS.keys() - TORCH_OPS))
def test_torch_misreads_no_extension_op(op: str) -> None:
    with pytest.raises(RuntimeError, match="Invalid action string"):
        torch_schedules._Action.from_str(f"0{op}1")


def test_b_is_the_whole_backward_as_in_torch() -> None:
    """In the zero-bubble papers, and in tables made for them, B is the input half, a W follows, and BW is the whole."""
    theirs = torch_schedules._merge_bw([torch_schedules._Action.from_str(cell) for cell in ("0I0", "0W0")])
    assert [str(action) for action in theirs] == ["0B0"]
    assert parse("0B0").op == "B"
    assert set(OPS["B"].provides) == {"I", "W"}
    papers = "0F0,0F1,0B0,0W0,0B1,0W1\n1F0,1B0,1F1,1B1,1W0,1W1\n"
    with pytest.raises(ScheduleError, match=r"0W0: micro-batch has both B, a whole backward, and W; .*B to I"):
        from_torch(papers, num_stages=2, microbatches=2)
    check(from_torch(papers.replace("B", "I"), num_stages=2, microbatches=2))
