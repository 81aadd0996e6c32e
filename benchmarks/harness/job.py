"""`open_engine`: the engine of a benchmark's run, which claims, writes and closes logs as a job of the trainer does.

    model, batches' source ──trainer.open_job.job_of──> Job ──bagpipe.jobs.open_job──> Engine: fence, logs, checks

Logs are closed as those of a job without checkpoints: every 1,000 batches, and at the end.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from bagpipe.client.remote import RemoteBatches
from bagpipe.jobs.open_job import open_job
from bagpipe.jobs.ranks import Ranks
from bagpipe.pipeline.trace import Trace
from bagpipe.training.engine import Engine
from trainer.assembly import BuiltModel
from trainer.open_job import job_of

__all__ = ["open_engine"]


def open_engine(built: BuiltModel, source: RemoteBatches, stack: ExitStack, *, trace: Trace | None = None) -> Engine:
    """The engine of a job of one rank, over the store of its configuration.

    Args:
        built: what is trained; its configuration names the store's URL.
        source: of its batches.
        stack: closes the job.
        trace: records every action.

    Returns:
        An engine that takes the namespace over at its first batch, and trains the rows it finds there on.
    """
    job = job_of(built, source, built.config.store.url, trace=trace)
    job = replace(job, store=replace(job.store, existing="rows-only"))
    return open_job(job, Ranks(), stack).engine
