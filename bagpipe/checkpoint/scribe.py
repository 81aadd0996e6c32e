"""`Scribe`: the thread that writes one rank's checkpoints to files, and the checkpoints in the making that it is given.

lanes ──rows, dense parts, "that was all"──> queue ──thread──> journals, dense, dirty and row files ──Part──> on_part

Rules: *the thread waits for no lane*, so the lanes' waiting for it always ends; after an error it goes on taking work,
and does none. The queue is bounded by those who fill it: see `Recorder`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.manifest import FileEntry, Part
from bagpipe.checkpoint.rows import RowWriter, save_dirty
from bagpipe.crash_points import reach
from bagpipe.errors import InputError, JobError, StoreError
from bagpipe.schema import RowSchema
from bagpipe.store.interface import WriteRequest

if TYPE_CHECKING:
    from bagpipe.checkpoint.dense import DenseState

__all__ = ["Making", "OnPart", "Places", "Scribe"]

#: ``on_part(step, epoch, part)``; part is None where nothing is written to files.
OnPart = Callable[[int, int, Part | None], None]

#: Between looks whether whoever waits should give up.
_LOOK_S = 0.2


@dataclass(slots=True, kw_only=True, eq=False)
class Making:
    """A checkpoint in the making: lanes add to it, each its own; the thread reads it when nothing is missing.

    Attributes:
        step, epoch: of the checkpoint, and of the logs that end with it.
        missing: pieces that lanes still owe.
        dense: copies by name, see `Recorder`; those that are missing are being made.
        unshared: names of tensors that ranks with the same dense part may hold different values of.
        names: tables and ids of dirty rows.
        num_groups: groups in this rank's logs.
        progress: see `Part`.
        file: of the dense part, once it is written.
    """

    step: int
    epoch: int
    missing: set[str]
    dense: dict[str, DenseState] = field(default_factory=dict)
    unshared: frozenset[str] = frozenset()
    names: list[tuple[NDArray[np.int32], NDArray[np.int64]]] = field(default_factory=list)
    num_groups: tuple[int, ...] = ()
    progress: dict[str, Any] = field(default_factory=dict)
    file: FileEntry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where files go.

    Attributes:
        generation: folder of this start of the job; exists.
        step: makes the folder of a checkpoint's step, if it is not there, and says where it is.
    """

    generation: Path
    step: Callable[[int], Path]


class Scribe:
    """One rank's.

    Args:
        rank: this one.
        places: where files go; None: nowhere, parts are None.
        on_part: takes the parts, in the thread.
        on_error: told of the thread's first error, in the thread.

    Attributes:
        error: the first error.
        backlog_bytes: of rows that wait to be written.
        num_dense: dense parts that wait to be written.
    """

    def __init__(
        self, rank: int, places: Places | None, on_part: OnPart, on_error: Callable[[BaseException], None]
    ) -> None:
        self.error: BaseException | None = None
        self.backlog_bytes = 0
        self.num_dense = 0
        self.schema: RowSchema | None = None
        self._rank = rank
        self._places = places
        self._on_part = on_part
        self._on_error = on_error
        self._changed = threading.Condition()
        self._work: deque[Callable[[], None] | None] = deque()
        self._journals: dict[int, RowWriter] = {}
        self._thread = threading.Thread(target=self._run, name="bagpipe-scribe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; what is not written yet is given up."""
        with self._changed:
            self._work.append(None)
            self._changed.notify_all()
        self._thread.join()
        for journal in self._journals.values():
            journal.discard()

    def rows(self, rows: Callable[[], Sequence[WriteRequest]], num_bytes: int, *, epoch: int, step: int) -> None:
        """Rows for an epoch's journal; `rows` gives them when it is called, in the thread. Does not wait."""
        with self._changed:
            self.backlog_bytes += num_bytes
        self._put(lambda: self._write_rows(rows, num_bytes, epoch, step))

    def dense(self, making: Making) -> None:
        """The dense part is all there. Does not wait."""
        self._put(lambda: self._write_dense(making))

    def complete(self, making: Making) -> None:
        """Nothing is missing, and what was given before is all. Does not wait."""
        self._put(lambda: self._complete(making))

    def admit(self) -> None:
        """A dense part is about to be copied."""
        with self._changed:
            self.num_dense += 1

    def wait_for(self, test: Callable[[], bool], is_lost: Callable[[], BaseException | None]) -> None:
        """Until the thread has got so far. Raises its error, or what `is_lost` gives."""
        with self._changed:
            while not test():
                error = self.error or is_lost()
                if error is not None:
                    raise error
                self._changed.wait(_LOOK_S)

    def is_idle(self) -> bool:
        """All that was given is done."""
        return not self._work

    def _put(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(work)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._work:
                    self._changed.wait()
                work = self._work[-1] and self._work[0]  # None at the end: at once
            if work is None:
                return
            if self.error is None:
                try:
                    work()
                except BaseException as error:
                    self.error = _explained(error)
                    self._on_error(self.error)
            with self._changed:
                self._work.popleft()
                self._changed.notify_all()

    def _write_rows(self, rows: Callable[[], Sequence[WriteRequest]], num_bytes: int, epoch: int, step: int) -> None:
        if epoch not in self._journals:
            assert self._places is not None, "rows go to files"
            assert self.schema is not None, "known before there are rows"
            self._journals[epoch] = RowWriter(self._places.generation, self.schema, rank=self._rank, epoch=epoch)
        self._journals[epoch].append(rows(), step)
        with self._changed:
            self.backlog_bytes -= num_bytes

    def _write_dense(self, making: Making) -> None:
        from bagpipe.checkpoint.dense import DenseState, combine

        assert self._places is not None, "a dense part goes to a file"
        digests = {}
        for name, state in making.dense.items():
            shared = {key: value for key, value in state.tensors.items() if key not in making.unshared}
            digests[name] = DenseState(tensors=shared, values=state.values).digest()
        making.progress["dense"] = digests
        making.file = combine(making.dense.values()).save(self._places.step(making.step), self._rank)
        making.dense.clear()
        with self._changed:
            self.num_dense -= 1

    def _complete(self, making: Making) -> None:
        part = None if self._places is None else self._part(making, self._places.step(making.step))
        self._on_part(making.step, making.epoch, part)

    def _part(self, making: Making, folder: Path) -> Part:
        assert making.file is not None, "written before"
        dirty = None
        if making.names:
            tables, ids = (np.concatenate(column) for column in zip(*making.names, strict=True))
            dirty = save_dirty(folder, rank=self._rank, tables=tables.astype(np.uint32), ids=ids)
        journal = self._journals.pop(making.epoch, None)
        rows = () if journal is None else journal.seal(folder, making.step)
        reach("after-checkpoint-data")
        return Part(
            rank=self._rank,
            dense=making.file,
            rows=rows,
            dirty=dirty,
            num_groups=making.num_groups,
            progress=making.progress,
        )


def _explained(error: BaseException) -> BaseException:
    """The error as a user should read it."""
    if isinstance(error, JobError | StoreError | InputError):
        return error
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        said = error.strerror or str(error)
        explained = JobError(f"a checkpoint cannot be written: {said}{where}; those before are as they were")
        explained.__cause__ = error
        return explained
    return error
