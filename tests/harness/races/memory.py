"""`Memory`: all storages in use, their accesses, and the streams that can reuse their memory.

    allocated on stream A ─> used on A, B … ─> freed ─> A's next allocation may get the bytes: is it after B's uses?

A storage is device, host or pinned memory. Tensors that no operator created (numpy arrays, `torch.tensor`) and counters
of optimizers are host memory. A tensor becomes device memory when device work uses it, since on a CPU ``.to(device)``
returns the same memory.

The model follows torch's caching allocator: a freed block returns to the stream it was allocated on, whose next work
can reuse it immediately. Streams for which the block was *kept* (`Tensor.record_stream`) are waited for.
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
    """An earlier access that the present one is not ordered after.

    Attributes:
        agent, time: agent of the access and its own time.
        writes: whether it wrote.
        is_reuse: the memory was freed and is being reallocated.
    """

    agent: int
    time: int
    writes: bool
    is_reuse: bool = False


class Home(enum.Enum):
    """Kind of memory."""

    DEVICE = "device"
    HOST = "host"
    PINNED = "pinned"


@dataclass(slots=True, eq=False)
class _Block:
    """One storage.

    Attributes:
        shadow: of its cells.
        home: kind of memory.
        allocator: stream it was allocated on; None: unknown, or host memory.
        uses: agent -> its latest access: time, and whether it wrote.
        kept: agents it is kept for.
    """

    shadow: Shadow
    home: Home = Home.HOST
    allocator: int | None = None
    uses: dict[int, tuple[int, bool]] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


class Memory:
    """All storages. Callers hold a lock, except when storages are freed."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}  # by address of the storage object
        self._gone: deque[int] = deque()  # filled by any thread that drops a storage, inside any call
        self._freed: dict[int, list[dict[int, tuple[int, bool]]]] = {}  # by allocating stream: other accesses

    def __len__(self) -> int:
        """Number of live storages."""
        self.sweep()
        return len(self._blocks)

    def sweep(self) -> None:
        """Process freed storages. Called before any lookup, since addresses are reused."""
        while self._gone:
            block = self._blocks.pop(self._gone.popleft())
            if block.allocator is not None:
                others = block.uses.keys() - block.kept - {block.allocator}
                if others:
                    self._freed.setdefault(block.allocator, []).append({agent: block.uses[agent] for agent in others})

    def use(self, access: Access, agent: Agent, time: int, num_agents: int, *, on_device: bool) -> Iterator[Conflict]:
        """Record an access of a tensor. Returns the earlier accesses that it conflicts with."""
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
        """Keep the tensor's memory until the agent's enqueued work is done."""
        self._block(tensor).kept.add(agent.number)

    def pin(self, tensor: Tensor) -> None:
        """Mark the tensor as pinned host memory."""
        block = self._block(tensor)
        block.home, block.allocator = Home.PINNED, None

    def adopt(self, tensor: Tensor) -> None:
        """Mark the tensor as device memory; a single element is passed by value and stays host memory."""
        block = self._block(tensor)
        if block.home is Home.HOST and tensor.dim():
            block.home = Home.DEVICE

    def home(self, tensor: Tensor) -> Home:
        """Current kind of memory of a tensor."""
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
