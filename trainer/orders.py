"""Orders of a dynamic schedule: read before the job (`pipeline.replay`), written after it (`pipeline.record`).

pipeline.replay FILE ──check_orders──> Orders, checked against the job's stages ──OrderLog──> lanes
lanes ──OrderLog of each rank──gather, so many batches at a time──> rank 0 ──> pipeline.record FILE
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TypeVar

from bagpipe.config.sections import PipelineConfig
from bagpipe.errors import InputError, JobError, ScheduleError
from bagpipe.jobs.ranks import Ranks
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.order_log import OrderLog
from bagpipe.schedule.formats.order_text import Orders, OrderShape, order_line, orders_of_text
from bagpipe.split.staged_model import StagedModel
from bagpipe.util.documents import file_text
from bagpipe.util.outputs import cannot_write

__all__ = ["model_hash", "read_orders", "replay_hash", "within_orders", "write_orders"]

_T = TypeVar("_T")

#: Batches that a rank holds in memory while it gives its orders to rank 0.
_BLOCK = 512


def model_hash(staged: StagedModel) -> str:
    """A hash of the stages: their edges, and names and shapes of their parameters."""
    stages = [
        [[name, list(parameter.shape)] for name, parameter in staged.parameters_of(stage)]
        for stage in range(len(staged.stages))
    ]
    text = json.dumps([sorted(staged.edges), sorted(staged.embedding_edges), stages])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_orders(pipeline: PipelineConfig, shape: OrderShape) -> Orders | None:
    """The orders that the job repeats; None: its lanes choose.

    Raises:
        InputError: the file cannot be read, or has orders of another job.
    """
    if not pipeline.replay:
        return None
    text = file_text(pipeline.replay, subject="pipeline.replay")
    try:
        return orders_of_text(text, shape)
    except ScheduleError as error:
        raise InputError(f"pipeline.replay {pipeline.replay}: {error}") from None


def replay_hash(pipeline: PipelineConfig) -> str:
    """A hash of the orders that the job repeats, which must be the same on every rank; empty: none.

    Raises:
        InputError: the file cannot be read.
    """
    if not pipeline.replay:
        return ""
    try:
        return hashlib.sha256(Path(pipeline.replay).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"pipeline.replay: cannot read {pipeline.replay}: {error.strerror or error}") from None


def within_orders(
    batches: Generator[RankBatch, None, None], orders: Orders, pipeline: PipelineConfig, first_batch: int
) -> Generator[RankBatch, None, None]:
    """The batches for which there are orders.

    Raises:
        InputError: (at the first other batch) there is none; the batches before it are trained.
    """
    last = max((key[0] for key in orders), default=-1)
    with closing(batches):
        for batch, found in enumerate(batches, start=first_batch):
            if (batch, 0, 0) not in orders:
                raise InputError(
                    f"pipeline.replay {pipeline.replay}: it has no order of batch {batch}; its last one is of batch "
                    f"{last}"
                )
            yield found


def write_orders(path: str, shape: OrderShape, log: OrderLog, ranks: Ranks) -> InputError | JobError | None:
    """Write what all ranks have taken, on rank 0; called by all. Returns the error if rank 0 cannot."""
    own = _blocks(log.batches())
    partial = Path(path).with_name(Path(path).name + ".partial")
    problem: OSError | None = None
    out = None
    if ranks.is_first:
        try:
            out = partial.open("w", encoding="utf-8")
            out.write(shape.header + "\n")
        except OSError as error:
            problem = error
    while True:
        block = [[list(key), tracks.hex()] for batch in next(own, []) for key, tracks in batch]
        taken = [record for part in ranks.gather(block) for record in part]
        if not taken:
            break
        if out is not None and problem is None:
            try:
                out.writelines(
                    order_line(tuple(key), bytes.fromhex(tracks), shape) + "\n" for key, tracks in sorted(taken)
                )
            except OSError as error:
                problem = error
    if out is not None:
        try:
            out.close()
            if problem is None:
                os.replace(partial, path)
        except OSError as error:
            problem = error
    return None if problem is None else cannot_write(path, problem, key="pipeline.record")


def _blocks(items: Iterable[_T]) -> Iterator[list[_T]]:
    iterator = iter(items)
    while block := list(islice(iterator, _BLOCK)):
        yield block
