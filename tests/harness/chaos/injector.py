"""`Injector`: applies faults to a scene, by a table of fault kinds."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import redis

from tests.harness.chaos.damage import damage_newest
from tests.harness.chaos.scene import Scene, Start, Zombies
from tests.harness.faults import Fault
from tests.harness.proxy import ConnectionFault, ConnectionFaultKind

__all__ = ["RESTORE", "Injector"]

#: The second half of rewinding a store.
RESTORE = "restore-store"

_DAY_S = 86_400
_MAX_PAUSE_S = 0.5
#: Upper bound of the space left on a filled disk or in limited memory.
_MAX_LEFT_BYTES = 64 << 10
#: Upper bounds of answers before a network fault, and of bytes that a cut lets through.
_MAX_ANSWERS = 40
_MAX_CUT_BYTES = 3000
#: Rare, because a silent connection costs the deadline of an exchange.
_CONNECTION_FAULTS = (*(kind for kind in ConnectionFaultKind if kind is not ConnectionFaultKind.SILENCE),) * 3 + (
    ConnectionFaultKind.SILENCE,
)


class Injector:
    """Injects faults.

    Args:
        scene: the target.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        #: Injected faults in words, for the report.
        self.words: list[str] = []
        self._damaged: set[Path] = set()
        self._actions: dict[str, Callable[[Fault, Start], Fault | None]] = {
            "kill-trainer": self._kill_trainer,
            "kill-rank": self._kill_rank,
            "kill-agent": self._kill_trainer,
            "kill-daemon": self._kill_daemon,
            "kill-store": self._kill_store,
            "lose-store": self._lose_store,
            "kill-all": self._kill_all,
            "zombie": self._zombie,
            "flush-store": self._flush_store,
            "delete-row": self._delete_row,
            "rewind-store": self._rewind_store,
            RESTORE: self._restore_store,
            "tear-checkpoint": self._tear_checkpoint,
            "fill-disk": self._fill_disk,
            "fill-store-disk": self._fill_store_disk,
            "fill-store-memory": self._fill_store_memory,
            "evict-rows": self._evict_rows,
            "network": self._network,
            "pause-rank": self._pause_rank,
            "pause-daemon": self._pause_daemon,
            "pause-store": self._pause_store,
            "clock": self._clock,
        }

    def fire(self, fault: Fault, start: Start) -> Fault | None:
        """Inject the fault into the running start. Returns later parts of the same fault."""
        with suppress(redis.RedisError):  # an earlier fault may have stopped the store
            return self._actions[fault.kind](fault, start)
        return None

    def _kill_trainer(self, fault: Fault, start: Start) -> None:
        start.signal(signal.SIGKILL)

    def _kill_rank(self, fault: Fault, start: Start) -> None:
        if "agent" in self._scene.needs:  # the launcher starts it again
            for pid, rank in self._scene.workers().items():
                if rank == fault.rank:
                    os.kill(pid, signal.SIGKILL)
            return
        start.signal(signal.SIGKILL, [fault.rank])

    def _kill_daemon(self, fault: Fault, start: Start) -> None:
        self._scene.daemon.kill()
        self._scene.daemon.start()

    def _kill_store(self, fault: Fault, start: Start) -> None:
        self._scene.store.restart()

    def _lose_store(self, fault: Fault, start: Start) -> None:
        self._scene.store.kill()
        self._scene.store.wipe()
        self._scene.store.start()

    def _kill_all(self, fault: Fault, start: Start) -> None:
        start.signal(signal.SIGKILL)
        self._kill_daemon(fault, start)
        self._kill_store(fault, start)

    def _zombie(self, fault: Fault, start: Start) -> None:
        start.signal(signal.SIGSTOP)
        # One in five sleeps until its successor has ended.
        self._scene.zombies.append(Zombies(start=start, wake_at=fault.choice * 1.25))

    def _flush_store(self, fault: Fault, start: Start) -> None:
        self._scene.store.client.flushall()

    def _delete_row(self, fault: Fault, start: Start) -> None:
        if not self._scene.store.delete_row(fault.choice):
            self.words.append("no row to delete")

    def _rewind_store(self, fault: Fault, start: Start) -> Fault | None:
        self._scene.store.keep_copy()
        at = fault.at + (1 - fault.at) * fault.choice
        return dataclasses.replace(fault, kind=RESTORE, at=at)

    def _restore_store(self, fault: Fault, start: Start) -> None:
        self._scene.store.kill()
        self._scene.store.restore_copy()
        self._scene.store.start()

    def _tear_checkpoint(self, fault: Fault, start: Start) -> None:
        start.signal(signal.SIGKILL)
        while not start.has_ended(1.0):
            pass
        self.words.append(damage_newest(self._scene.checkpoints, fault.choice, self._damaged) or "nothing to damage")

    def _fill_disk(self, fault: Fault, start: Start) -> None:
        assert self._scene.disk is not None
        self._scene.disk.fill(leave_bytes=int(fault.choice * _MAX_LEFT_BYTES))

    def _fill_store_disk(self, fault: Fault, start: Start) -> None:
        assert self._scene.store_disk is not None
        self._scene.store_disk.fill(leave_bytes=int(fault.choice * _MAX_LEFT_BYTES))

    def _fill_store_memory(self, fault: Fault, start: Start) -> None:
        self._scene.store.limit_memory("noeviction", 1.0 + fault.choice / 100)

    def _evict_rows(self, fault: Fault, start: Start) -> None:
        self._scene.store.limit_memory("allkeys-random", 1.0 - fault.choice / 5)

    def _network(self, fault: Fault, start: Start) -> None:
        assert self._scene.proxy is not None
        kind = _CONNECTION_FAULTS[int(fault.choice * len(_CONNECTION_FAULTS))]
        rest = fault.choice * len(_CONNECTION_FAULTS) % 1.0
        injected = ConnectionFault(
            kind=kind,
            at=1 + int(rest * _MAX_ANSWERS),
            num_bytes=int(rest * 1e3 % 1.0 * _MAX_CUT_BYTES),
            delay_s=0.002 if kind is ConnectionFaultKind.DELAY else 0.0,
        )
        self.words.append(f"{kind.value} at {injected.at}")
        self._scene.proxy.inject(injected)

    def _pause_rank(self, fault: Fault, start: Start) -> None:
        rank = min(fault.rank, len(start.ranks) - 1)  # a launcher stands for all ranks
        start.signal(signal.SIGSTOP, [rank])
        _pause(fault)
        start.signal(signal.SIGCONT, [rank])

    def _pause_daemon(self, fault: Fault, start: Start) -> None:
        self._scene.daemon.signal(signal.SIGSTOP)
        _pause(fault)
        self._scene.daemon.signal(signal.SIGCONT)

    def _pause_store(self, fault: Fault, start: Start) -> None:
        self._scene.store.signal(signal.SIGSTOP)
        _pause(fault)
        self._scene.store.signal(signal.SIGCONT)

    def _clock(self, fault: Fault, start: Start) -> None:
        assert self._scene.clock is not None
        self._scene.clock.jump(_DAY_S if fault.choice < 0.5 else -_DAY_S)


def _pause(fault: Fault) -> None:
    select.select([], [], [], fault.choice * _MAX_PAUSE_S)
