"""`RedisLedger`: the ledger of a namespace on servers, by one small script per bucket and call.

    state, acquire, begin, commit, invalidate   one script per bucket, pipelined to each server; all or nothing
    clear                                       the same, then the schema records, then the owners
    job, record_job                             one script in bucket 0
    touched                                     state of one bucket, then its logs in parts
    delete, drop                                scripts that check the owner first

Every script that changes a bucket compares the owner first, and every script is idempotent, so a lost reply is handled
by repeating the call until the deadline. By then another process, without the acknowledged writes, can answer. A script
that sets a checkpoint id therefore first checks that the bucket is complete.

Keys: `bagpipe.store.fencing.fence`; scripts: `bagpipe.store.redis.ledger_scripts`. All keys of a bucket share a slot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import FencedError, InputError, RolledBackError, StoreError
from bagpipe.store.fencing.fence import (
    INVALIDATED,
    BucketState,
    Fence,
    LogState,
    check_checkpoint_id,
    check_token,
    checkpoint_id_key,
    distinct_fields,
    fenced_log_key,
    invalidated,
    job_key,
    log_key,
    logs_key,
    open_key,
    owner_key,
    parse_log_name,
)
from bagpipe.store.job_record import JobRecord
from bagpipe.store.keys import FIELD_BYTES, FIELD_DTYPE, bucket_of
from bagpipe.store.redis import ledger_scripts as scripts
from bagpipe.store.redis.bounded_socket import MAX_REPLY_BYTES
from bagpipe.store.redis.namespace import Backend, Namespace, Session
from bagpipe.store.redis.reply_forms import (
    BUCKET_STATE,
    COUNT,
    DURATION,
    PAIRS,
    TEXT,
    TEXT_OR_NONE,
    TEXTS,
    ReplyForm,
)
from bagpipe.store.redis.row_codecs import max_command_rows
from bagpipe.store.redis.server_checks import ServerMonitor, needs_appendfsync
from bagpipe.store.redis.servers import KeyCommand, Unreachable
from bagpipe.util.failpoints import hit

__all__ = ["RedisLedger"]

T = TypeVar("T")

#: Groups of a log per LRANGE, bytes of fields in them, and rows per DELETE script.
_LOG_GROUPS = 256
_LOG_BYTES = MAX_REPLY_BYTES // 2
_DELETE_ROWS = 4_000
#: Rows of logs read before duplicates are removed.
_FOLD_ROWS = 1_000_000
#: Buckets whose owner one inspection checks, round robin.
_INSPECT_BUCKETS = 64
#: Pause between attempts.
_PAUSE_S = 0.05


class _RetryingBackend:
    """A backend and its session. Repeats idempotent calls while its servers are unreachable, until the deadline."""

    def __init__(self, backend: Backend, timeout_s: float) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self._stack = ExitStack()
        self._session: Session | None = None

    def infos(self, *, with_fsync: bool) -> list[tuple[str, Mapping[str, Any]]]:
        """See `Backend.infos`. Raises StoreError."""
        return self._repeat(partial(self._backend.infos, self._timeout_s, with_fsync=with_fsync))

    def run_all(self, commands: Sequence[KeyCommand]) -> list[Any]:
        """See `Session.run_all`. Raises StoreError."""
        return self._repeat(partial(self._run_all, commands))

    def close(self) -> None:
        self._session = None
        self._stack.close()

    def _run_all(self, commands: Sequence[KeyCommand]) -> list[Any]:
        if self._session is None:
            self._session = self._stack.enter_context(self._backend.session(self._timeout_s))
        return self._session.run_all(commands)

    def _repeat(self, call: Callable[[], T]) -> T:
        deadline_s = time.monotonic() + self._timeout_s
        was_unreachable = False
        while True:
            try:
                return call()
            except InputError as error:
                self.close()
                # During a failover a cluster can refuse commands for other reasons too.
                was_unreachable = was_unreachable or isinstance(error, Unreachable)
                if not was_unreachable or time.monotonic() > deadline_s:
                    raise StoreError(str(error)) from error
            threading.Event().wait(_PAUSE_S)


class RedisLedger:
    """See `bagpipe.store.fencing.fence.Ledger`.

    Args:
        namespace: the namespace to administer.
        token: acts for this token until `acquire`; empty: for none.
    """

    def __init__(self, namespace: Namespace, *, token: str = "") -> None:
        self.num_buckets = namespace.num_buckets
        self._namespace = namespace
        self._token = token
        self._keys = namespace.bucket_keys
        self._backends = [_RetryingBackend(backend, namespace.timeout_s) for backend in namespace.backends]
        self._backend_of_key = dict(zip(self._keys, namespace.backend_numbers.tolist(), strict=True))
        self._monitor: ServerMonitor | None = None
        self._had_rows: set[int] = set()
        self._next_inspected = 0

    def __enter__(self) -> RedisLedger:
        self._monitor = ServerMonitor(self._infos(), self._namespace.durability)
        self._had_rows = self._buckets_with_rows()
        return self

    def __exit__(self, *details: object) -> None:
        self._monitor = None
        for backend in self._backends:
            backend.close()

    def state(self) -> tuple[BucketState, ...]:
        """See `Ledger.state`."""
        answers = self._run(
            [self._script(bucket, scripts.STATE, expects=BUCKET_STATE) for bucket in range(self.num_buckets)]
        )
        return tuple(self._bucket_state(bucket, answer) for bucket, answer in enumerate(answers))

    def acquire(self, token: str) -> None:
        """See `Ledger.acquire`."""
        check_token(token)
        self._token = token
        self._run_script(range(self.num_buckets), scripts.ACQUIRE, INVALIDATED)

    def touched(self, bucket: int) -> NDArray[np.void]:
        """See `Ledger.touched`. Memory: the distinct rows and one million more."""
        (answer,) = self._run([self._script(bucket, scripts.STATE, expects=BUCKET_STATE)])
        owner, key = _decode(answer[0]), self._keys[bucket]
        schema = self._namespace.schema
        step = _groups_at_once(min(schema.row_bytes(number) for number in range(len(schema.tables))))
        parts, num_rows = [np.empty(0, FIELD_DTYPE)], 0
        for name, length in zip(answer[3::2], answer[4::2], strict=True):
            fence = self._log_of(bucket, name)
            log = log_key(key, fence) if fence.token == owner else fenced_log_key(key, fence)
            if not length:
                raise RolledBackError(f"{self._label(bucket)} has lost the log {name.decode()} of bucket {bucket}")
            for start in range(1, length, step):
                (groups,) = self._run([KeyCommand(key, ("LRANGE", log, start, start + step - 1), TEXTS)])
                joined = b"".join(groups)
                if len(groups) != min(step, length - start):
                    raise RolledBackError(f"{self._label(bucket)} has lost some of the log {name.decode()}")
                if len(joined) % FIELD_BYTES:
                    raise StoreError(f"{self._label(bucket)}: the log {name.decode()} of bucket {bucket} is damaged")
                parts.append(np.frombuffer(joined, FIELD_DTYPE))
                num_rows += len(parts[-1])
                if num_rows > _FOLD_ROWS:
                    parts, num_rows = [distinct_fields(np.concatenate(parts))], 0
        return distinct_fields(np.concatenate(parts))

    def delete(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
        """See `Ledger.delete`."""
        if not len(ids):
            return
        fields = np.empty(len(ids), FIELD_DTYPE)
        fields["table"], fields["id"] = tables, ids
        buckets = bucket_of(tables, ids, self.num_buckets)
        order = np.argsort(buckets, kind="stable")
        present, starts = np.unique(buckets[order], return_index=True)
        words: list[bytes] = fields[order].view(f"V{FIELD_BYTES}").tolist()
        stops = [*starts[1:].tolist(), len(ids)]
        parts = [
            (bucket, words[first : min(first + _DELETE_ROWS, stop)])
            for bucket, start, stop in zip(present.tolist(), starts.tolist(), stops, strict=True)
            for first in range(start, stop, _DELETE_ROWS)
        ]
        answers = self._run([self._script(bucket, scripts.DELETE, self._token, *part) for bucket, part in parts])
        self._check([bucket for bucket, _ in parts], answers)

    def drop(self, bucket: int) -> None:
        """See `Ledger.drop`."""
        self._run_script([bucket], scripts.DROP)

    def begin(
        self,
        checkpoint_id: str,
        num_writers: int,
        *,
        num_groups: Sequence[int] | None = None,
        num_rows: Sequence[int] | None = None,
    ) -> None:
        """See `Ledger.begin`."""
        check_checkpoint_id(checkpoint_id)
        groups = [0] * self.num_buckets if num_groups is None else num_groups
        rows = [-1] * self.num_buckets if num_rows is None else num_rows
        expected = list(zip(groups, rows, strict=True))
        self._run_script(range(self.num_buckets), scripts.BEGIN, checkpoint_id, num_writers, expected=expected)

    def commit(self, checkpoint_id: str, epoch: int, num_groups: Sequence[Sequence[int]] = ()) -> None:
        """See `Ledger.commit`."""
        check_checkpoint_id(checkpoint_id)
        expected = [tuple(groups[bucket] for groups in num_groups) for bucket in range(self.num_buckets)]
        self._run_script([0], scripts.COMMIT, checkpoint_id, epoch, INVALIDATED, expected=expected)
        hit("mid-commit")
        self._run_script(
            range(1, self.num_buckets), scripts.COMMIT, checkpoint_id, epoch, INVALIDATED, expected=expected
        )

    def invalidate(self, checkpoint_id: str) -> None:
        """See `Ledger.invalidate`."""
        check_checkpoint_id(checkpoint_id)
        self._run_script(range(self.num_buckets), scripts.INVALIDATE, checkpoint_id)

    def job(self) -> JobRecord | None:
        """See `Ledger.job`."""
        (words,) = self._run([self._script(0, scripts.JOB, expects=PAIRS)])
        texts = [_decode(word) for word in words]
        return JobRecord.from_fields(dict(zip(texts[::2], texts[1::2], strict=True)))

    def record_job(self, record: JobRecord) -> None:
        """See `Ledger.record_job`."""
        words = [word for pair in record.to_fields().items() for word in pair]
        self._run_script([0], scripts.RECORD_JOB, *words)

    def clear(self) -> None:
        """See `Ledger.clear`."""
        every = range(self.num_buckets)
        self._run_script(every, scripts.CLEAR)
        try:
            with self._namespace.removed_records():
                self._run_script(every, scripts.RELEASE)
        except InputError as error:
            raise StoreError(str(error)) from error

    def inspect(self) -> None:
        """See `Ledger.inspect`. One INFO per server, and the owners of up to 64 buckets."""
        assert self._monitor is not None, "the ledger is not open"
        if self._monitor.check(self._infos()):
            self._check_expiry()
        if not self._token:
            return
        count = min(_INSPECT_BUCKETS, self.num_buckets)
        buckets = [(self._next_inspected + number) % self.num_buckets for number in range(count)]
        self._next_inspected = (self._next_inspected + count) % self.num_buckets
        owners = self._run(
            [KeyCommand(self._keys[bucket], ("GET", owner_key(self._keys[bucket])), TEXT_OR_NONE) for bucket in buckets]
        )
        token = self._token.encode()
        self._check(buckets, [b"OK" if owner == token else owner or b"" for owner in owners])

    def _check_expiry(self) -> None:
        """Check the namespace's keys after a server has expired some key.

        Raises:
            StoreError: a key of the namespace expired, or will.
        """
        kinds: tuple[Callable[[bytes], bytes], ...] = (lambda key: key, owner_key, checkpoint_id_key, logs_key)
        wanted = [
            (bucket, kind(self._keys[bucket]))
            for bucket in range(self.num_buckets)
            for number, kind in enumerate(kinds)
            if (bucket in self._had_rows if number == 0 else self._token)
        ]
        answers = self._run([KeyCommand(self._keys[bucket], ("PTTL", key), DURATION) for bucket, key in wanted])
        for (bucket, key), milliseconds in zip(wanted, answers, strict=True):
            if milliseconds != -1:
                said = "has expired" if milliseconds == -2 else f"expires in {milliseconds / 1000:g} s"
                raise StoreError(f"{self._label(bucket)}: the key {key.decode()} {said}; rows must not expire")
        self._had_rows = self._buckets_with_rows()

    def _buckets_with_rows(self) -> set[int]:
        answers = self._run([KeyCommand(key, ("EXISTS", key), COUNT) for key in self._keys])
        return {bucket for bucket, answer in enumerate(answers) if answer}

    def _infos(self) -> list[tuple[str, Any]]:
        with_fsync = needs_appendfsync(self._namespace.durability)
        return [info for backend in self._backends for info in backend.infos(with_fsync=with_fsync)]

    def _script(self, bucket: int, script: str, *arguments: bytes | str | int, expects: ReplyForm = TEXT) -> KeyCommand:
        key = self._keys[bucket]
        keys = (key, owner_key(key), checkpoint_id_key(key), logs_key(key), open_key(key), job_key(key))
        return KeyCommand(key, ("EVAL", script, len(keys), *keys, *arguments), expects)

    def _run_script(
        self,
        buckets: Sequence[int],
        script: str,
        *arguments: str | int,
        expected: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """Run a script as `token`. `expected`: by bucket, further arguments: the contents that it must have."""
        every = [arguments if expected is None else (*arguments, *expected[bucket]) for bucket in buckets]
        commands = [self._script(bucket, script, self._token, *own) for bucket, own in zip(buckets, every, strict=True)]
        self._check(buckets, self._run(commands))

    def _check(self, buckets: Sequence[int], answers: Sequence[bytes]) -> None:
        """Check what scripts returned for these buckets.

        Raises:
            FencedError: the first answer other than OK is another owner's token.
            RolledBackError: it says that the bucket has no owner or has lost rows.
        """
        for bucket, answer in zip(buckets, answers, strict=True):
            if answer == b"OK":
                continue
            label = self._label(bucket)
            if answer == b"LOST":
                raise RolledBackError(f"{label}: bucket {bucket} has lost rows that were written")
            if not answer:
                raise RolledBackError(f"{label} has forgotten its owner, expected {self._token!r}: rows may be lost")
            raise FencedError(
                f"{label} was taken over: its owner is the job {_decode(answer)!r}, this one is {self._token!r}"
            )

    def _run(self, commands: Sequence[KeyCommand]) -> list[Any]:
        """Replies to commands on buckets, in order.

        Raises:
            StoreError: a server fails or misses the deadline.
        """
        shares: dict[int, list[int]] = {}
        for number, command in enumerate(commands):
            shares.setdefault(self._backend_of_key[command.key], []).append(number)
        answers: list[Any] = [None] * len(commands)
        for backend, share in shares.items():
            part = self._backends[backend].run_all([commands[number] for number in share])
            for number, answer in zip(share, part, strict=True):
                answers[number] = answer
        return answers

    def _bucket_state(self, bucket: int, answer: list[Any]) -> BucketState:
        """A reply to `ledger_scripts.STATE`."""
        owner, checkpoint_id, num_rows = _decode(answer[0]), _decode(answer[1]), answer[2]
        logs = []
        for name, length in zip(answer[3::2], answer[4::2], strict=True):
            fence = self._log_of(bucket, name)
            logs.append(LogState(token=fence.token, epoch=fence.epoch, writer=fence.writer, num_groups=length - 1))
            checkpoint_id = checkpoint_id if length else invalidated(checkpoint_id)
        logs.sort(key=lambda log: (log.token, log.epoch, log.writer))
        return BucketState(owner=owner, checkpoint_id=checkpoint_id, logs=tuple(logs), num_rows=num_rows)

    def _log_of(self, bucket: int, name: bytes) -> Fence:
        """The writer of a bucket's log.

        Raises:
            StoreError: no name of a log.
        """
        try:
            return parse_log_name(name)
        except ValueError:
            raise StoreError(f"{self._label(bucket)}: bucket {bucket} has a log named {name[:60]!r}") from None

    def _label(self, bucket: int) -> str:
        return self._namespace.label_of(self._backend_of_key[self._keys[bucket]])


def _groups_at_once(row_bytes: int) -> int:
    """Groups of a log that are read at once. Narrow rows make large groups."""
    return max(1, min(_LOG_GROUPS, _LOG_BYTES // (max_command_rows(row_bytes) * FIELD_BYTES)))


def _decode(text: bytes) -> str:
    return text.decode(errors="replace")
