"""`Resharding`: the unit tasks of an edge as broadcasts in order; its messages say what each rank sends and receives.

    Broadcast, a route of two ranks, three chunks      sender ─0─> r1
                                                       sender ─1─> r1 ─0─> r2
                                                       sender ─2─> r1 ─1─> r2
                                                                   r1 ─2─> r2

A relayed broadcast passes each chunk on along its route: the sender sends the slice once, and the last rank has it one
chunk per rank later. Without relays the sender sends to each rank itself. All ranks walk the messages in one order, so
none waits for another in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.resharding.layouts import Layout
from bagpipe.schedule.resharding.tasks import UnitTask, unit_tasks

__all__ = ["Broadcast", "Message", "Resharding", "send_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """One unit task, with the way of its slice.

    Attributes:
        task: the unit task.
        sender: one of its sources.
        route: its receivers, in the order in which they get the slice.
        chunks: pieces of the slice, at least 1 and at most its elements.
        relays: every receiver passes the slice on to the next one; otherwise the sender sends to all.

    Raises:
        ScheduleError: the sender, route or chunks do not fit the task.
    """

    task: UnitTask
    sender: int
    route: tuple[int, ...]
    chunks: int = 1
    relays: bool = True

    def __post_init__(self) -> None:
        if self.sender not in self.task.sources:
            raise ScheduleError(f"rank {self.sender} has no {self.task.box}: expected one of {self.task.sources}")
        if sorted(self.route) != sorted(self.task.receivers):
            raise ScheduleError(f"expected a route over the ranks {self.task.receivers}, got {self.route}")
        if not 1 <= self.chunks <= self.task.box.elements:
            raise ScheduleError(
                f"expected 1 to {self.task.box.elements} chunks, as many as elements, got {self.chunks}"
            )

    def hops(self) -> tuple[tuple[int, int], ...]:
        """(sender, receiver) of each copy of the slice, in the order of the route."""
        if not self.relays:
            return tuple((self.sender, receiver) for receiver in self.route)
        return tuple(zip((self.sender, *self.route), self.route, strict=False))

    def turns(self, number: int) -> Iterator[tuple[Message, ...]]:
        """The messages in turns, every one in a later turn than the message that brings its sender the chunk.

        Args:
            number: of this broadcast in its resharding.
        """
        elements, hops = self.task.box.elements, self.hops()
        bounds = [elements * chunk // self.chunks for chunk in range(self.chunks + 1)]
        delay = 1 if self.relays else 0  # turns from one hop of a chunk to the next
        for turn in range(self.chunks + delay * (len(hops) - 1)):
            yield tuple(
                Message(broadcast=number, sender=sender, receiver=receiver, first=bounds[chunk], end=bounds[chunk + 1])
                for hop, (sender, receiver) in enumerate(hops)
                if 0 <= (chunk := turn - delay * hop) < self.chunks
            )

    def messages(self, number: int) -> Iterator[Message]:
        """The messages, turn by turn; see `turns`."""
        return chain.from_iterable(self.turns(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Elements ``[first, end)`` of a slice, in the order of its rows, from one rank to another.

    Attributes:
        broadcast: its number in the resharding.
        sender, receiver: ranks.
        first, end: elements of the slice.
    """

    broadcast: int
    sender: int
    receiver: int
    first: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """The way of a tensor from one layout to another.

    Attributes:
        source, target: the layouts.
        rows, columns: of the whole tensor.
        broadcasts: in the order in which every rank takes part in them.
        in_turns: the first turns of all broadcasts come first, then the second ones, and so on; otherwise one
            broadcast follows the other.

    Raises:
        ScheduleError: the broadcasts are not those of the unit tasks, each one once.
    """

    source: Layout
    target: Layout
    rows: int
    columns: int
    broadcasts: tuple[Broadcast, ...]
    in_turns: bool = False

    def __post_init__(self) -> None:
        wanted = unit_tasks(self.source, self.target, self.rows, self.columns)
        found = sorted((broadcast.task for broadcast in self.broadcasts), key=lambda task: task.box)
        if tuple(found) != tuple(sorted(wanted, key=lambda task: task.box)):
            raise ScheduleError(f"expected one broadcast for each of {len(wanted)} unit tasks, got {len(found)}")

    def messages(self) -> tuple[Message, ...]:
        """All messages, in the order in which the ranks walk them."""
        turns = [broadcast.turns(number) for number, broadcast in enumerate(self.broadcasts)]
        order = chain.from_iterable(zip_longest(*turns, fillvalue=())) if self.in_turns else chain.from_iterable(turns)
        return tuple(chain.from_iterable(order))


def send_to_all(source: Layout, target: Layout, rows: int, columns: int) -> Resharding:
    """The plain way: in the order of the tensor, the first rank that has a slice sends it to each one that needs it.

    Args:
        source, target: the layouts.
        rows, columns: of the whole tensor.
    """
    tasks: Sequence[UnitTask] = unit_tasks(source, target, rows, columns)
    return Resharding(
        source=source,
        target=target,
        rows=rows,
        columns=columns,
        broadcasts=tuple(
            Broadcast(task=task, sender=task.sources[0], route=task.receivers, relays=False) for task in tasks
        ),
    )
