"""The micro-batches that a job recomputes: shares of its stages, from `pipeline.recompute*` and measured activations.

pipeline.recompute true, no share ──> all       a share, or one per stage ──> as many
auto ──activation bytes of the stages, measured──> the least within pipeline.activation_bytes
"""

from __future__ import annotations

from collections.abc import Mapping

from bagpipe.config.sections import Config
from bagpipe.dense.precision import Precision
from bagpipe.dense.stage_module import prepared
from bagpipe.errors import InputError, ScheduleError
from bagpipe.pipeline.stage.measure import activation_bytes
from bagpipe.schedule.analysis.memory import Memory
from bagpipe.schedule.builders.shifted import first_share
from bagpipe.schedule.lowering.recompute import AUTO, shares_of_text
from bagpipe.schedule.schedule import DenseSchedule
from bagpipe.split.staged_model import StagedModel

__all__ = ["recomputed_shares"]


def recomputed_shares(
    config: Config, staged: StagedModel, schedule: DenseSchedule, precision: Precision, *, replicas: int
) -> bool | Mapping[int, float]:
    """What `step_program` takes as `recompute`. All ranks find the same.

    Args:
        config: the job.
        staged: its stages.
        schedule: with its settings.
        precision: what the stages compute in.
        replicas: of the whole pipeline.

    Raises:
        InputError: a stage needs more bytes of activations than allowed, whatever it recomputes.
    """
    pipeline = config.pipeline
    text = pipeline.recompute_share
    own = any(setting.name == "recompute_share" for setting in schedule.settings)
    if not text or (own and first_share(text) is not None):
        return pipeline.recompute and not text
    program = schedule.build(staged.graph(pipeline.micro_per_stage), pipeline.chunks or None)
    memory = None
    if text == AUTO:
        parts = pipeline.stage_replicas or (1,) * len(staged.stages)
        pieces = [replicas * micro * part for micro, part in zip(pipeline.micro_per_stage, parts, strict=True)]
        memory = _memory(prepared(staged, precision), [-(-config.data.batch_size // each) for each in pieces])
    try:
        return shares_of_text(text, program, memory, pipeline.activation_bytes)
    except ScheduleError as error:
        named = f"activation_bytes {pipeline.activation_bytes}" if text == AUTO else f"recompute_share {text}"
        raise InputError(f"pipeline.{named}: {error}") from None


def _memory(staged: StagedModel, examples: list[int]) -> Memory:
    """Bytes of a micro-batch of so many examples of each stage."""
    found = [activation_bytes(staged, stage, size) for stage, size in enumerate(examples)]
    return Memory(
        activation_bytes={stage: whole for stage, (whole, _) in enumerate(found)},
        input_bytes={stage: inputs for stage, (_, inputs) in enumerate(found)},
    )
