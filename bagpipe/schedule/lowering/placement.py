"""`place`: work of K-FAC in the idle time of compute lanes, so that it delays nothing else where it fits.

    program    0F0 0F1 ............ 0B0 .... 0B1 0PRECOND0 0OPT0        repeated: its steady state (`periodic`)
    work       COV_A0 COV_A1           └COV_G0   └COV_G1                released by F and B; X_INV by all of them
    placed     0F0 0F1 A0 A1 ...... 0B0 G0 . 0B1 | G1 X_INV | 0PRECOND0 0OPT0
                                                 └ did not fit: at the last moment

The rule is PipeFisher's (Osawa et al., MLSys 2023): gaps in the order of time, and for each of them, of the work that
is released and fits, what can start first and has the earliest deadline. The steps behind the backwards (PRECOND and
what follows it) are taken as late as the period allows, so that the time at the end of a batch can be used before them.
Work comes behind the first action of its lane in a batch, which announces the batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bagpipe.schedule.analysis.costs import Costs, Latency, cost_function
from bagpipe.schedule.analysis.periodic import Periodic, periodic
from bagpipe.schedule.analysis.simulate import TimedAction
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program

__all__ = ["LanePlacement", "Placed", "Work", "place"]

#: Operations behind the backwards of a batch in a program with PRECOND.
_STEPS = ("REDUCE_COV", "PRECOND", "X_BCAST", "X_KL", "OPT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """An action to place. Other work is named by its number.

    Attributes:
        action: COV_A, COV_G or X_INV.
        lane: where it is done.
        after: actions of the program that come before it.
        after_work: work of the batch that comes before it.
        after_earlier: work of the batch before that comes before it.
        after_sums: a REDUCE_COV comes between that work and this.
        before: PRECOND that waits for it; None: it can come at the end of the batch.
    """

    action: Action
    lane: str
    after: tuple[Action, ...] = ()
    after_work: tuple[int, ...] = ()
    after_earlier: tuple[int, ...] = ()
    after_sums: bool = False
    before: Action | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlacement:
    """The work of a lane in one batch.

    Attributes:
        placed: what fits, with its times in the steady state of the program without it.
        unfit: what does not, and is done at the last moment.
        unfit_covariances, unfit_inverses: the time that it takes.
    """

    placed: tuple[TimedAction, ...] = ()
    unfit: tuple[Action, ...] = ()
    unfit_covariances: float = 0
    unfit_inverses: float = 0

    @property
    def unfit_time(self) -> float:
        """Time of all that does not fit."""
        return self.unfit_covariances + self.unfit_inverses


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The lanes with the work in them.

    Attributes:
        lanes: all lanes of the program.
        placements: of the lanes with work.
        period: time per batch of the program without the work.
    """

    lanes: Mapping[str, tuple[Action, ...]]
    placements: Mapping[str, LanePlacement]
    period: float


def place(program: Program, work: Sequence[Work], costs: Costs | None = None, *, latency: Latency = 0) -> Placed:
    """Put work into the lanes of a program.

    Args:
        program: one batch with PRECOND and OPT, without messages.
        work: by number; what waits for other work of the batch comes after it.
        costs: see `costs`.
        latency: added to every dependency that crosses lanes.
    """
    timing = periodic(program, costs, latency=latency)
    filling = _Filling(timing, work, costs, latency)
    filling.fill_batch()
    filling.fill_from_batch_before()
    return filling.result(program)


@dataclass(slots=True)
class _Lane:
    """A compute lane while it is filled.

    Attributes:
        nodes: its actions.
        first_step: place of the first of `_STEPS` among them; behind them all if there is none.
        free: until when it is busy.
        ready: numbers of the work that is released.
    """

    nodes: list[int]
    first_step: int
    free: float = 0
    ready: list[int] = field(default_factory=list)


