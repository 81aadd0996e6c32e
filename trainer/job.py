"""`run_job`: one training job on one rank, from configuration to result.

check ─> ranks ─> open_trainer_job ─> steps of a JobSession, evaluations ─> digests ─> Result
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch

from bagpipe.config.optim_section import pairs
from bagpipe.config.pipeline_plan import planned_step_s
from bagpipe.config.sections import Config
from bagpipe.dense.parallel.broadcast import share_stages
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError, JobError
from bagpipe.jobs.ranks import Ranks, check_same, open_ranks
from bagpipe.oracle.plan import cache_rows_in
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.ir.loop_builder import sort_lanes
from bagpipe.schedule.lowering.recompute import AUTO
from bagpipe.store.row_sums import RowSums
from bagpipe.training.digest import embedding_digest
from bagpipe.training.engine import OnBatch
from bagpipe.training.learning_rates import LearningRates
from bagpipe.training.progress import RunResult
from bagpipe.training.staged_dense import StagedDense
from bagpipe.util.outputs import cannot_write, check_folder, check_writable
from bagpipe.util.printing import print_text
from bagpipe.util.program import PacedNotes, note
from trainer.devices import check_device, cuda_devices
from trainer.evaluation import Scored
from trainer.metrics import Quality
from trainer.observe.meter import planned_steps
from trainer.observe.reporter import Reporter, TrainingFacts
from trainer.observe.sinks import open_reporter
from trainer.open_job import TrainerJob, open_trainer_job
from trainer.orders import write_orders
from trainer.result import Result
from trainer.scoring import test_metrics
from trainer.settings import check_trained, common_settings, config_of_rank, path_of_rank
from trainer.shards import check_shards
from trainer.stages import check_dynamic, check_ranks, has_losses
from trainer.totals import RankTotals, combine, totals_of

__all__ = ["run_job"]


def run_job(config: Config, *, membership: Membership | None = None, result_path: str = "") -> Result:
    """Train, evaluate and compute digests. Every rank returns the same result; rank 0 writes it.

    Args:
        config: the job.
        membership: this rank; None for a single rank.
        result_path: file for the result, written by rank 0; empty: none.

    Raises:
        InputError: configuration, data or store cannot be used. Bad data in a later batch is reported after the batches
            before it are trained and written back. Bad held-out data is reported after the result is written, which
            then has no metrics.
        StoreError, JobError: the job failed. PeerError: another rank failed.
    """
    common, config = common_settings(config), config_of_rank(config, membership)
    _check(config, membership, result_path)
    torch.set_num_threads(config.run.threads)
    # No TF32, so that devices agree within rounding. This is torch's default, but some images override it.
    torch.set_float32_matmul_precision("highest")
    with (
        open_ranks(membership, timeout_s=config.run.peer_timeout_s, device=config.run.device) as ranks,
        ExitStack() as reports,
        ExitStack() as stack,
    ):
        # Innermost: other ranks get the error before this rank stops the services it started for them.
        with ranks.reporting():
            check_same(ranks, common, "configurations")
            reporter = reports.enter_context(open_reporter(config, membership))
            job = open_trainer_job(config, ranks, stack, reporter, Trace() if config.run.trace else None)
            stack.enter_context(job.session)
            _note_recomputation(job, ranks)
            start_s = time.monotonic()
            with reporter.training(_training_facts(job, ranks)) as on_batch:
                trained = _train(job, on_batch)
            _note_nothing_left(job, ranks, trained)
            return _finish(job, ranks, reporter, trained, time.monotonic() - start_s, result_path)


def _note_recomputation(job: TrainerJob, ranks: Ranks) -> None:
    """Say which shares of the stages are recomputed, if the configuration leaves it to the job."""
    text = job.built.config.pipeline.recompute_share
    if ranks.is_first and job.built.stages is not None and text == AUTO:
        shares = ", ".join(f"{share:.3g}" for _, share in sorted(job.built.stages.recomputed.items()))
        note(f"pipeline.recompute_share {text}: the stages recompute {shares} of their micro-batches")


def _note_nothing_left(job: TrainerJob, ranks: Ranks, trained: RunResult) -> None:
    """Say why no batch was trained, if nothing has failed or stopped the job."""
    config, step = job.built.config, job.open.checkpoints.first_batch
    has_ended = trained.report.stopped or trained.input_error is not None
    if not ranks.is_first or has_ended or trained.progress.steps > step:
        return
    where = f"the job resumes at step {step}" if step else "the job begins"
    if job.evaluator.history.is_over(config.eval):
        reason = f"evaluations have not got better for eval.patience {config.eval.patience}"
    elif config.run.steps and step >= config.run.steps:
        reason = f"run.steps is {config.run.steps}"
    else:
        reason = f"the data has no further batch (data.epochs {config.data.epochs})"
    note(f"nothing is left to train: {where}, and {reason}")


def _note_activations(job: TrainerJob, ranks: Ranks) -> None:
    """Say how many bytes of activations a pipeline rank had on its device, if they went to the host. By all ranks."""
    dense = job.open.engine.dense
    if not isinstance(dense, StagedDense) or not dense.pipeline.activations:
        return
    peak = max(ranks.gather(max(lane.peak_bytes for lane in dense.pipeline.activations.values())))
    if ranks.is_first:
        note(f"pipeline.activations host: a pipeline rank had at most {peak:,} bytes of activations on the device")


def _train(job: TrainerJob, on_batch: OnBatch | None) -> RunResult:
    """Train to the end of the data or of patience, with the evaluations that are due."""
    session, evaluator = job.session, job.evaluator
    job.open.engine.dense.model.train()
    run = session.begin(job.batches(), job.open.checkpoints.first_batch, stops_on_signals=True)
    with session.failing():
        if job.verification is not None and not job.verification.is_recording and job.open.ranks.is_first:
            note(f"run.verify: nothing is compared: the job resumes at step {run.next_batch}")
        if evaluator.history.best_step == job.open.checkpoints.first_batch:
            evaluator.name_best()  # the process ended between publishing and naming it
        is_over = evaluator.history.is_over(job.built.config.eval)
        evaluator.prepare()
        # A checkpoint can be older than the evaluation after it: of the end of a job, or before a signal.
        is_over = is_over or (evaluator.is_due() and evaluator.evaluate(run.next_batch))
        while not is_over and run.step() is not None:
            if on_batch is not None:
                on_batch(run.progress)
            if job.verification is not None and job.verification.is_due(run.next_batch):
                _verify(job, run.next_batch)
            is_over = evaluator.is_due() and evaluator.evaluate(run.next_batch)
        if run.next_batch:
            _verify(job, run.next_batch, is_last=True)  # the data has fewer batches
    return session.end_here() if is_over else session.end()


def _verify(job: TrainerJob, batches: int, *, is_last: bool = False) -> None:
    """Compare the batches trained so far with the serial reference, between two steps, if they are recorded."""
    verification, ranks = job.verification, job.open.ranks
    if verification is None or not verification.is_recording:
        return
    job.session.flush("verify", batches)
    holders = {name: stage.holders[0] for stage in job.open.held for name, _ in stage.parameters}
    group = None if ranks.peers is None else ranks.peers.dense
    found = verification.verify(batches, holders=holders, group=group, gather=ranks.gather)
    found.check()
    if ranks.is_first and (is_last or not verification.is_recording):
        note(f"run.verify: {found.line}")


def _training_facts(job: TrainerJob, ranks: Ranks) -> TrainingFacts:
    checkpoints = job.open.checkpoints
    return TrainingFacts(
        streams=job.open.engine.cache.streams,
        shows_loss=has_losses(job.built.stages, ranks.rank),
        steps=checkpoints.first_batch,
        samples=job.session.carried.get("samples", 0),
        num_steps=planned_steps(job.built.config),
        published=lambda: checkpoints.published_step,
        rates=partial(_rates, job),
        gradient_norm=lambda: job.open.engine.dense.gradient_norm,
    )


def _rates(job: TrainerJob) -> dict[str, Any]:
    """Learning rates of the latest batch; of the tables that differ from the others by table."""
    engine, optim = job.open.engine, job.built.config.optim
    schedule = next((part for part in engine.parts if isinstance(part, LearningRates)), None)
    optimizers = [chunk.optimizer for chunk in engine.dense.chunks.values() if chunk.optimizer is not None]
    factor = 1.0 if schedule is None else schedule.row_factor
    rates: dict[str, Any] = {"rows_lr": optim.rows_lr * factor}
    by_table = {table: float(rate) for table, rate in pairs(optim.rows_lr_by_table)}
    if differing := {table: rate * factor for table, rate in by_table.items() if rate != optim.rows_lr}:
        rates["rows_lr_by_table"] = differing
    if optimizers:
        rates["dense_lr"] = float(optimizers[0].param_groups[0]["lr"])
        if schedule is not None:
            rates["schedule_lr"] = rates["dense_lr"]
    return rates


def _finish(
    job: TrainerJob, ranks: Ranks, reporter: Reporter, trained: RunResult, seconds: float, result_path: str
) -> Result:
    """Steps after training: share the model between ranks, evaluate, write the trace, compute digests and result."""
    config, checkpoints, engine, held = job.built.config, job.open.checkpoints, job.open.engine, job.open.held
    if trained.input_error is not None:
        raise trained.input_error
    checkpoints.claim_if_resumed()
    if held and ranks.peers is not None:
        share_stages(held, engine.dense.optimizer, ranks.peers.dense, ranks.gather)
        for part in job.open.parts:
            part.share(held, ranks.peers.dense)
    _note_activations(job, ranks)
    evaluation = _evaluate(job, trained)
    if engine.trace is not None:
        lanes = ("oracle", *sort_lanes((*trained.report.lanes, "compute")))
        path = path_of_rank(config.run.trace, ranks.rank)
        try:
            engine.trace.write(path, process=f"rank {ranks.rank}", lanes=lanes)
        except OSError as error:  # what watches a job does not end it
            note(f"run.trace: {cannot_write(path, error)}")
    reporter.phase("computing digests")
    digest = engine.dense.digest()
    samples_before = checkpoints.carried().get("samples", 0)
    spec, slots = job.built.spec, engine.cache.num_slots_used
    totals = totals_of(
        trained,
        seconds=seconds,
        dense_digest=digest,
        samples_before=samples_before,
        cache_rows=cache_rows_in(slots) if spec.grows else spec.num_slots,
    )
    result, test_error = _result(job, ranks, totals, trained, evaluation, reporter)
    unwritten = _write(result, result_path, config) if result_path and ranks.is_first else None
    unrecorded = _record_orders(job, ranks)
    reporter.end(dataclasses.asdict(result))
    # Barrier: rank 0 must not stop its cacher and store while other ranks use them, or are connected to the cacher.
    job.source.close()
    ranks.gather(None)
    problem = evaluation.error or unwritten or unrecorded or test_error
    if problem is not None:
        raise problem
    return result


def _record_orders(job: TrainerJob, ranks: Ranks) -> InputError | JobError | None:
    """Write the orders that lanes have chosen, if asked for; called by all ranks. The error of rank 0."""
    dense, stages, path = job.open.engine.dense, job.built.stages, job.built.config.pipeline.record
    if not path or stages is None or stages.shape is None or not isinstance(dense, StagedDense):
        return None
    assert dense.order_log is not None, "the schedule has no order"
    return write_orders(path, stages.shape, dense.order_log, ranks)


def _write(result: Result, path: str, config: Config) -> JobError | None:
    """Write the result. Of one that cannot be written the text is printed, and the error returned."""
    try:
        result.write(path)
    except JobError as error:
        if config.run.log_format == "text":
            print_text("\n".join(result.lines()))
        return error
    return None


def _check(config: Config, membership: Membership | None, result_path: str) -> None:
    """Check the configuration before any resource is opened."""
    check_trained(config)
    rank = membership.rank if membership is not None else 0
    check_ranks(config.pipeline, membership.world_size if membership is not None else 1)
    check_dynamic(config, membership.world_size if membership is not None else 1)
    check_shards(config.dense, membership.world_size if membership is not None else 1)
    check_device(config.run.device, cuda_devices)
    if config.data.test_path and not config.checkpoint.dir:
        raise InputError(
            f"data.test_path {config.data.test_path} needs checkpoint.dir, whose checkpoint is scored, got none"
        )
    if config.checkpoint.dir:
        check_folder(config.checkpoint.dir, "checkpoint.dir")
    files = {"--result": result_path if rank == 0 else "", "run.trace": path_of_rank(config.run.trace, rank)}
    files["pipeline.record"] = config.pipeline.record if rank == 0 else ""
    for key, path in files.items():
        if path:
            check_writable(path, key)
    folders = {"run.tensorboard": config.run.tensorboard, "run.dir": config.run.dir} if rank == 0 else {}
    for key, path in folders.items():
        if path:
            check_folder(path, key)


def _evaluate(job: TrainerJob, trained: RunResult) -> Scored:
    """Score the held-out examples, unless there are none or the job was interrupted."""
    if trained.report.stopped or not job.built.config.data.has_evaluation:
        return Scored(quality=Quality(), is_stopped=trained.report.stopped)
    return job.evaluator.final(trained.progress.steps)


def _test(job: TrainerJob, trained: RunResult, reporter: Reporter) -> tuple[dict[str, Any] | None, InputError | None]:
    """On rank 0: the metrics of `data.test_path`, unless there is none or the job was interrupted; or its error."""
    config = job.built.config
    if not config.data.test_path or trained.report.stopped:
        return None, None
    reporter.phase("scoring the test examples")
    try:
        has_best = config.eval.keep_best and job.evaluator.history.best_step is not None
        return test_metrics(config, best=has_best), None
    except InputError as error:
        return None, error


def _result(
    job: TrainerJob, ranks: Ranks, own: RankTotals, trained: RunResult, evaluation: Scored, reporter: Reporter
) -> tuple[Result, InputError | None]:
    """The job's result, equal on every rank, and the error of its test. Rank 0 reads the store and has all scores."""
    totals = combine([RankTotals(**values) for values in ranks.gather(dataclasses.asdict(own))])
    checkpoints, store = job.open.checkpoints, job.open.store
    verified = None if job.verification is None else job.verification.found
    changes = [RowSums.of(values) for values in ranks.gather(store.sum_changes().to_list())]
    found, error = None, None
    if ranks.is_first:
        tested, error = _test(job, trained, reporter)
        sums, digest = RowSums(changes[0].num_buckets), None
        if job.built.config.run.digest:
            digest = embedding_digest(store, sums, _DigestProgress(checkpoints.claim.num_rows))
        found = {
            **evaluation.quality.of_label(),
            "tasks": dict(evaluation.quality.tasks),
            "embedding_digest": digest,
            "evaluations": [evaluation.to_json() for evaluation in job.evaluator.history.evaluations],
            "planned_step_s": planned_step_s(job.built.config.pipeline),
            "best_step": job.evaluator.history.best_step,
            "test": tested,
            "early_stopped": job.evaluator.history.is_over(job.built.config.eval),
        }
        checkpoints.check_rows()  # after the digest, which could have missed the same rows
        if digest is not None:
            checkpoints.claim.row_check.compare(sums, changes)
        checkpoints.claim.finish(steps=totals.steps, dense_digest=totals.dense_digest, stopped=evaluation.is_stopped)
    result = Result(
        **ranks.share(found),
        steps=totals.steps,
        samples=totals.samples,
        seconds=totals.seconds,
        samples_per_s=(totals.samples - totals.samples_before) / totals.seconds,
        loss=totals.loss,
        rows_unique=totals.rows_unique,
        rows_new=totals.rows_inserted - totals.rows_found,
        rows_fetched=totals.rows_fetched,
        rows_written=totals.rows_written,
        rows_deleted=totals.rows_deleted,
        evictions_waiting=totals.evictions_waiting,
        cache_rows=totals.cache_rows,
        hit_rate=totals.hit_rate,
        exposed_embedding_s=totals.exposed_s,
        step_s_p50=totals.step_s_p50,
        dense_digest=totals.dense_digest,
        peak_rss_bytes=totals.peak_rss_bytes,
        skipped_rows=job.skipped_rows(),
        skipped_batches=totals.skipped_batches,
        loss_scale=totals.loss_scale,
        resumed_from=checkpoints.resumed_from,
        checkpoints=checkpoints.num_published,
        checkpoint_stall_s=totals.checkpoint_stall_s,
        stopped=evaluation.is_stopped,
        continued=checkpoints.claim.continued,
        started_from=checkpoints.origin.get("takings"),
        verified=None if verified is None else dataclasses.asdict(verified),
    )
    return result, error


class _DigestProgress:
    """Prints the progress of a long digest. `count`: counts the namespace's rows, when the first note is due."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._num_rows = 0
        self._total = cache(count)
        self._notes = PacedNotes()

    def __call__(self, num_rows: int) -> None:
        self._num_rows += num_rows
        self._notes(
            lambda seconds: (
                f"{self._num_rows} of {self._total()} rows digested in {seconds:.0f} s (run.digest = false: none)"
            )
        )
