"""`Jobs`: the starts of a job on one namespace, by the product's own ledger and recovery.

take_over ──> acquire; keep the rows, or recover those of the newest checkpoint ──> a Writer for each rank
checkpoint ──> every writer rotates its logs ──> lists and groups are kept, as files would ──> commit
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.manifest import FileEntry, Manifest, Part
from bagpipe.checkpoint.recovery import recover
from bagpipe.errors import InputError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import ReadResult, WriteRequest
from bagpipe.store.keys import bucket_of
from bagpipe.testing.fence_jobs import new_token
from tests.harness.histories.clients import Budget, Writer
from tests.harness.histories.events import Kind, Phase, Recorder
from tests.harness.histories.hand import Hand
from tests.harness.histories.plan import Plan
from tests.harness.histories.rows import NUM_ROWS, SCHEMA, Lists, encode
from tests.harness.histories.sites import BUCKETS, Site, connect
from tests.harness.zygote import Zygote

__all__ = ["Jobs"]

_LINEAGE = "f" * 32
_TAKE_OVER_TIMEOUT_S = 120.0
_PAUSE_S = 0.05


class _KeptRows(CheckpointRows):
    """A checkpoint's rows in memory, as far as a recovery uses them."""

    def __init__(self, lists: Lists) -> None:
        kept = {row: numbers for row, numbers in sorted(lists.items()) if numbers}
        self.schema = SCHEMA
        self._ids = np.array(list(kept), np.int64)
        self._records = encode(list(kept.values()))

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        found = np.isin(ids, self._ids)
        rows = np.zeros((len(ids), self._records.shape[1]), np.float32)
        rows[found] = self._records[np.searchsorted(self._ids, ids[found])]
        return ReadResult(rows, found, np.zeros(len(ids), np.uint64))

    def dirty(self) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        return np.empty(0, np.uint32), np.empty(0, np.int64)

    def count(self, num_buckets: int) -> NDArray[np.int64]:
        return np.bincount(self._buckets(num_buckets), minlength=num_buckets)

    def requests(
        self, *, buckets: Collection[int] | None = None, num_buckets: int = 1
    ) -> Iterator[tuple[WriteRequest, ...]]:
        chosen = np.isin(self._buckets(num_buckets), list(range(num_buckets) if buckets is None else buckets))
        if chosen.any():
            yield (WriteRequest(0, self._ids[chosen], self._records[chosen]),)

    def _buckets(self, num_buckets: int) -> NDArray[np.uint16]:
        return bucket_of(np.zeros(len(self._ids), np.uint32), self._ids, num_buckets)


class _NotingLedger:
    """A ledger that tells when it has acquired the namespace."""

    def __init__(self, ledger: Ledger, acquired: Callable[[], object]) -> None:
        self._ledger = ledger
        self._acquired = acquired

    def acquire(self, token: str) -> None:
        self._ledger.acquire(token)
        self._acquired()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checkpoint:
    manifest: Manifest
    lists: Lists


