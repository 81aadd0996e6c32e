from __future__ import annotations

from bagpipe.schedule.formats.version_text import version_text
from bagpipe.schedule.ir.program import Program, Stage
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES
from tests.schedule.tables import lanes


def test_a_table() -> None:
    text = version_text(ASYNCHRONOUS_SCHEDULES["pipeoptim"].loop(chain(2, 2)).unroll(3))
    assert text.splitlines() == [
        "stage 0 keeps 1 version and 1 prediction",
        "    batch  forward  backward  makes  behind",
        "        0        0         0      1     0 0",
        "        1      0+1         1      2     1 0",
        "        2      1+1         2      3     1 0",
        "stage 1 keeps 1 version",
        "    batch  forward  backward  makes  behind",
        "        0        0         0      1     0 0",
        "        1        1         1      2     0 0",
        "        2        2         2      3     0 0",
        "behind: updates between the version used and that of the batch, by forward and backward",
        "2+1: version 2, predicted 1 step ahead",
    ]


def test_micro_batches_of_different_weights_are_all_listed() -> None:
    row = lanes(a="0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0OPT0 0F3@1 0B2@0 0B3@1 0OPT1")
    text = version_text(Program(lanes=row, stages=(Stage(number=0, micro_per_batch=2),), semantics="stash"))
    assert "        1      0,1       0,1      2     1 1\n" in text


def test_forwards_alone() -> None:
    text = version_text(Program(lanes=lanes(a="0F0 0F1")))
    assert "        1        1         -      -     0 -\n" in text
