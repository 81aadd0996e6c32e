"""`Training`: forward, backward, updates of every batch. `TrainingOfRanks`: with rows and gradients on their ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from bagpipe.cache.exchange import RowExchange
from bagpipe.cache.rows import RowStep
from bagpipe.cache.step import StepContext
from bagpipe.client.step import Step
from bagpipe.phases.phase import Phase

if TYPE_CHECKING:
    from bagpipe.engine import Engine

__all__ = ["Training", "TrainingOfRanks"]


class Training(Phase):
    train = True

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {
            "X_READ": self.read,
            "X_GET": self.get,
            "X_EVICT": self.evict,
            "X_PUT": self.put,
            "F": self.compute_forward,
            "B": self.backward,
            "X_UPDATE": self.update,
            "OPT": self.dense_step,
            "X_STORE": self.store,
        }

    def read(self, b: int) -> None:
        super().read(b)
        if b == 0:
            # Only now: bad input must leave the store untouched. A namespace made by this job holds no rows yet.
            self.skip_new = self.engine.claim()

    def evict(self, b: int) -> None:
        flight = self.flights[b]
        flight.writes = self.cache.evict(flight.step.owner)

    def compute_forward(self, b: int) -> None:
        scored = self.forward(b)
        self.flights[b].loss = None if scored is None else self.loss(b, *scored)

    def backward(self, b: int) -> None:
        flight = self.flights[b]
        if flight.loss is not None:
            flight.loss.backward()  # type: ignore[no-untyped-call]
            flight.loss = None

    def row_step(self, b: int) -> RowStep:
        settings = self.engine.settings
        return RowStep(lr=settings.rows_lr, eps=settings.eps, step=b + 1)

    def update(self, b: int) -> None:
        self.cache.update(self.flights[b].context, self.row_step(b))

    def dense_step(self, b: int) -> None:
        self.engine.optimizer.step()
        self.engine.optimizer.zero_grad(set_to_none=True)

    def store(self, b: int) -> None:
        flight = self.flights[b]
        self.engine.store.write_many(flight.writes)
        self.rows_written += sum(len(request.ids) for request in flight.writes)
        flight.writes = []

    def end(self) -> None:
        """Write back what is still dirty."""
        for requests in self.cache.flush():
            self.engine.store.write_many(requests)
            self.rows_written += sum(len(request.ids) for request in requests)


class TrainingOfRanks(Training):
    """Rows and gradients travel between the ranks."""

    row_waits = ("0X_PUT", "0X_PULL", "0X_PUSH")

    def __init__(self, engine: Engine, steps: Iterator[Step]) -> None:
        super().__init__(engine, steps)
        assert engine.peers is not None, "one rank trains without"
        self.peers = engine.peers
        self.exchange = RowExchange(engine.cache, engine.peers)

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {
            **super().handlers(),
            "X_PREPULL": lambda b: self.exchange.early(self.flights[b].context),
            "X_PULL": lambda b: self.exchange.pull(self.flights[b].context),
            "X_PUSH": self.push,
            "X_PUSH_LATE": lambda b: self.exchange.push_late(self.flights[b].runs),
            "X_UPDATE_LATE": lambda b: self.exchange.update_late(self.flights[b].context, self.row_step(b)),
            "X_ACK": lambda b: self.peers.acknowledge(),
        }

    def begin(self, context: StepContext) -> None:
        self.exchange.begin(context)

    def push(self, b: int) -> None:
        flight = self.flights[b]
        flight.runs = self.exchange.push(flight.context)

    def update(self, b: int) -> None:
        self.exchange.update(self.flights[b].context, self.row_step(b))
