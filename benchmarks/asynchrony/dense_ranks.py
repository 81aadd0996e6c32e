"""The dense part alone on two ranks: stages, lanes and messages of a job, without rows, cacher and store.

    every round, every job in turn:  Runner over declare_reading + declare_stages ──> time of a batch, times of actions
    simulated: the same batches, every action with its own time           forecast: from the medians of 1f1b's actions

The values of the embedding stage are given, the same for every batch; stages give their gradients back as in a job. An
action's time is without its waits for messages; the simulator adds the time that a message takes. A program of its own,
for torchrun: ``-m benchmarks.asynchrony.dense_ranks FILE ROUNDS BATCHES``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bagpipe.config.load import parse_config
from bagpipe.dense.loss import Loss
from bagpipe.distributed.interface import StageLinks
from bagpipe.distributed.membership import Membership
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.runner import EndOfBatches, Runner
from bagpipe.pipeline.stage.runtime import StageBatch, StageRuntime
from bagpipe.schedule.analysis.costs import measured_costs
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.prefetch_loop import declare_reading, declare_stages
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.loop import Template
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.lowering.turns import turn_loop
from bagpipe.split.staged_model import StageValue
from bagpipe.training.staged_dense import StagedDense
from bagpipe.types.model_inputs import ModelInputs
from bagpipe.types.schema import DataSchema
from benchmarks.asynchrony.ranks import MICROBATCHES, MODEL
from benchmarks.asynchrony.throughput import steady
from benchmarks.harness.child import run_child
from benchmarks.harness.processor_use import MAX_OTHER_CORES, ProcessorUse
from benchmarks.harness.rounds import turns
from benchmarks.pipeline.forecast import RUNNER_S, TimedLinks, ping_pong
from data.synthetic_options import options_at
from trainer.assembly import build_dense, build_training_model
from trainer.dense import loss_of
from trainer.process import configure_process

__all__ = ["DENSE_JOBS", "ROUNDS_AT_A_TIME", "DenseJob", "forecast_s", "measure", "rounds_of", "simulated_s"]

NUM_RANKS = 2
#: Schedule and `pipeline.rows_delay`; the first is what the others are compared with.
DENSE_JOBS = (("1f1b", 0), ("pipedream", 1), ("pipedream-2bw", 1), ("pipeoptim", 1))
#: Batches at either end of a block that do not count.
_RAMP = 2
_PINGS = 200
#: Most blocks of a job in a round, where other programs disturb them.
_TRIES = 3
#: Rounds of one pair of processes: what an interruption loses.
ROUNDS_AT_A_TIME = 2
_TIMEOUT_S = 500.0

Record: TypeAlias = dict[str, Any]


class _Given(nn.Module):
    """An embedding stage without rows."""

    def __init__(self, values: Sequence[StageValue], examples: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self._tensors = tuple(
            torch.randn((examples, *value.shape), generator=generator, dtype=value.dtype) for value in values
        )

    def forward(self, dense: Tensor, sparse: object) -> tuple[Tensor, ...]:
        return self._tensors


class DenseJob:
    """One rank's stages of a job, which can run any number of blocks of batches.

    Args:
        schedule, rows_delay: of the job.
        rank: this rank; it has one compute lane.
        links: to the other rank.
        flags: of the model, instead of those of the part `ranks`.
    """

    def __init__(
        self, schedule: str, rows_delay: int, *, rank: int, links: StageLinks, flags: Sequence[str] = MODEL
    ) -> None:
        stages = ["--pipeline.stages", "2", "--pipeline.microbatches", str(MICROBATCHES)]
        flags = [*flags, *stages, "--pipeline.schedule", schedule, "--pipeline.rows_delay", str(rows_delay)]
        config = parse_config(flags, "asynchrony", ()).config
        data: DataSchema = options_at("").schema
        built = build_training_model(config, data, NUM_RANKS)
        assert built.stages is not None, "in stages"
        staged, examples = built.stages.staged, config.data.batch_size
        given = _Given([staged.values[number] for number in staged.embedding_values], examples)
        staged = dataclasses.replace(staged, embedding=given)
        stages_job = dataclasses.replace(built.stages, staged=staged)
        self._links = TimedLinks(links)
        dense = build_dense(dataclasses.replace(built, stages=stages_job), rank=rank, links=self._links)
        assert isinstance(dense, StagedDense), "in stages"
        self.pipeline = dense.pipeline
        self.message_shape = (examples // MICROBATCHES, *_message(staged.values).shape)
        self._read_ahead = config.cache.read_ahead
        self._loss: Loss = loss_of(config.model, data)
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(2, (examples,), generator=generator).float()
        inputs = ModelInputs(dense=torch.zeros(examples, len(data.dense)), sparse=None, labels=labels)
        has_examples = bool(self.step.embedding_stages[rank].pipes)
        self._batch = self.pipeline.batch(inputs if has_examples else None, examples)

    @property
    def step(self) -> StepProgram:
        """The program of a batch."""
        return self.pipeline.step

    def run(self, batches: int) -> tuple[float, dict[str, float]]:
        """Train on the batch so many times.

        Returns:
            Seconds of a batch here in the steady state, and seconds of every action by its text, without waits for
            messages and with the runner's own time.
        """
        ends: list[float] = []
        spent: dict[str, float] = {}

        def timed(text: str, handler: Handler) -> Handler:
            name, colon, peer = text.partition(":")

            def call(index: int) -> None:
                self._links.waited_s = 0.0
                start_s = time.perf_counter()
                handler(index)
                spent[f"{name}{index}{colon}{peer}"] = time.perf_counter() - start_s - self._links.waited_s + RUNNER_S

            return call

        def read(b: int) -> None:
            if b >= batches:
                raise EndOfBatches

        for versions in self.pipeline.versions.values():
            versions.start(0)
        builder = LoopBuilder(read_ahead=self._read_ahead)
        declare_reading(builder)
        builder.provide(Point.ROWS_READY, "X_READ")
        declare_stages(builder, self.step, self.pipeline.process)
        handlers = {text: timed(text, handler) for text, handler in self._handlers().items()}
        Runner(
            builder.build().loop, {**handlers, "X_READ": read}, on_batch=lambda b: ends.append(time.perf_counter())
        ).run()
        return _steady(ends), spent

    def _handlers(self) -> Mapping[str, Handler]:
        step, process = self.step, self.pipeline.process
        runtime: StageRuntime = self.pipeline.runtime(
            self._stage_batch,
            lambda head, logits, targets: self._loss.of_head(head, logits.reshape(-1), targets),
            label_shape=self._loss.target_shape,
        )
        embedding = step.embedding_stages[process].number
        own = [instance for instance in step.instances if instance.process == process]
        return {
            **runtime.handlers(),
            f"{embedding}X_EMBED": partial(runtime.embed, embedding),
            f"{embedding}X_EMBED_GRAD": partial(runtime.embed_grad, embedding),
            **{f"{each.number}OPT": self.pipeline.weights[each.stage].step for each in own},
        }

    def _stage_batch(self, b: int) -> StageBatch:
        return self._batch


def rounds_of(rounds: int, batches: int) -> list[Record]:
    """Rounds of a pair of processes; see `measure`.

    Raises:
        JobError: a process failed.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rounds.json"
        program = ["-m", "benchmarks.asynchrony.dense_ranks", str(path), str(rounds), str(batches)]
        found: list[Record] = run_child(
            [sys.executable, *launcher, *program], path, name="the dense part", timeout_s=_TIMEOUT_S
        )
    return found


