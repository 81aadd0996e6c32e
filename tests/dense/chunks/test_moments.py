from __future__ import annotations

from bagpipe.dense.chunks.moments import Moment, Use


def test_moments_are_equal_by_name_and_uses() -> None:
    moment = Moment("forward 0", (Use(3), Use(1, reads=False, writes=True)))
    assert moment.chunks == {1, 3}
    assert moment == Moment("forward 0", (Use(3), Use(1, reads=False, writes=True)))
    assert moment != Moment("forward 0", (Use(3), Use(1)))
