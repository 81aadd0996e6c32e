"""`UserBatches`: the batches of a user's iterator, from their reading to the end of their step.

    iterator ──read: next──> user's batch, held ──BatchIds──> Batch ──planner──> RankBatch      lane data
                                └──prepare: to the device──> LossInputs                         lane data
    step of b done ──forget──> nothing of b is held                                             the caller's thread

With `accumulate` above 1, a planned batch is the concatenation of so many of the user's batches, its micro-batches. The
last one of an iterator can have fewer.

Bounded: at most the planner's `max_held` batches and those that the engine has read ahead are held. An error of the
iterator ends the data; the caller raises it after the batches read before.
"""

from __future__ import annotations

import dataclasses
import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from bagpipe.cache.upload import Uploader
from bagpipe.dense.loss_executor import LossInputs
from bagpipe.errors import InputError
from bagpipe.lookahead.ids import concatenate
from bagpipe.train_pipeline.batch_graph import Leaves
from bagpipe.train_pipeline.batch_ids import BatchIds, hash_of
from bagpipe.train_pipeline.fingerprint import fingerprint_of, fingerprint_of_leaves
from bagpipe.train_pipeline.private_batch import PrivateMemory
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
    """One batch between reading and the end of its step. `users`, its micro-batches: empty once on the device."""

    users: Sequence[Any]
    fingerprints: Sequence[int]
    ids: Batch
    after: Position


class UserBatches:
    """Batches of one pipeline. `read` and `prepare` are called in the data lane, the rest by the user's thread.

    Args:
        ids: finds the ids of a batch.
        device: of the model.
        accumulate: micro-batches of a planned batch, at most. With 1, batches are not divided.

    Attributes:
        error: error of the iterator, or of a batch that cannot be used; None so far.
        expected: hashes that batches must have, by number, because a checkpoint has seen them.
    """

    def __init__(self, ids: BatchIds, device: torch.device, accumulate: int = 1) -> None:
        self.error: Exception | None = None
        self.expected: Mapping[int, str] = {}
        self._ids = ids
        self._device = device
        self._accumulate = accumulate
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
        position, has_ended, memory = start, False, PrivateMemory()
        while not has_ended:
            users: list[Any] = []
            fingerprints: list[int] = []
            parts: list[Batch] = []
            try:
                while len(users) < self._accumulate:
                    user = next(iterator)
                    user, leaves = memory.of(user, Leaves(user))
                    fingerprint = fingerprint_of_leaves(leaves)
                    part = self._ids.of(user, position.step, leaves)
                    loader = None if state is None else state()
                    position = dataclasses.replace(position, taken=position.taken + 1, loader=loader)
                    users.append(user)
                    fingerprints.append(fingerprint)
                    parts.append(part)
            except StopIteration:
                has_ended = True
            except Exception as error:
                _explain(error, len(self._held))
                self.error = error
            if users:
                position = dataclasses.replace(position, step=position.step + 1)
                ids = self._planned(parts)
                with self._lock:
                    self._held[ids.index] = _Held(users=users, fingerprints=fingerprints, ids=ids, after=position)
                yield ids
            if self.error is not None:
                raise _for_planner(self.error) from self.error

    def prepare(self, batch: Batch, upload: Uploader) -> LossInputs | tuple[LossInputs | None, ...] | None:
        """The inputs of the model: the user's batch on the device, or its micro-batches. None: this rank has none.

        A micro-batch is None where other ranks have one more than this rank.

        Raises:
            InputError: the batch is not as it was read.
        """
        held = self._held.get(batch.index)
        if held is None:  # it joins those of other ranks
            return None
        users, held.users = held.users, ()
        if [fingerprint_of(user) for user in users] != held.fingerprints:
            raise InputError(
                f"batch {batch.index} has changed since the iterator yielded it: batches are read ahead, so each needs "
                "tensors of its own"
            )
        if self._accumulate == 1:
            return LossInputs(batch=to_device(users[0], self._device), num_examples=batch.num_examples)
        return tuple(
            None if user is None else LossInputs(batch=to_device(user, self._device), num_examples=part.num_examples)
            for user, part in zip_longest(users, batch.parts)
        )

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

    def _planned(self, parts: Sequence[Batch]) -> Batch:
        """The batch that the planner sees.

        Raises:
            InputError: it is not the one that a checkpoint has seen.
        """
        ids = parts[0]
        if self._accumulate > 1:
            ids = dataclasses.replace(concatenate(parts), rank_examples=(), parts=tuple(parts))
        self._check(ids)
        return ids

    def _check(self, ids: Batch) -> None:
        expected = self.expected.get(ids.index)
        if expected is not None and hash_of(ids) != expected:
            self.error = InputError(
                f"batch {ids.index} is not the one that the checkpoint has seen: its ids have hash {hash_of(ids)}, "
                f"expected {expected}: after a resume the iterator must yield the same batches, without the first "
                "pipeline.position ones of its epoch (train(loader) leaves them out itself)"
            )
            raise self.error


def _explain(error: Exception, num_held: int) -> None:
    """Note on an error for want of file descriptors what takes them."""
    is_number = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    if is_number or any(words in str(error) for words in ("ancdata", "Too many open files")):  # torch's own
        error.add_note(
            f"the process has too many open files; {num_held} batches are held: a smaller lookahead holds fewer, and "
            "ulimit -n allows more files"
        )


def _for_planner(error: Exception) -> InputError:
    """The error that planners and other ranks see in place of this one."""
    text = " ".join(str(error).split())
    return error if isinstance(error, InputError) else InputError(f"{type(error).__name__}: {text}")
