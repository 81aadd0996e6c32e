"""`UserBatches`: the batches of a user's iterator, from their reading to the end of their step.

    iterator ──read: next──> user's batch, held ──BatchIds──> Batch ──planner──> RankBatch      lane data
                                └──prepare: to the device──> LossInputs                         lane data
    step of b done ──forget──> nothing of b is held                                             the caller's thread

Bounded: at most the planner's `max_held` batches and those that the engine has read ahead are held. An error of the
iterator ends the data; the caller raises it after the batches read before.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bagpipe.cache.upload import Uploader
from bagpipe.dense.loss_executor import LossInputs
from bagpipe.errors import InputError
from bagpipe.train_pipeline.batch_ids import BatchIds, hash_of
from bagpipe.train_pipeline.transfer import to_device
from bagpipe.types.batch import Batch

__all__ = ["Position", "UserBatches"]

#: Batches behind a checkpoint whose hashes it records.
_MAX_HASHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position between two batches.

    Attributes:
        step: number of the next batch over all iterators.
        epoch: iterators that have ended before.
        taken: batches taken from the current iterator before it.
        loader: state of the user's loader there; None: unknown, or the loader has none.
    """

    step: int = 0
    epoch: int = 0
    taken: int = 0
    loader: Any = None


@dataclass(slots=True, kw_only=True)
class _Held:
    """One batch between reading and the end of its step. `user` is None once it is on the device."""

    user: Any
    ids: Batch
    after: Position


class UserBatches:
    """Batches of one pipeline. `read` and `prepare` are called in the data lane, the rest by the user's thread.

    Args:
        ids: finds the ids of a batch.
        device: of the model.

    Attributes:
        error: error of the iterator, or of a batch that cannot be used; None so far.
        expected: hashes that batches must have, by number, because a checkpoint has seen them.
    """

    def __init__(self, ids: BatchIds, device: torch.device) -> None:
        self.error: Exception | None = None
        self.expected: Mapping[int, str] = {}
        self._ids = ids
        self._device = device
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()  # around changes of the dict's size

    def read(self, iterator: Iterator[Any], start: Position, state: Callable[[], Any] | None = None) -> Iterator[Batch]:
        """The ids of the iterator's batches.

        Args:
            iterator: the user's.
            start: its position.
            state: gives the loader's state after the batch that it has yielded last; None: it has none.

        Raises:
            InputError: stands for `error`, for the planner, which tells the other ranks.
        """
        position = start
        while True:
            try:
                user = next(iterator)
                ids = self._ids.of(user, position.step)
                self._check(ids)
                position = dataclasses.replace(
                    position,
                    step=position.step + 1,
                    taken=position.taken + 1,
                    loader=None if state is None else state(),
                )
            except StopIteration:
                return
            except Exception as error:
                self.error = error
                raise error if isinstance(error, InputError) else InputError(_text_of(error)) from error
            with self._lock:
                self._held[ids.index] = _Held(user=user, ids=ids, after=position)
            yield ids

    def prepare(self, batch: Batch, upload: Uploader) -> LossInputs:
        """The inputs of the model: the user's batch on the device."""
        held = self._held[batch.index]
        user, held.user = held.user, None
        return LossInputs(batch=to_device(user, self._device), num_examples=batch.num_examples)

    def after(self, b: int) -> Position | None:
        """Position after batch b; None if it is not held: this rank had no batch b."""
        held = self._held.get(b)
        return None if held is None else held.after

    def forget(self, before: int) -> None:
        """Drop what is held of the batches before one."""
        with self._lock:
            for number in [number for number in self._held if number < before]:
                del self._held[number]

    def hashes(self, start: int) -> dict[int, str]:
        """Hashes of the batches read from number `start` on, at most `_MAX_HASHES`."""
        with self._lock:
            held = [self._held[number].ids for number in sorted(self._held) if number >= start]
        return {ids.index: hash_of(ids) for ids in held[:_MAX_HASHES]}

    def reset(self) -> None:
        """Drop everything."""
        with self._lock:
            self._held.clear()
        self.error = None

    def _check(self, ids: Batch) -> None:
        expected = self.expected.get(ids.index)
        if expected is not None and hash_of(ids) != expected:
            raise InputError(
                f"batch {ids.index} is not the one that the checkpoint has seen: its ids have hash {hash_of(ids)}, "
                f"expected {expected}: after a resume the iterator must yield the same batches, without the first "
                "pipeline.position ones of its epoch (train(loader) leaves them out itself)"
            )


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