def measure(peers: TorchPeers, rounds: int, batches: int, *, flags: Sequence[str] = MODEL) -> list[Record]:
    """Every job in turn, on both ranks; a record per round.

    A record has for each job, ``schedule/rows_delay``, the seconds of a batch: ``measured_s``, ``simulated_s`` and
    ``forecast_s``; and ``others``, the cores that other programs used meanwhile. A block that others disturbed is
    repeated, and the least disturbed one counts.
    """
    torch.set_num_threads(1)
    links = peers.open_links(NUM_RANKS)
    jobs = {
        f"{name}/{late}": DenseJob(name, late, rank=peers.rank, links=links, flags=flags) for name, late in DENSE_JOBS
    }
    base = next(iter(jobs))
    pids: list[int] = peers.gather(os.getpid())
    for job in jobs.values():
        job.run(2 * _RAMP + 2)  # first batches allocate
    found: list[Record] = []
    for number in range(rounds):
        latency_s = ping_pong(peers, links, jobs[base].message_shape, times=_PINGS)
        blocks: dict[str, _Block] = {}
        for _, name in turns(list(jobs), 1, shuffle_seed=number):
            tries: list[_Block] = []
            while len(tries) < _TRIES and not (tries and tries[-1].others <= MAX_OTHER_CORES):
                tries.append(_block(peers, jobs[name], batches, pids))
            blocks[name] = min(tries, key=lambda block: block.others)
        record: Record = {"latency_s": latency_s}
        for name, job in jobs.items():
            own = blocks[name]
            record[name] = {
                "measured_s": own.measured_s,
                "simulated_s": simulated_s(job.step, own.times, batches, latency_s),
                "forecast_s": forecast_s(job.step, blocks[base].times, latency_s),
                "others": own.others,
            }
        found.append(record)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A block of batches of one job, the same on both ranks.

    Attributes:
        measured_s: seconds of a batch on rank 0.
        times: seconds of every action of all ranks.
        others: cores that other programs used.
    """

    measured_s: float
    times: Mapping[str, float]
    others: float


def _block(peers: TorchPeers, job: DenseJob, batches: int, pids: Sequence[int]) -> _Block:
    peers.gather(None)  # a barrier: both ranks start together
    before = ProcessorUse.now(pids)
    measured_s, spent = job.run(batches)
    others = ProcessorUse.now(pids).cores_since(before)[1]
    ranks: list[tuple[float, float, dict[str, float]]] = peers.gather((measured_s, others, spent))
    times = {text: seconds for _, _, own in ranks for text, seconds in own.items()}
    return _Block(measured_s=ranks[0][0], times=times, others=ranks[0][1])


def simulated_s(step: StepProgram, times: Mapping[str, float], batches: int, latency_s: float) -> float:
    """Time of a batch in the steady state of a block, every action with its own time.

    Args:
        step: program of a batch.
        times: seconds of every action of the block.
        batches: of the block.
        latency_s: of a message.
    """
    lanes = step.turns or {
        lane: tuple(Template(op=a.op, stage=a.stage, unit=a.index or 0, peer=a.peer) for a in actions)
        for lane, actions in step.program.lanes.items()
    }
    source = step.embedding_stages[0]
    simulation = simulate(turn_loop(step.program, lanes, source).unroll(batches), times, latency=latency_s)
    ends = [t.finish for t in simulation.timed if (t.action.stage, t.action.op) == (source.number, "X_EMBED_GRAD")]
    return _steady(sorted(ends))


def forecast_s(step: StepProgram, times: Mapping[str, float], latency_s: float) -> float:
    """Time of a batch in the steady state, from the median times of actions of another job with these stages."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for text, seconds in times.items():
        action = parse(text)
        grouped[f"{action.stage}{action.op}"].append(seconds)
    costs = measured_costs(grouped)
    if not step.turns:
        return float(simulate(step.program, costs, latency=latency_s).makespan)
    loop = turn_loop(step.program, step.turns, step.embedding_stages[0])
    return steady(loop, costs, first=8, latency=latency_s)


def _steady(ends: Sequence[float]) -> float:
    """Mean time between the ends of batches, without those at either end of a block."""
    counted = ends[_RAMP : len(ends) - _RAMP]
    return (counted[-1] - counted[0]) / (len(counted) - 1)


def _message(values: Sequence[StageValue]) -> StageValue:
    """What the first stage sends to the second one."""
    return next(value for value in values if value.producer == 0 and value.consumers)


def _main() -> None:
    path, rounds, batches = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    configure_process()
    membership = Membership.from_environment()
    assert membership is not None, "started by torchrun"
    with TorchPeers(membership, timeout_s=60) as peers:
        found = measure(peers, rounds, batches)
        if peers.rank == 0:
            Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main()