class _Filling:
    """Lanes while they are filled.

    Attributes:
        starts: of the nodes, as `_with_late_steps`.
        finish: of the work that is placed.
        before: node -> work that is placed before it; None, lane -> at the lane's end.
    """

    def __init__(self, timing: Periodic, work: Sequence[Work], costs: Costs | None, latency: Latency) -> None:
        cost = cost_function(costs)
        self._timing, self._work = timing, work
        self._latency = latency if callable(latency) else lambda source, waiting: latency
        self.starts = _with_late_steps(timing)
        self._costs = [float(cost(item.action)) for item in work]
        self._lanes: dict[str, _Lane] = {}
        for lane in dict.fromkeys(item.lane for item in work):
            nodes = [node for node, name in enumerate(timing.lane_of) if name == lane]
            steps = (place for place, node in enumerate(nodes) if timing.actions[node].op in _STEPS)
            self._lanes[lane] = _Lane(nodes, next(steps, len(nodes)))
        self.finish: dict[int, float] = {}
        self.before: dict[tuple[str, int], list[int]] = {}
        self._node_of = {atom: node for node, action in enumerate(timing.actions) for atom in action.atoms}
        self._release = [0.0] * len(work)
        self._missing = [len(item.after) + len(item.after_work) for item in work]
        self._limits = [
            self._end(item.lane) if item.before is None else self.starts[self._node_of[item.before]] for item in work
        ]
        self._deadlines = list(self._limits)  # with time for what waits for the work
        for number, item in enumerate(work):
            for source in item.after_work:
                self._deadlines[source] -= self._costs[number]

    def _end(self, lane: str) -> float:
        """When the lane begins the next batch."""
        return self.starts[self._lanes[lane].nodes[0]] + self._timing.period

    def fill_batch(self) -> None:
        """Place what waits for nothing of the batch before, in the order in which the batch is done."""
        waiting_for_node: dict[int, list[int]] = {}
        waiting_for_work: dict[int, list[int]] = {}
        for number, item in enumerate(self._work):
            for action in item.after:
                waiting_for_node.setdefault(self._node_of[action], []).append(number)
            for source in item.after_work:
                waiting_for_work.setdefault(source, []).append(number)
        place_of = {node: place for lane in self._lanes.values() for place, node in enumerate(lane.nodes)}

        def end_of(numbers: Sequence[int], source: Action, name: str, finish: float) -> None:
            for number in numbers:
                item = self._work[number]
                arrival = finish + (self._latency(source, item.action) if item.lane != name else 0)
                self._release[number] = max(self._release[number], arrival)
                self._missing[number] -= 1
                if not self._missing[number] and not item.after_earlier and not item.after_sums:
                    self._lanes[item.lane].ready.append(number)

        def placed(number: int) -> None:
            item = self._work[number]
            end_of(waiting_for_work.get(number, ()), item.action, item.lane, self.finish[number])

        for node in _by_time(self._timing, self.starts):
            name, finish = self._timing.lane_of[node], self.starts[node] + self._timing.costs[node]
            lane = self._lanes.get(name)
            if lane is not None:
                if place_of[node]:
                    self._fill(name, place_of[node], self.starts[node], placed)
                lane.free = max(lane.free, finish)
            end_of(waiting_for_node.get(node, ()), self._timing.actions[node], name, finish)
        for name in sorted(self._lanes, key=self._end):
            self._fill(name, len(self._lanes[name].nodes), self._end(name), placed)

    def fill_from_batch_before(self) -> None:
        """Place what waits for the batch before, in the gaps that are left behind the first action of each lane."""
        begins = {name: self._begin(name) for name in self._lanes}
        for lane in self._lanes.values():
            lane.ready.clear()  # what is left of the batch's own
        for number, item in enumerate(self._work):
            if not item.after_earlier:
                continue
            for source in item.after_earlier:
                earlier = self._work[source]
                arrival = self.finish.get(source, float("inf")) - self._timing.period
                if item.after_sums or source not in self.finish:
                    arrival = begins[earlier.lane]
                if item.after_sums or earlier.lane != item.lane:
                    arrival += self._latency(earlier.action, item.action)
                self._release[number] = max(self._release[number], arrival)
            self._lanes[item.lane].ready.append(number)
        for name, lane in self._lanes.items():
            lane.free = begins[name] + self._timing.costs[lane.nodes[0]]
            for place in range(1, min(lane.first_step + 1, len(lane.nodes))):
                for number in self.before.get((name, place), ()):
                    lane.free = max(lane.free, self.finish[number])
                self._fill(name, place, self.starts[lane.nodes[place]], lambda number: None)
                lane.free = self.starts[lane.nodes[place]] + self._timing.costs[lane.nodes[place]]

    def _begin(self, name: str) -> float:
        """When the lane can begin the batch, behind the work at the end of the batch before."""
        lane = self._lanes[name]
        first = lane.nodes[0]
        if self._timing.actions[first].op != "X_EMBED":
            return self.starts[first]
        return min(self.starts[first], max(self._timing.starts[first], lane.free - self._timing.period))

    def _fill(self, name: str, place: int, end: float, placed: Callable[[int], None]) -> None:
        """Place released work before the lane's action at `place`, which starts at `end`."""
        lane = self._lanes[name]
        while True:
            fits = [
                (max(lane.free, self._release[number]), self._deadlines[number], number)
                for number in lane.ready
                if (self._work[number].before is None or place <= min(lane.first_step, len(lane.nodes) - 1))
                and self._is_next(number)
                and max(lane.free, self._release[number]) + self._costs[number]
                <= min(end, self._limits[number]) + self._timing.slack
            ]
            if not fits:
                return
            start, _, number = min(fits)
            lane.ready.remove(number)
            self.finish[number] = lane.free = start + self._costs[number]
            self.before.setdefault((name, place), []).append(number)
            placed(number)

    def _is_next(self, number: int) -> bool:
        """Whether the work that comes before it in the batch is placed."""
        return all(source in self.finish for source in self._work[number].after_work)

    def result(self, program: Program) -> Placed:
        """The lanes, with what does not fit at the last moment: covariances, and behind them inverses."""
        unfit: dict[str, list[int]] = {name: [] for name in self._lanes}
        left = [number for number in range(len(self._work)) if number not in self.finish]
        for number in sorted(left, key=self._is_inverse):
            item = self._work[number]
            lane = self._lanes[item.lane]
            place = len(lane.nodes) if item.before is None else lane.first_step
            self.before.setdefault((item.lane, place), []).append(number)
            unfit[item.lane].append(number)
        lanes = dict(program.lanes)
        for name in self._lanes:
            row: list[Action] = []
            for place in range(len(lanes[name]) + 1):
                row += [self._work[number].action for number in self.before.get((name, place), ())]
                row += lanes[name][place : place + 1]
            lanes[name] = tuple(row)
        placements = {name: self._placement(name, numbers) for name, numbers in unfit.items()}
        return Placed(lanes=lanes, placements=placements, period=self._timing.period)

    def _placement(self, name: str, unfit: Sequence[int]) -> LanePlacement:
        placed = sorted((self.finish[n] - self._costs[n], n) for n in self.finish if self._work[n].lane == name)
        return LanePlacement(
            placed=tuple(
                TimedAction(lane=name, action=self._work[n].action, start=start, finish=self.finish[n])
                for start, n in placed
            ),
            unfit=tuple(self._work[n].action for n in unfit),
            unfit_covariances=sum(self._costs[n] for n in unfit if not self._is_inverse(n)),
            unfit_inverses=sum(self._costs[n] for n in unfit if self._is_inverse(n)),
        )

    def _is_inverse(self, number: int) -> bool:
        return self._work[number].action.op == "X_INV"


