"""`History`: all events on all streams and host threads, and the races among them.

thread ──enqueues──> op on its current stream      the op comes after what the thread knows
event.record ──> what its stream knows             stream waits: the stream knows it, the thread does not
                                                   thread synchronises: the thread knows it
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from tests.harness.races.clocks import Agent, Clock
from tests.harness.races.memory import Conflict, Home, Memory
from tests.harness.races.operators import Access, accesses, waits_for_device
from tests.harness.races.report import Place, Race, Use, where

__all__ = ["History"]

#: Limit of recorded races; a missing edge makes one for every batch and row.
_MAX_RACES = 200


class History:
    """Record of a run. Written by all its threads.

    Attributes:
        lock: held while an event is recorded.
        races: races found.
        host_waits: calls that make a thread wait for its own stream's work (`Tensor.item`), with their places.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.races: list[Race] = []
        self.host_waits: list[tuple[str, Place]] = []
        self.memory = Memory()
        self._agents: list[Agent] = [Agent(0, "nobody")]
        self._uses: dict[tuple[int, int], list[Use]] = {}
        self._threads = threading.local()
        self._hosts: list[Agent] = []
        self._default = self.agent("default stream")

    def agent(self, name: str) -> Agent:
        """A new stream or thread without knowledge."""
        with self.lock:
            self._agents.append(Agent(len(self._agents), name))
            return self._agents[-1]

    # ---- threads and their streams -------------------------------------------------------------------------------

    @property
    def host(self) -> Agent:
        """The agent of the calling thread. A thread that was not introduced knows what any thread has known so far."""
        host: Agent | None = getattr(self._threads, "host", None)
        if host is None:
            with self.lock:
                host = self.introduce(Clock())
                for other in self._hosts:
                    host.clock.join(other.clock)
        return host

    def introduce(self, clock: Clock) -> Agent:
        """Set what the calling thread knows when it begins."""
        with self.lock:
            host = self._threads.host = self.agent(f"thread {threading.current_thread().name}")
            host.clock.join(clock)
            self._hosts.append(host)
            return host

    @property
    def stream(self) -> Agent:
        """The calling thread's current stream."""
        stream: Agent = getattr(self._threads, "stream", self._default)
        return stream

    def switch(self, stream: Agent) -> Agent:
        """Make a stream current and return the previous one."""
        before = self.stream
        self._threads.stream = stream
        return before

    @property
    def default_stream(self) -> Agent:
        return self._default

    def knowledge(self) -> Clock:
        """Clock of the calling thread."""
        with self.lock:
            return self.host.clock.copy()

    def learn(self, clock: Clock) -> None:
        """Merge a clock into the calling thread's."""
        with self.lock:
            self.host.clock.join(clock)

    def reached(self, stream: Agent) -> Clock:
        """Clock after everything enqueued on a stream so far."""
        with self.lock:
            stream.clock.join(self.host.clock)
            return stream.clock.copy()

    def delay(self, stream: Agent, clock: Clock) -> None:
        """Order everything enqueued later on a stream after a clock."""
        with self.lock:
            stream.clock.join(clock)

    def learn_all(self) -> None:
        """Let the calling thread wait for every stream."""
        with self.lock:
            for agent in self._agents:
                self.host.clock.join(agent.clock)

    # ---- accesses ------------------------------------------------------------------------------------------------

    def operator(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operator call of the calling thread."""
        found = list(accesses(operator, args, kwargs, result))
        if not found:  # a view
            return
        name = operator._schema.name
        with self.lock:
            memory = self.memory
            memory.sweep()
            homes = {memory.home(access.tensor) for access in found if not access.is_result}
            if Home.DEVICE not in homes and kwargs.get("device") is None:
                self._note(found, self.host, name, on_device=False)
                return
            for access in found:
                if not access.is_result:
                    memory.adopt(access.tensor)
            stream = self.stream
            stream.clock.join(self.host.clock)
            self._note(found, stream, name, on_device=True)
            if waits_for_device(name) or (Home.PINNED in homes and not _is_async(args, kwargs)):
                self.host_waits.append((name, where()))
                self.host.clock.join(stream.clock)

    def host_access(self, tensor: Tensor, *, writes: bool) -> None:
        """Record a direct read or write of a tensor's memory by the calling thread."""
        with self.lock:
            self.memory.sweep()
            self._note([Access(tensor=tensor, writes=writes)], self.host, "the host", on_device=False)

    def keep(self, tensor: Tensor) -> None:
        """`Tensor.record_stream` with the calling thread's current stream."""
        with self.lock:
            self.memory.sweep()
            self.memory.keep(tensor, self.stream)

    def pin(self, tensor: Tensor) -> None:
        """Mark the tensor as pinned host memory."""
        with self.lock:
            self.memory.sweep()
            self.memory.pin(tensor)

    def _note(self, found: Iterable[Access], agent: Agent, operator: str, *, on_device: bool) -> None:
        place, time, num_agents = where(), agent.clock.advance(agent.number), len(self._agents)
        uses = self._uses[agent.number, time] = []
        for access in found:
            use = Use(
                agent=agent.name,
                operator=operator,
                shape=tuple(access.tensor.shape),
                writes=access.writes,
                place=place,
            )
            for conflict in self.memory.use(access, agent, time, num_agents, on_device=on_device):
                self._report(conflict, use)
            uses.append(use)

    def _report(self, conflict: Conflict, second: Use) -> None:
        if len(self.races) < _MAX_RACES:
            # An operator has several accesses; the first that writes (or reads) like the conflict is shown.
            uses = self._uses[conflict.agent, conflict.time]
            first = next((use for use in uses if use.writes == conflict.writes), second)
            self.races.append(Race(first=first, second=second, is_reuse=conflict.is_reuse))


def _is_async(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Of ``copy_(self, src, non_blocking)``."""
    return bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
