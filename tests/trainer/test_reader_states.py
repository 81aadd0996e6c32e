from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.reader_states import StepReaderStates


@given(every=st.integers(1, 60), apart=st.integers(1, 20), ahead=st.integers(0, 40))
def test_every_checkpoint_finds_the_nearest_one_before_it(every: int, apart: int, ahead: int) -> None:
    """Steps are read some way ahead of the checkpoint that asks; few reader_states are kept."""
    marks, read = StepReaderStates(every), 0
    for step in range(every, 400, every):
        while read <= step + ahead:
            if read % apart == 0:
                marks.add(read, {"batch": read})
            read += 1
        found = marks.before(step)
        assert found == {"batch": step // apart * apart}
        assert len(marks) <= 2 + -(-ahead // every)


def test_where_no_step_is_known_the_last_are_kept() -> None:
    marks = StepReaderStates(0)
    assert marks.before(7) is None
    for batch in range(0, 16_000, 16):
        marks.add(batch, {"batch": batch})
    assert len(marks) <= 16
    assert marks.before(15_983) == {"batch": 15_968}
