"""`Memory`: every storage that was used, who used it, and who may use its bytes again when it is gone.

    allocated on stream A ─> used on A, B … ─> freed ─> A's next allocation may get the bytes: is it after B's uses?

A storage is the device's, the host's or pinned. What no operator made (arrays of numpy, `torch.tensor`) is the host's,
and so are counters of optimizers. Once it takes part in the device's work it is the device's, as on a CPU
``.to(device)`` gives the same memory.

As torch's caching allocator does it: a freed block goes back to the stream it was allocated on, and what that stream
does next may use it at once. Streams for which the block was *kept* (`Tensor.record_stream`) are waited for.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from tests.harness.races.clocks import Agent
from tests.harness.races.operators import Access
from tests.harness.races.regions import cells_of
from tests.harness.races.shadow import Shadow

__all__ = ["Conflict", "Home", "Memory"]


@dataclass(frozen=True, slots=True)
class Conflict:
    """An earlier use that the present one is not ordered after.

    Attributes:
        agent, time: who, and when by its own clock.
        writes: or reads.
        is_reuse: the memory was freed, and is given out again now.
    """

    agent: int
    time: int
    writes: bool
    is_reuse: bool = False


class Home(enum.Enum):
    """Whose memory it is."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"


@dataclass(slots=True, eq=False)
class _Block:
    """One storage.

    Attributes:
        shadow: of its cells.
        home: whose memory it is.
        allocator: stream it was allocated on; None: it was there before, or is the host's.
        uses: agent -> its latest use: when, and whether it wrote.
        kept: agents it is kept for.
    """

    shadow: Shadow
    home: Home = Home.HOST
    allocator: int | None = None
    uses: dict[int, tuple[int, bool]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


class Memory:
    """All storages. Callers hold one lock, except for what storages themselves do when they are freed."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by address of the storage object
        self._gone: deque[int] = deque()  # filled by whichever thread drops a storage, inside any call
        self._freed: dict[int, list[dict[int, tuple[int, bool]]]] = {}  # by allocating stream: other streams' uses

    def __len__(self) -> int:
        """Storages that are alive."""
        self.sweep()
        return len(self._blocks)

    def sweep(self) -> None:
        """Take note of storages that are gone. Before anything is looked up: addresses are used again."""
        while self._gone:
            block = self._blocks.pop(self._gone.popleft())
            if block.allocator is not None:
                others = block.uses.keys() - block.kept - {block.allocator}
                if others:
                    self._freed.setdefault(block.allocator, []).append({agent: block.uses[agent] for agent in others})

    def use(self, access: Access, agent: Agent, time: int, num_agents: int, *, on_device: bool) -> Iterator[Conflict]:
        """An agent uses a tensor at a time of its own; earlier uses that it should have waited for."""
        clock = agent.clock
        tensor = access.tensor
        is_new = tensor.untyped_storage()._cdata not in self._blocks
        block = self._block(tensor)
        if is_new and access.is_result and on_device:
            block.home, block.allocator = Home.DEVICE, agent.number
            for uses in self._freed.pop(agent.number, ()):
                for other, (last, wrote) in uses.items():
                    if not clock.knows(other, last):
                        yield Conflict(other, last, wrote, is_reuse=True)
        if not tensor.numel() or (access.is_result and not access.writes):
            return
        block.uses[agent.number] = time, access.writes
        cells = cells_of(tensor, access.rows)
        for other, last, wrote in block.shadow.note(cells, agent.number, time, clock, num_agents, writes=access.writes):
            yield Conflict(other, last, wrote)

    def keep(self, tensor: Tensor, agent: Agent) -> None:
        """The tensor's memory stays until what the agent has to do now is done."""
        self._block(tensor).kept.add(agent.number)

    def pin(self, tensor: Tensor) -> None:
        """The tensor is in the host's memory, where devices reach it."""
        block = self._block(tensor)
        block.home, block.allocator = Home.PINNED, None

    def adopt(self, tensor: Tensor) -> None:
        """The device works with the tensor; a lone value is passed to it and stays the host's."""
        block = self._block(tensor)
        if block.home is Home.HOST and tensor.dim():
            block.home = Home.DEVICE

    def home(self, tensor: Tensor) -> Home:
        """Where a tensor is, now."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return Home.HOST if block is None else block.home

    def _block(self, tensor: Tensor) -> _Block:
        storage = tensor.untyped_storage()
        address = storage._cdata
        block = self._blocks.get(address)
        if block is None:
            block = self._blocks[address] = _Block(Shadow(storage.nbytes()))
            weakref.finalize(storage, self._gone.append, address).atexit = False
        elif storage.nbytes() > block.shadow.num_bytes:  # resized: other memory
            block.shadow = Shadow(storage.nbytes())
        return block
