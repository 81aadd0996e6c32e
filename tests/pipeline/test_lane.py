"""State local to a lane. Its execution is tested through the runner."""

from __future__ import annotations

from bagpipe.pipeline.lane import EventRing


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None: ...


def test_a_ring_gives_the_event_or_a_later_one() -> None:
    ring = EventRing(actions_per_batch=1)
    assert ring.get(0, done=0) is None
    for unit in range(200):
        ring.put(unit, Named(str(unit)))

    def name(unit: int) -> str:
        event = ring.get(unit, done=200)
        assert isinstance(event, Named)
        return event.name

    assert name(199) == "199"
    assert name(150) == "150"
    assert name(3) == "136", "the oldest of the last 64"
