"""`Shards`: the processes that index for this cacher, each some tables.

    cacher.shards = N: starts N cachers on private sockets │ addresses: cachers that others run
    checks at the start: reachable, same settings, code and data          tables ─assign─> shards ─> ShardedPhase

Tables go to shards by their ids in the data's first block (`bagpipe.oracle.shard.assign_tables`), but for those that
`cacher.shard_tables` names. Plans do not depend on it.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import Address, parse_address
from bagpipe.client.agreement import settings_of
from bagpipe.client.link import Credentials, LinkLost
from bagpipe.config.sections import CacherConfig, Config
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import Phase
from bagpipe.oracle.shard import assign_tables, shard_features
from bagpipe.types.batch_identity import BatchIdentity
from bagpipe.types.schema import DataSchema
from cacher.embedded import EmbeddedCacher
from cacher.shard_link import IndexCall, Shard, ShardLink, ShardTotals, check_welcome
from cacher.sharded_phase import MAX_CREDITS, ShardedPhase

__all__ = ["Shards"]

#: Batches that a shard is ahead: at least so many, and of small ones so many examples.
_CREDITS, _CREDIT_EXAMPLES = 4, 4_096
#: Between attempts to reach a shard at the start.
_DELAY_S = 0.2


class _RemoteShard:
    """A cacher that others run."""

    def __init__(self, number: int, address: Address, credentials: Credentials) -> None:
        self.name = f"shard {number} ({address})"
        self.credentials = credentials
        self._address = address

    def address(self) -> Address:
        return self._address

    def revive(self) -> None:
        """Nothing: those who run it do."""


class _LocalShard:
    """A cacher that this one starts, and starts again if it ends."""

    def __init__(self, number: int, config: Config, opened: ExitStack) -> None:
        self.credentials = Credentials()
        self._number = number
        self._config = config
        self._opened = opened
        self._lock = threading.Lock()
        self._process: EmbeddedCacher | None = None
        self._is_stopped = False

    @property
    def name(self) -> str:
        pid = None if self._process is None else self._process.pid
        return f"shard {self._number} (process {pid})"

    def address(self) -> Address:
        assert self._process is not None, "started"
        return parse_address(self._process.url)

    @property
    def has_ended(self) -> bool:
        """It was started and has ended by itself."""
        return self._process is not None and self._process.has_ended

    def begin(self) -> None:
        """Start it.

        Raises:
            InputError, JobError: it does not start.
        """
        try:
            self.revive()
        except (InputError, JobError) as error:
            raise type(error)(f"shard {self._number} does not start: {error}") from None

    def revive(self) -> None:
        with self._lock:
            if self._is_stopped or (self._process is not None and not self._process.has_ended):
                return
            if self._process is not None:
                self._process.__exit__()
            # It works beside this process, not beside a trainer.
            self._process = EmbeddedCacher(self._config, in_background=False).__enter__()

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.__exit__()


class Shards:
    """Context manager: the shards of a daemon.

    Args:
        config: of the job; `cacher.shards` names them.
        schema, identity: of the data.
        ids_by_feature: float64, ids of each feature in a part of the data.

    Raises:
        InputError: more shards than tables, an unknown table, or a stream (shards would see other batches arrive);
            or the horizon `log`.
    """

    def __init__(
        self, config: Config, schema: DataSchema, identity: BatchIdentity, ids_by_feature: NDArray[np.float64]
    ) -> None:
        self._config = config
        self._schema = schema
        self._identity = identity
        self._ids_by_feature = ids_by_feature
        self._settings = json.dumps(settings_of(config))
        self._opened = ExitStack()
        if config.data.is_stream:
            raise InputError("cacher.shards: the batches of a stream are indexed by one process, got shards")
        if config.oracle.horizon == "log":
            raise InputError("cacher.shards: shards index without next uses: expected oracle.horizon window, got log")
        self._shards = self._made(config.cacher)
        self._known = _known_tables(config.cacher, schema, len(self._shards))
        self.totals = tuple(ShardTotals() for _ in self._shards)

    def _made(self, config: CacherConfig) -> list[Shard]:
        asked = config.shards
        count = int(asked[0]) if len(asked) == 1 and asked[0].isdecimal() else len(asked)
        if count > len(self._schema.tables):
            raise InputError(
                f"cacher.shards: expected at most as many as the data's {len(self._schema.tables)} tables, got {count}"
            )
        if not asked[0].isdecimal():
            credentials = Credentials.read(config)
            return [
                _RemoteShard(number, parse_address(text, subject="cacher.shards"), credentials)
                for number, text in enumerate(asked)
            ]
        theirs = dataclasses.replace(
            self._config,
            data=dataclasses.replace(self._config.data, workers=-(-self._config.data.workers // count)),
            cacher=dataclasses.replace(config, shards=(), shard_tables=()),
        )
        return [_LocalShard(number, theirs, self._opened) for number in range(count)]

    def __enter__(self) -> Self:
        """Start or reach every shard, and compare its settings, code and data.

        Raises:
            InputError: one cannot be reached in time, or is another one.
            JobError: one of ours ended.
        """
        with ExitStack() as opened:
            for shard in self._shards:
                if isinstance(shard, _LocalShard):
                    opened.callback(shard.stop)
                    shard.begin()
            for shard in self._shards:
                self._check(shard)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def names(self) -> list[str]:
        """Of the shards, for messages and metrics."""
        return [shard.name for shard in self._shards]

    def _check(self, shard: Shard) -> None:
        deadline_s = time.monotonic() + self._config.cacher.timeout_s
        while True:
            try:
                with IndexCall(shard.address(), shard.credentials) as call:
                    for message in call.hello(self._settings):
                        check_welcome(shard.name, message.welcome, self._identity)
                        return
                reason = "it ended the stream"
            except LinkLost as error:
                reason = str(error)
            except (InputError, JobError) as error:
                text = str(error)
                raise InputError(text if shard.name in text else f"{shard.name}: {text}") from None
            if isinstance(shard, _LocalShard) and shard.has_ended:
                raise JobError(f"{shard.name} ended right after its start: {reason}")
            if time.monotonic() + _DELAY_S > deadline_s:
                timeout_s = self._config.cacher.timeout_s
                raise InputError(f"{shard.name} was not reached within {timeout_s:g} s: {reason}")
            threading.Event().wait(_DELAY_S)

    def phase(
        self, phase: Phase, spec: OracleSpec, *, first_batch: int, reader_state: Mapping[str, Any] | None
    ) -> ShardedPhase:
        """A phase, from all shards.

        Args:
            phase: the training or the held-out examples.
            spec: of the plans.
            first_batch: where they begin.
            reader_state: of a batch before it, or None.
        """
        shard_of_table = self._shard_of_table(spec)
        features = [
            shard_features(spec, {table for table, its in enumerate(shard_of_table) if its == number})
            for number in range(len(self._shards))
        ]
        sharded = ShardedPhase(
            spec, shard_of_table, features, self._schema, first_batch=first_batch, reader_state=reader_state
        )
        size = self._config.data.batch_size
        for number, (shard, totals) in enumerate(zip(self._shards, self.totals, strict=True)):
            start = pb.IndexStart(
                phase=phase,
                spec=json.dumps(dataclasses.asdict(spec)),
                tables=[table for table, its in enumerate(shard_of_table) if its == number],
                next_batch=sharded.first_batch,
                credits=max(_CREDITS, min(MAX_CREDITS, -(-_CREDIT_EXAMPLES // size))),
                with_lengths=sharded.is_narrow,
                with_examples=number == 0,
            )
            sharded.links.append(
                ShardLink(
                    shard,
                    settings=self._settings,
                    identity=self._identity,
                    start=start,
                    state_before=sharded.state_before,
                    timeout_s=self._config.cacher.timeout_s,
                    totals=totals,
                )
            )
        return sharded

    def _shard_of_table(self, spec: OracleSpec) -> tuple[int, ...]:
        """By table of the plans, its shard. A table is known by the name of that of its first feature's ids."""
        sizes, names = [0.0] * len(spec.table_rows), [""] * len(spec.table_rows)
        for ref in spec.features:
            sizes[ref.table] += float(self._ids_by_feature[ref.feature])
            names[ref.table] = names[ref.table] or self._schema.features[ref.feature].table
        known = {table: self._known[name] for table, name in enumerate(names) if name in self._known}
        return assign_tables(sizes, len(self._shards), known)


def _known_tables(config: CacherConfig, schema: DataSchema, num_shards: int) -> dict[str, int]:
    """Shards of the tables that `cacher.shard_tables` names.

    Raises:
        InputError: an unknown table, one named twice, or more parts than shards.
    """
    if len(config.shard_tables) > num_shards:
        raise InputError(
            f"cacher.shard_tables: expected the tables of at most {num_shards} shards, got {len(config.shard_tables)}"
        )
    tables = {table.name for table in schema.tables}
    known: dict[str, int] = {}
    for shard, text in enumerate(config.shard_tables):
        for name in filter(None, text.split("+")):
            if name not in tables:
                raise InputError(f"cacher.shard_tables: expected tables of the data, got {name!r}")
            if name in known:
                raise InputError(f"cacher.shard_tables: {name!r} is named twice")
            known[name] = shard
    return known
