"""Evaluation on batches of a user's loader, in the middle of training: `bagpipe.jobs.evaluation` with a planner.

training at rest, store current ──> planner, evaluation_run ──step──> outputs of the user's model
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from typing import Any

from bagpipe.errors import InputError
from bagpipe.jobs.evaluation import evaluation_run
from bagpipe.jobs.ranks import Ranks
from bagpipe.lookahead.select import select_planner
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.train_pipeline.open_pipeline import OpenPipeline
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.user_batches import Position, UserBatches
from bagpipe.training.stepped_evaluation import Outputs
from bagpipe.training.stepped_run import SteppedRun

__all__ = ["evaluate"]


def evaluate(
    opened: OpenPipeline,
    model: ModelParts,
    options: Options,
    batches: UserBatches,
    loader: Iterable[Any],
    check: Callable[[], object],
) -> Generator[Any, None, Exception | None]:
    """Outputs of the model for the batches of a loader.

    Every rank scores its own batches. One whose batches have ended waits for the others. A rank that closes the
    generator ends the evaluation of all.

    Args:
        opened: its lanes rest, and its store is current; on all ranks.
        model, options: of the pipeline.
        batches: holds the batches of this evaluation.
        loader: the batches.
        check: called about twice a second while the next batch is not read. What it raises ends the evaluation.

    Returns:
        The error of the loader, or of that of another rank, after the outputs of the batches before. InputError:
        another rank has closed its generator, and this one has not. None: all batches are scored.

    Raises:
        Exception: of the model.
        StoreError, PeerError: the evaluation cannot go on.
    """
    job, outputs = opened.job, Outputs(model.converted.model)
    with ExitStack() as stack:
        peers = None if job.ranks.peers is None else job.ranks.peers.evaluation()
        planner = stack.enter_context(
            select_planner(
                opened.spec,
                planner=options.planner,
                group=None if peers is None else peers.plans,
                uneven="join",
            )
        )
        planned = planner.run(batches.read(iter(loader), Position()))
        run = stack.enter_context(evaluation_run(job, planned, outputs, peers=peers, prepare=batches.prepare))
        try:
            while True:
                run.await_batch(check)
                if (batch := run.step()) is None:
                    break
                batches.forget(run.next_batch)
                if batch.inputs is not None:  # else this rank's batches have ended
                    yield outputs.outputs
        except GeneratorExit:
            if peers is not None:
                _leave(run, outputs, job.ranks)
            raise
        result = run.end()
        left = job.ranks.gather(False) if result.report.stopped else []
    if batches.error is not None or result.input_error is not None:
        return batches.error or result.input_error
    if any(left):
        return InputError(
            f"rank {left.index(True)} has left the evaluation: it ends at batch {run.next_batch} on all ranks"
        )
    return None


def _leave(run: SteppedRun, outputs: Outputs, ranks: Ranks) -> None:
    """End an evaluation early, with all ranks: none waits for a message that does not come."""
    outputs.is_dropping = True
    run.stop()
    while run.step() is not None:
        pass
    run.end()
    ranks.gather(True)