def _by_time(timing: Periodic, starts: Sequence[float]) -> Iterator[int]:
    """The nodes of a batch by their starts, and what waits for another one behind it, though times are rounded."""
    missing = [sum(not wait.batches for wait in waits) for waits in timing.waits]
    waiting: list[list[int]] = [[] for _ in starts]
    for node, waits in enumerate(timing.waits):
        for wait in waits:
            if not wait.batches:
                waiting[wait.node].append(node)
    ready = [(starts[node], node) for node, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        yield node
        for other in waiting[node]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (starts[other], other))


def _with_late_steps(timing: Periodic) -> list[float]:
    """The starts, of PRECOND and X_EMBED the latest ones with the same period, of what follows PRECOND the next ones.

    X_EMBED without examples of its own waits for nothing but its lane. So the time between two batches lies before it.
    """
    ops = [action.op for action in timing.actions]
    followers: list[list[tuple[int, float]]] = [[] for _ in ops]
    for node, waits in enumerate(timing.waits):
        for wait in waits:
            followers[wait.node].append((node, wait.time - wait.batches * timing.period))
    late = list(timing.starts)
    for chosen in (("X_EMBED",), _STEPS):
        for node in (node for node in reversed(timing.order) if ops[node] in chosen):
            late[node] = min((late[other] - time for other, time in followers[node]), default=late[node])
    starts = [late[node] if op in ("PRECOND", "X_EMBED") else timing.starts[node] for node, op in enumerate(ops)]
    for node in (node for node in timing.order if ops[node] in _STEPS and ops[node] != "PRECOND"):
        starts[node] = max(starts[wait.node] + wait.time - wait.batches * timing.period for wait in timing.waits[node])
    return starts
