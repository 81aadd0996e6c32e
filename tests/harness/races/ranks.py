"""A small job of two ranks in threads of this process."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import torch

from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.planner import plan_batches
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.store.memory.store import MemoryStore
from bagpipe.testing.local_peers import LocalPeers, local_peers
from bagpipe.testing.plain_job import PlainJob, PlainSettings
from bagpipe.training.engine import Engine
from tests.harness.races.jobs import batches

__all__ = ["run_two_ranks"]

WORLD_SIZE = 2


class _RankSum:
    """Sums the gradients of all ranks, in rank order."""

    def __init__(self, parameters: list[torch.nn.Parameter], peer: LocalPeers) -> None:
        self._parameters = parameters
        self._peer = peer

    def reduce(self, *, is_bad: bool | None = None) -> bool:
        parameters = self._parameters
        own = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
        gathered = own.new_empty(WORLD_SIZE * len(own))
        self._peer.dense.all_gather(gathered, own)
        parts = torch.split(gathered.view(WORLD_SIZE, -1).sum(0), [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        return False


def run_two_ranks(
    settings: PlainSettings,
    num_batches: int,
    *,
    scores: bool = False,
    change: Callable[[Engine], None] = lambda engine: None,
) -> tuple[tuple[str, str], ...]:
    """Train, and optionally score the same batches. Returns the ranks' digests.

    Args:
        settings: of both ranks.
        num_batches: to train.
        scores: whether to evaluate.
        change: changes each rank's engine before the last phase.
    """
    name = f"ranks-{uuid.uuid4().hex}"
    errors: list[BaseException] = []
    with ExitStack() as stack:
        jobs = []
        for peer in local_peers(WORLD_SIZE, timeout_s=20):
            job = PlainJob(settings, make_store=lambda rows: MemoryStore(rows, name=name, num_buckets=8))
            stack.enter_context(job)
            job.spec = replace(job.spec, world_size=WORLD_SIZE)
            dense = job.make_dense(replicas=_RankSum(list(job.model.parameters()), peer))
            job.engine = job.make_engine(dense, peers=peer, claim=_claim(job, peer))
            jobs.append((job, peer))

        def work(job: PlainJob, peer: LocalPeers) -> None:
            try:
                if not scores:
                    change(job.engine)
                job.engine.train(_steps(num_batches, job.spec, peer.rank))
                if scores:
                    change(job.engine)
                    job.engine.evaluate(_steps(num_batches, job.spec, peer.rank), lambda logits, labels: None)
            except BaseException as error:
                errors.append(error)
                peer.close()

        threads = [threading.Thread(target=work, args=pair, name=f"rank-{pair[1].rank}") for pair in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return tuple(job.digests() for job, _ in jobs)


def _steps(num_batches: int, spec: OracleSpec, rank: int) -> Iterator[RankBatch]:
    for batch, plan in plan_batches(batches(num_batches), spec):
        yield RankBatch.of(batch, plan, rank)


def _claim(job: PlainJob, peer: LocalPeers) -> Callable[[], bool]:
    return lambda: any(peer.gather(peer.rank == 0 and job.store.claim()))
