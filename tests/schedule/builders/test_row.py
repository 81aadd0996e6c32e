from __future__ import annotations

from bagpipe.schedule.builders.row import Row


def texts(row: Row) -> str:
    return ",".join(action.text for action in row.actions)


def test_micro_batches_are_numbered_by_stage_and_op() -> None:
    row = Row()
    row.add(2, "F", 2)
    row.add(0, "F")
    row.add(2, "BF", 2)
    assert texts(row) == "2F0,2F1,0F0,2B0,2F2,2B1,2F3"


def test_zero_repeats_add_nothing() -> None:
    row = Row()
    row.add(0, "F", 0)
    row.add(0, "F", -3)
    row.add(0, "")
    row.weight()
    assert row.actions == ()


def test_a_full_backward_is_both_halves_of_its_micro_batch() -> None:
    row = Row()
    row.add(0, "F", 4)
    row.add(0, "BIBWI")
    assert texts(row) == "0F0,0F1,0F2,0F3,0B0,0I1,0B2,0W1,0I3"
    row.weight()
    assert texts(row).endswith(",0W3")


def test_weight_gradients_queue_across_stages() -> None:
    row = Row()
    row.add(3, "II")
    row.add(0, "I")
    row.add(3, "W")
    row.weight()
    row.weight()
    assert texts(row) == "3I0,3I1,0I0,3W0,3W1,0W0"


def test_an_overlap_pairs_the_next_of_both() -> None:
    row = Row()
    row.add(0, "F")
    row.overlap(0, 3)
    row.add(3, "I")
    assert texts(row) == "0F0,(0F1;3B0)OVERLAP_F_B,3I1"
