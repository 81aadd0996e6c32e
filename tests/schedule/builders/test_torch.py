"""Our tables compared with PyTorch's for the same sizes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check, problems
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import chain, dense_program
from tests.schedule.dense import dense, rows
from tests.schedule.tables import read_csv

#: Our name -> PyTorch's, and the stages per rank to compare.
PEERS = {
    "gpipe": ("GPipe", (1,)),
    "interleaved": ("Interleaved1F1B", (2, 3, 4)),
    "breadth-first": ("LoopedBFS", (2, 3, 4)),
    "interleaved-zero-bubble": ("InterleavedZeroBubble", (2, 3, 4)),
    "zb-v": ("ZBVZeroBubble", (2,)),
    "dualpipe-v": ("DualPipeV", (2,)),
}
SIZES = [(2, 2), (2, 4), (2, 6), (3, 6), (3, 9), (4, 3), (4, 4), (4, 8), (4, 10), (4, 12), (8, 8), (8, 16), (8, 32)]


def torch_rows(name: str, ranks: int, micro: int, chunks: int) -> list[str]:
    """Compute actions of every rank, without idle steps and gradient reductions."""
    table = get_schedule_ops(name, ranks, micro, chunks, with_comms=False)
    return [",".join(str(cell) for cell in row if cell and "REDUCE_GRAD" not in str(cell)) for row in table]


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(("ranks", "micro"), SIZES)
def test_tables_are_the_same(name: str, ranks: int, micro: int) -> None:
    peer, all_chunks = PEERS[name]
    for chunks in all_chunks:
        if name == "dualpipe-v" and micro < 2 * ranks:
            with pytest.raises(ScheduleError, match="at least"):
                dense(name, ranks, micro)
            with pytest.raises(ValueError, match="at least"):
                torch_rows(peer, ranks, micro, chunks)
        else:
            assert rows(dense(name, ranks, micro, chunks)) == torch_rows(peer, ranks, micro, chunks)


def check_interleaved_zero_bubble(ranks: int, micro: int, chunks: int) -> bool:
    """Compare a table with PyTorch's; False if both refuse the sizes."""
    if micro % max(1, micro // ranks):
        with pytest.raises(ScheduleError, match="interleaved-zero-bubble: micro-batches must be a multiple of"):
            dense("interleaved-zero-bubble", ranks, micro, chunks)
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            torch_rows("InterleavedZeroBubble", ranks, micro, chunks)
        return False
    ours = rows(dense("interleaved-zero-bubble", ranks, micro, chunks))
    assert ours == torch_rows("InterleavedZeroBubble", ranks, micro, chunks)
    return True


@pytest.mark.parametrize("ranks", range(1, 9))
def test_interleaved_zero_bubble_allows_what_torch_allows(ranks: int) -> None:
    micros = [micro for micro in range(1, 2 * ranks + 1) if check_interleaved_zero_bubble(ranks, micro, 2)]
    assert set(micros) >= {*range(1, ranks + 1), 2 * ranks}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_interleaved_zero_bubble_is_torch_s_for_all_sizes() -> None:
    sizes = [(p, m, v) for p in range(1, 9) for m in range(1, 4 * p + 1) for v in (2, 3, 4)]
    assert sum(check_interleaved_zero_bubble(*size) for size in sizes) == 321


@pytest.mark.parametrize(("ranks", "micro"), [(p, m) for p, m in SIZES if m >= p])
def test_zb_h1_is_torch_s_interleaved_zero_bubble_on_one_stage_per_rank(ranks: int, micro: int) -> None:
    """PyTorch runs it only on two or more stages per rank, but its rule covers one."""
    sizes = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=1,
        microbatches_per_round=micro // max(1, micro // ranks),
        _n_microbatches=micro,
    )
    rule = torch_schedules.ScheduleInterleavedZeroBubble._calculate_single_rank_operations
    expected = [",".join(str(cell) for cell in rule(sizes, rank) if cell) for rank in range(ranks)]
    assert rows(dense("zb-h1", ranks, micro)) == expected


@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8)])
def test_torch_s_own_1f1b_table_is_refused(ranks: int, micro: int) -> None:
    """Its last rank starts with micro-batch 1 and ends with one that does not exist; PyTorch's runtime is right."""
    table = torch_rows("1F1B", ranks, micro, 1)
    assert table[:-1] == rows(dense("1f1b", ranks, micro))[:-1]
    lanes = read_csv("\n".join(table)).values()
    program: Program = dense_program(chain(ranks, micro), list(lanes))
    assert f"complete: {ranks - 1}F0 is missing; expected {ranks - 1}F0" in " ".join(problems(program))
    with pytest.raises(ScheduleError, match="is missing"):
        check(program)
