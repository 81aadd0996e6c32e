"""`RemoteBatches`: the batches of a cacher in another process.

    cacher ──Receiver's queue (at most `credits` batches)──> batches()
                                                             └── taking some sends an Ack: as many more credits

A lost connection or a restarted cacher is transparent if the cacher is reached again in time: it plans the same batches
again and skips those already received.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Generator, Mapping
from typing import Any, Self

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.address import parse_address
from bagpipe.client.agreement import PROTOCOL_VERSION, credits_for, settings_of
from bagpipe.client.link import Credentials
from bagpipe.client.receiver import QueueStatistics, Receiver, Run
from bagpipe.config.sections import Config
from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import Phase, RankBatch
from bagpipe.types.batch_identity import BatchIdentity
from bagpipe.types.schema import DataSchema

__all__ = ["RemoteBatches"]


class RemoteBatches:
    """A `BatchSource` over gRPC. Context manager: entering connects.

    Args:
        url: see `bagpipe.client.address`.
        config: of the job. The cacher compares it with its own. The `cacher` section configures the connection.
        credits: most batches in transit or waiting here; None: `credits_for` the configuration.
        rank, world_size: of this trainer.
        job_id: shared by all ranks of a job and unique to it. Generated for a single rank.
        secret: shared with the cacher, instead of `cacher.secret_file`.

    Attributes:
        schema: columns of the data, once entered.
    """

    schema: DataSchema

    def __init__(
        self,
        url: str,
        config: Config,
        *,
        credits: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        job_id: str = "",
        secret: str = "",
    ) -> None:
        credits = credits_for(config) if credits is None else credits
        if credits < 1:
            raise ValueError(f"credits must be at least 1, got {credits}")
        if world_size > 1 and not job_id:
            raise ValueError("the ranks of a job need a common job_id")
        hello = pb.Hello(
            protocol=PROTOCOL_VERSION,
            job_id=job_id or secrets.token_hex(16),
            instance=secrets.token_hex(16),
            rank=rank,
            world_size=world_size,
            credits=credits,
            settings=json.dumps(settings_of(config)),
        )
        self._timeout_s = config.cacher.timeout_s
        self._receiver = Receiver(
            parse_address(url), Credentials.read(config.cacher, secret), hello, config.cacher.timeout_s
        )
        self._num_runs = 0
        self._skipped_rows = 0

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            InputError: the cacher cannot be reached, or refuses the configuration or the secret.
            JobError: the listener is not a cacher, or a cacher without room for another job.
        """
        self._receiver.start()
        try:
            item = self._receiver.take(timeout_s=2 * self._timeout_s)
        except BaseException:
            self.close()
            raise
        assert isinstance(item.content, DataSchema)
        self.schema = item.content
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Tell the cacher that the rank is done. Drops batches not taken."""
        self._receiver.close()

    def batches(
        self,
        phase: Phase,
        spec: OracleSpec,
        *,
        max_steps: int = 0,
        first_batch: int = 0,
        reader_state: Mapping[str, Any] | None = None,
        next_batch: int | None = None,
        known_rows: str = "",
    ) -> Generator[RankBatch, None, None]:
        """Batches of a phase in batch order, see `BatchSource`. All ranks request the same phases in the same order.

        The request is sent immediately. It ends the previous phase.

        Args:
            phase, spec, max_steps, first_batch, reader_state: the same for all ranks.
            next_batch: first batch that this rank wants, if not `first_batch`. The plan is the same.
            known_rows: file of the rows that the job begins with, in the cacher's `checkpoint.dir`; empty: none.

        Raises:
            InputError: the data is bad, or a batch does not fit the cache.
            JobError: the cacher failed, or was lost for too long.
        """
        wanted = first_batch if next_batch is None else next_batch
        start = pb.Start(
            run=self._num_runs,
            phase=phase,
            spec=json.dumps(dataclasses.asdict(spec)),
            max_steps=max_steps,
            first_batch=first_batch,
            reader_state=json.dumps(dict(reader_state)) if reader_state is not None else "",
            known_rows=known_rows,
        )
        self._num_runs += 1
        run = Run(start=start, next_batch=wanted, watermark=wanted)
        self._receiver.ask(run)
        return self._take(run)

    def interrupt(self) -> None:
        """Make a waiting iterator raise a JobError, because the job has failed. From any thread."""
        self._receiver.interrupt()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the running iterator can go on without waiting, at most so long. False: it cannot yet."""
        return self._receiver.wait(timeout_s)

    @property
    def identity(self) -> BatchIdentity:
        """Data files and code that the cacher's batches are made from. Available once entered."""
        return self._receiver.identity

    def skipped_rows(self) -> int:
        """Malformed rows skipped in the phases that have ended."""
        return self._skipped_rows

    def statistics(self) -> QueueStatistics:
        return self._receiver.statistics()

    def _take(self, run: Run) -> Generator[RankBatch, None, None]:
        while True:
            item = self._receiver.take()
            if item.run != run.start.run:
                continue  # of an abandoned phase
            if isinstance(item.content, RankBatch):
                self._receiver.acknowledge(run)
                yield item.content
            else:
                assert isinstance(item.content, pb.End)
                self._skipped_rows += item.content.skipped_rows
                return