class Jobs:
    """All starts of a history. Used by one thread. Context manager: at its end no writer is left.

    Args:
        plan: of the history.
        site: the servers.
        zygote: forks the writers' processes.
        folder: for their sockets and streams.
        recorder, budget: shared with the clients.
        draw: random choices.
        defect: of the writers' stores; empty: none.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        site: Site,
        zygote: Zygote,
        folder: Path,
        recorder: Recorder,
        budget: Budget,
        draw: random.Random,
        defect: str = "",
    ) -> None:
        self._plan = plan
        self._site = site
        self._zygote = zygote
        self._folder = folder
        self._recorder = recorder
        self._budget = budget
        self._draw = draw
        self._defect = defect
        self._job = 0
        self._token = ""
        self._epoch = 0
        self._step = 0
        self._newest = _Checkpoint(manifest=self._manifest("", []), lists={})
        self._writers: list[Writer] = []
        self._all_writers: list[Writer] = []

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *details: object) -> None:
        self._budget.close()
        for writer in self._all_writers:
            writer.close()

    @property
    def has_ended(self) -> bool:
        """Whether a writer of the last start writes no more, which ends a job."""
        return any(writer.has_ended for writer in self._writers)

    def take_over(self, *, with_writers: bool = True) -> None:
        """Start the job anew, repeatedly if the store fails. Earlier writers are left as they are.

        Raises:
            StoreError, InputError: the store keeps failing.
        """
        deadline_s = time.monotonic() + _TAKE_OVER_TIMEOUT_S
        while (error := self._try_to_take_over()) is not None:
            if time.monotonic() > deadline_s:
                raise error
            threading.Event().wait(_PAUSE_S)
        if not with_writers:
            return
        self._writers = []
        for number in range(self._plan.num_writers):
            self._writers.append(self._start(number))
            self._all_writers.append(self._writers[-1])

    def checkpoint(self, *, commits: bool = True) -> None:
        """Make a checkpoint of the last start, unless one of its writers has ended.

        Args:
            commits: False: the job dies between the checkpoint's files and the store's commit.
        """
        rotated = [writer.rotate() for writer in self._writers]
        parts = [each for each in rotated if each is not None]
        if len(parts) < len(rotated):
            return
        self._step += 1
        groups = [groups for groups, _ in parts]
        lists: dict[int, tuple[int, ...]] = {}
        for _, own in parts:
            lists |= own
        manifest = self._manifest(self._newest.manifest.checkpoint_id, groups)
        self._newest = _Checkpoint(manifest=manifest, lists=lists)
        epoch, self._epoch = self._epoch, self._epoch + 1
        if commits:
            self._commit(manifest.checkpoint_id, epoch, groups)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the last start."""
        for writer in self._writers:
            writer.hand.signal(number)

    def pause_and_replace(self) -> None:
        """Stop the processes of the last start, take over, and let them go on."""
        paused = list(self._writers)
        self.signal(signal.SIGSTOP)
        try:
            self.take_over()
        finally:
            for writer in paused:
                writer.hand.signal(signal.SIGCONT)

    def _try_to_take_over(self) -> StoreError | InputError | None:
        self._job += 1
        self._token, self._epoch = new_token(self._job), 1
        facts: dict[str, Any] = {"job": self._job}
        if self._plan.undoes:
            facts["checkpoint"] = dict(self._newest.lists)
        invoked = self._recorder.invoke("job", Kind.TAKE_OVER, **facts)
        try:
            with connect(self._site.options) as store, store.ledger() as ledger:
                noting: Any = _NotingLedger(ledger, self._note_acquired)
                if self._plan.undoes:
                    recover(
                        store,
                        noting,
                        token=self._token,
                        checkpoint=self._newest.manifest,
                        rows=_KeptRows(self._newest.lists),
                        num_writers=self._plan.num_writers,
                    )
                else:
                    # Not `recovery.take_over`, which refuses a namespace that has lost rows: the checker must find it.
                    noting.acquire(self._token)
                    noting.begin("", self._plan.num_writers)
        except (StoreError, InputError) as error:
            self._recorder.complete(invoked, Phase.UNKNOWN, error=str(error))
            return error
        self._recorder.complete(invoked, Phase.OK)
        return None

    def _note_acquired(self) -> None:
        self._recorder.invoke("job", Kind.ACQUIRED, job=self._job)

    def _start(self, number: int) -> Writer:
        name = f"writer-{self._job}-{number}"
        options = {**self._site.options, "token": self._token, "writer": number, "defect": self._defect}
        return Writer(
            name,
            job=self._job,
            writer=number,
            rows=range(number, NUM_ROWS, self._plan.num_writers),
            hand=Hand(self._zygote, self._folder, name, options),
            buckets=BUCKETS,
            recorder=self._recorder,
            budget=self._budget,
            draw=random.Random(self._draw.getrandbits(32)),
            refetches=self._plan.refetches,
        )

    def _commit(self, checkpoint_id: str, epoch: int, groups: list[list[int]]) -> None:
        writers = list(range(self._plan.num_writers))
        invoked = self._recorder.invoke("job", Kind.PROOF, job=self._job, writers=writers)
        try:
            with connect(self._site.options) as store:
                store.fence(Fence(token=self._token, writer=0, epoch=epoch))
                with store.ledger() as ledger:
                    ledger.commit(checkpoint_id, epoch, groups)
        except (StoreError, InputError) as error:
            self._recorder.complete(invoked, Phase.UNKNOWN, error=str(error))
            self.signal(signal.SIGKILL)  # a job whose commit fails has ended
        else:
            self._recorder.complete(invoked, Phase.OK)

    def _manifest(self, parent: str, groups: list[list[int]]) -> Manifest:
        file = FileEntry(name="dense", num_bytes=0, xxh3_128="0" * 32)
        return Manifest(
            lineage=_LINEAGE,
            generation=self._job,
            step=self._step,
            parent_checkpoint_id=parent,
            token=self._token,
            epoch=self._epoch,
            world_size=self._plan.num_writers,
            settings={},
            row_schema=SCHEMA.to_json(),
            identity={},
            parts=tuple(Part(rank=rank, dense=file, num_groups=tuple(part)) for rank, part in enumerate(groups)),
        )
