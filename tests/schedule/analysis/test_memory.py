from __future__ import annotations

import pytest

from bagpipe.schedule.analysis.memory import Memory, memory_problems, peak_bytes, waiting_covariances
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.program import Program
from tests.schedule.dense import dense
from tests.schedule.tables import lanes


@pytest.mark.parametrize(
    ("cells", "peak"),
    [
        ("0F0 0F1 0B0 0B1", 20),
        ("0F0 0B0 0F1 0B1", 10),
        ("0F0 0I0 0F1 0W0 0I1 0W1", 20),
        ("0F0 0F1 0F2", 10),
        ("0F0 1F0 0B0 1B0", 17),
        ("0F0 (0F1;0B0)OVERLAP_F_B 0B1", 20),
        ("0F0 0F1 0F2 0REC0 0B0 0REC1 0B1 0REC2 0B2", 14),
        ("0F0 0F1 0F2 0B0 0REC1 0B1 0B2", 22),
        ("", 0),
    ],
)
def test_peak_of_a_row(cells: str, peak: float) -> None:
    """Stage 0 keeps 10 bytes per micro-batch, 2 of them inputs; stage 1 keeps 7."""
    memory = Memory(activation_bytes={0: 10, 1: 7}, input_bytes={0: 2})
    assert peak_bytes(lanes(a=cells)["a"], memory) == peak


def test_weights_count_once_per_pipe() -> None:
    memory = Memory(param_bytes={0: 100, 1: 1000})
    assert peak_bytes(lanes(a="0F0 0B0 0F0~1 0B0~1 1F0 1B0")["a"], memory) == 1200


def test_gathered_weights_count_where_they_are_gathered() -> None:
    memory = Memory(param_bytes={0: 100}, whole_bytes={0: 3, 1: 4, 2: 5})
    row = "0UNSHARD0 1UNSHARD0 0RESHARD0 2UNSHARD0 1RESHARD0 2RESHARD0 0REDUCE_GRAD0"
    assert peak_bytes(lanes(a=row)["a"], memory) == 9


def test_each_lane_that_lacks_memory_is_named_once() -> None:
    memory = Memory(activation_bytes={0: 1}, budget_bytes={"a": 2, "b": 2})
    program = Program(lanes=lanes(a="0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", b="1F0 1B0", c="0F4 0F5 0F6 0B4"))
    assert list(memory_problems(program, memory)) == ["lane a holds 3 bytes at 0F2, of 2"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "chimera"])
def test_with_one_byte_per_activation_it_is_the_number_in_flight(name: str) -> None:
    program = dense(name, 4, 8)
    memory = Memory(activation_bytes={stage.number: 1 for stage in program.stages})
    for use in simulate(program, memory=memory).lanes.values():
        assert use.peak_bytes == use.peak_in_flight


@pytest.mark.parametrize(
    ("cells", "inputs", "gradients"),
    [
        ("0F0 0COV_A0 0B0 0COV_G0 0F1 0COV_A1 0B1 0COV_G1", 1, 1),
        ("0F0 0F1 0B0 0COV_G0 0B1 0COV_A0 0COV_A1 0COV_G1", 2, 1),
        ("0F0 0F1 0I0 0I1 0W0 0W1 0COV_A0 0COV_A1 0COV_G0 0COV_G1", 2, 2),
        ("0F0 0F1 0REC0 0B0 0COV_A0 0COV_G0 0REC1 0B1 0COV_A1 0COV_G1", 1, 1),
        ("0F0 1F0 1B0 0B0 0COV_A0 0COV_G0", 1, 1),  # stage 1 has no such work
        ("0F0 0B0", 0, 0),
    ],
)
def test_values_are_kept_until_their_covariances_are_added(cells: str, inputs: int, gradients: int) -> None:
    assert waiting_covariances(lanes(a=cells)["a"]) == (inputs, gradients)
