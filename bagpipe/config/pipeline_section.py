"""`PipelineConfig`: the keys of the dense part in stages, a section of `bagpipe.config.sections`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from bagpipe.config.ranges import FROM_0_TO_1, NumberText, at_least, matching

__all__ = ["PipelineConfig"]

_COUNTS = r"([1-9]\d*(,[1-9]\d*)*)?"
_ALL = NumberText("")
_SHARE = r"(0?\.\d+|0|1|1\.0*|0\.)"
_SHARES = rf"(auto|{_SHARE}(,{_SHARE})*)?"
_BACKWARD_SHARES = rf"({_SHARE}(,{_SHARE})*)?"


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The dense pipeline. One process runs all its stages; W processes run W / P replicas of its P ranks, or W of it.

    Attributes:
        schedule: none (one stage), a name that `python -m bagpipe schedule --help` lists, or a .csv table of
            torch.distributed.pipelining.
        stages: dense stages.
        microbatches: micro-batches per batch.
        chunks: stages per pipeline rank; 0: the schedule's own number.
        plan: file of `python -m bagpipe plan --out`, which says schedule, stages, microbatches, partition and replicas.
        replicas: ranks of each stage, which share its micro-batches: "2,1,1"; empty: one each.
        stage_microbatches: of graph: micro-batches of each stage: "4,2,1"; empty: microbatches.
        partition: assignment of operators to stages: auto, or "module=stage,…" with names of modules of the model.
        recompute: keep only the inputs of a stage's forward, and recompute its activations before its backward.
        recompute_share: share of its micro-batches that each stage recomputes: "0.5,0.25,0", or "0.5" for the first,
            from which the others follow, or auto: the least within activation_bytes; empty: all.
        activation_bytes: of recompute_share auto: most bytes of activations on a pipeline rank; 0: what the rank of the
            last stage keeps without recomputing.
        activations: where what a forward keeps for its backward waits for it: device, or host.
        processes: auto, ranks of a pipeline are processes where there are several; or 1: each process runs all stages.
        backward_shares: partial backwards: micro-batches compute the backward of the last of these shares of the
            stages only, in turn: "0.5,1"; empty: of all stages.
        backward_unit: what has a share of its own: microbatch, or rank: all micro-batches of a replica have one.
        rows_delay: of asynchronous schedules: 1: a batch runs beside the one before, without its update of rows; or 0.
        prediction_offset: of pipeoptim: steps added to every prediction; below 0: fewer.
        in_flight: of dynamic: most micro-batches in flight on the first rank, evenly fewer on the next; 0: as 1f1b.
        record: of dynamic: write the orders that the job has taken to this file when it ends.
        replay: of dynamic: repeat the orders of such a file; the bits are the same with and without.
        costs: of zb-auto: durations of F, I and W of each stage, and of B if measured: "0F=3,0I=2,…", or a .json file.
        memory: of zb-auto: most micro-batches in flight: one number, or one per pipeline rank; empty: no limit.
    """

    schedule: str = "none"  # its range is a rule of bagpipe.config.pipeline_rules
    stages: Annotated[int, at_least(1)] = 1
    microbatches: Annotated[int, at_least(1)] = 1
    chunks: Annotated[int, at_least(0)] = 0
    plan: str = ""
    replicas: Annotated[str, matching(_COUNTS, "numbers of ranks, one per stage, such as 2,1,1")] = ""
    stage_microbatches: Annotated[str, matching(_COUNTS, "numbers of micro-batches, one per stage, such as 4,2,1")] = ""
    partition: Annotated[str, matching(r"auto|[\w.]+=\d+(,[\w.]+=\d+)*", 'auto or "module=stage,…"')] = "auto"
    recompute: bool = False
    recompute_share: Annotated[
        NumberText, matching(_SHARES, "auto, or shares from 0 to 1 such as 0.5 or 0.5,0.25,0")
    ] = _ALL
    activation_bytes: Annotated[int, at_least(0)] = 0
    activations: Literal["device", "host"] = "device"
    processes: Literal["auto", "1"] = "auto"
    backward_shares: Annotated[NumberText, matching(_BACKWARD_SHARES, "shares from 0 to 1 such as 0.5,1")] = _ALL
    backward_unit: Literal["microbatch", "rank"] = "microbatch"
    rows_delay: Annotated[int, FROM_0_TO_1] = 0
    prediction_offset: Annotated[int, at_least(-16)] = 0
    in_flight: Annotated[int, at_least(0)] = 0
    record: str = ""
    replay: str = ""
    costs: str = ""  # its range is a rule
    memory: Annotated[str, matching(_COUNTS, "numbers of micro-batches, such as 4 or 4,4,3,2")] = ""

    @property
    def is_staged(self) -> bool:
        """The model is trained in stages: micro-batches without a schedule are those of one stage."""
        return self.schedule != "none" or self.microbatches > 1

    @property
    def stage_replicas(self) -> tuple[int, ...]:
        """Ranks of each stage; empty: one each."""
        return _numbers(self.replicas)

    @property
    def micro_per_stage(self) -> tuple[int, ...]:
        """Micro-batches of each stage."""
        return _numbers(self.stage_microbatches) or (self.microbatches,) * self.stages

    @property
    def partial_shares(self) -> tuple[float, ...]:
        """The shares of partial backwards; empty: every backward is whole, since each share reaches the first stage."""
        shares = tuple(map(float, self.backward_shares.split(","))) if self.backward_shares else ()
        return shares if any(share * self.stages <= self.stages - 1 for share in shares) else ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()
