from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.formats.torch_csv import from_torch, table_schedule, to_torch, torch_cells
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.program import Edge, Program, Stage
from bagpipe.schedule.ir.stage_graph import StageGraph, chain, dense_program
from bagpipe.schedule.lowering.optimizer import add_optimizer
from bagpipe.schedule.lowering.rewrite import add_unshard_reshard
from bagpipe.schedule.lowering.sends import add_sends
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.schedule.dense import dense, rows
from tests.schedule.tables import TORCH, TORCH_SIZES, lanes, torch_rows, torch_text, with_torch_reductions

#: Our schedules of a chain of stages, each stage on one rank, without recomputation.
LINEAR = [name for name, schedule in DENSE_SCHEDULES.items() if schedule.num_pipes == 1 and name != "1f1b-shifted"]


def runtime(num_ranks: int, num_stages: int, micro: int) -> torch_schedules._PipelineScheduleRuntime:
    """PyTorch's runtime without modules or processes, used for its tables."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, num_ranks, num_stages, None
    return torch_schedules._PipelineScheduleRuntime([stage, stage], micro)


# PyTorch lowers only schedules of several stages per rank.
@pytest.mark.parametrize(("name", "comms"), [(n, comms) for n in TORCH for comms in {False, TORCH[n] > 1}])
@pytest.mark.parametrize(("ranks", "micro"), TORCH_SIZES)
def test_all_of_torch_s_tables_round_trip(name: str, ranks: int, micro: int, comms: bool) -> None:
    table = torch_rows(name, ranks, micro, comms=comms)
    program = from_torch(torch_text(table), num_stages=ranks * TORCH[name], microbatches=micro)
    without_idle = {rank: [cell for cell in row if cell is not None] for rank, row in table.items()}
    assert to_torch(program) == torch_text(without_idle)
    assert [
        [torch_schedules._Action.from_str(cell) for cell in line.split(",")] for line in to_torch(program).splitlines()
    ] == list(without_idle.values())


@pytest.mark.parametrize("name", LINEAR)
def test_torch_loads_lowers_and_dumps_what_we_export(name: str, tmp_path: Path) -> None:
    ranks, micro = 4, 8
    program = dense(name, ranks, micro)
    stages = len(program.stages)
    path = tmp_path / "table.csv"
    path.write_text(to_torch(program), encoding="utf-8")
    theirs = runtime(ranks, stages, micro)
    theirs._load_csv(str(path))
    theirs._dump_csv(str(path), format="compute_comms")
    ours = with_torch_reductions(add_unshard_reshard(program))
    ours = add_sends(ours, {lane: rank for rank, lane in enumerate(program.lanes)}, torch_names=True)
    text = path.read_text(encoding="utf-8")
    assert text.splitlines() == rows(ours)
    assert from_torch(text, num_stages=stages, microbatches=micro) == ours
    again = runtime(ranks, stages, micro)
    path.write_text(to_torch(ours), encoding="utf-8")
    again._load_csv(str(path), format="compute_comms")
    assert again.pipeline_order_with_comms == theirs.pipeline_order_with_comms


def test_idle_steps_are_kept_in_cells_and_dropped_in_programs() -> None:
    text = "0F0, ,0B0\n,1F0,   \n"
    assert torch_cells(text) == {
        "rank0": (parse("0F0"), None, parse("0B0")),
        "rank1": (None, parse("1F0"), None),
    }
    program = from_torch("0F0,,,0B0\n,1F0,1B0,\n", num_stages=2, microbatches=1)
    assert rows(program) == ["0F0,0B0", "1F0,1B0"]
    assert program.edges == dense("gpipe", 2, 1).edges


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0F0,0FETCH1\n", "rank 0: expected an action such as 0F1, .*, got '0FETCH1'"),
        ("0F0,0B0\n1F0,1X_FETCH0\n", "rank 1: 1X_FETCH0 is not an action of PyTorch's tables"),
        ("0F0@0,0B0\n", "rank 0: 0F0@0 is not an action of PyTorch's tables"),
        ("0F0,0B0~1\n", "rank 0: 0B0~1 is not an action of PyTorch's tables"),
        ("0F0,0BW0\n", "rank 0: .* got '0BW0'; tables that call the input half B, and the whole BW, must be renamed"),
        ("0F0,0B0,0W0\n1F0,1B0\n", "0W0: micro-batch has both B, a whole backward, and W; tables that call"),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", "rank 2: 2F0: expected stages 0 to 1"),
        ("0F0,0B0\n1F1,1B1\n", "rank 1: 1F1: expected micro-batches 0 to 0"),
        ("0F0,0B0\n", r"edges: edge 1F\(b\) <- 0F\(b\) names 1F, which no lane performs"),
        ("0F0,0B0,1F0,1B0\n", "deadlock: 0B0 waits for 1B0 waits for 0B0"),
        ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "pairs: 1RECV_F0 has no SEND"),
        ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n", "1SEND_B0 is missing; expected all messages between ranks, or none"),
        ("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0\n", "0SEND_F0: no value passes there between two ranks"),
        ("0F0\n1F0,1B0,0B0\n", "one-lane: 0B is on lane rank1, 0F on rank0"),
        ("0F0,0REDUCE_GRAD,0B0\n1F0,1B0\n", "rank0: 0B0 comes after REDUCE_GRAD of stage 0"),
        ("", "expected a row per rank, got an empty table"),
        ("0F0,0B0\n1F0,1B0\n\n", "rank2 has no action"),
        ("x" * 200_000, "not a table: field larger than field limit"),
    ],
)
def test_tables_that_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=complaint) as error:
        from_torch(text, num_stages=2, microbatches=1)
    assert "\n" not in str(error.value)


def diamond() -> Program:
    graph = StageGraph(micro_per_batch=(1,) * 4, edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    table = lanes(a="0F0 0B0", b="1F0 1B0", c="2F0 2B0", d="3F0 3B0")
    return dense_program(graph, list(table.values()))


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        (dense("1f1b-shifted", 2, 4), "0REC0 has a name or suffix that it does not know"),
        (dense("chimera", 2, 4), "1F0~1 has a name or suffix that it does not know"),
        (add_optimizer(dense("1f1b", 2, 2), {"rank0": 0, "rank1": 1}), "0OPT0 has a name or suffix"),
        (Program(lanes=lanes(a="0F0", b="0B0")), "0B0 is on b, others of its stage on a"),
        (diamond(), "edge 0-2 is no part of a chain"),
        (Program(lanes=lanes(a="0F0 0B0", b="1F0 1B0")), "edge 0-1 is missing in a chain"),
        (Program(lanes=lanes(a="0F0", b="2F0")), r"stages must be 0 to 1, got \[0, 2\]"),
        (
            Program(lanes=lanes(a="0F0 1F0 1F1"), stages=(Stage(number=1, micro_per_batch=2),)),
            "stage 1 has 2 micro-batches, stage 0 has 1",
        ),
        (Program(lanes=lanes(a="0F0 0F1")), "it has 2 batches"),
    ],
)
def test_programs_that_torch_cannot_run(program: Program, complaint: str) -> None:
    with pytest.raises(ScheduleError, match=f"not a table of PyTorch's: {complaint}"):
        to_torch(program)


def test_an_invalid_program_is_not_exported() -> None:
    edges = (Edge(src="F", dst="F", dst_stage=1),)
    program = Program(lanes=lanes(a="0B0 0F0", b="1F0 1B0"), edges=edges)
    with pytest.raises(ScheduleError, match="order: lane a: 0B0 comes before 0F0"):
        to_torch(program)


def test_weight_actions_lose_their_index() -> None:
    plain = dense("gpipe", 2, 1)
    program = dataclasses.replace(plain, lanes=lanes(a="0F0 0B0 0REDUCE_GRAD0", b="1F0 1B0 1REDUCE_GRAD0"))
    assert to_torch(program) == "0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n"
    check(program)


def test_a_table_can_be_used_for_another_stage_graph() -> None:
    schedule = table_schedule(
        "mine.csv",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
    )
    graph = StageGraph(micro_per_batch=(2, 2), edges=())
    program = schedule.build(graph)
    assert schedule.num_ranks(2) == 2
    assert [action.text for action in program.lanes["rank0"]] == ["0F0", "0F1", "0B0", "0B1"]
    assert not any(edge.src_stage != edge.dst_stage for edge in program.edges)


def test_a_table_that_deadlocks_is_refused_with_its_cycle() -> None:
    schedule = table_schedule("mine.csv", "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ScheduleError, match=r"mine.csv: deadlock: 0B0 waits for 1B0 waits for 1F1 waits for 0F1"):
        schedule.build(chain(2, 2))
