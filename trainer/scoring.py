"""`python -m trainer eval` and `predict`: score examples with the model of a checkpoint. Nothing is trained or written.

    checkpoint ──settings──> model ──dense state──> weights ─┐
               ──row files──> CheckpointStore                ├──> scores ──> metrics (eval), or a file (predict)
    data.path, in its order ──cacher process──> plans ───────┘

`eval` scores the held-out examples as training does; with `data.eval_fraction = 0`, and in `predict`, all of them.
`predict` has metrics too if `eval.group` names the groups of GAUC.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from bagpipe.checkpoint.checkpoint_store import CheckpointStore
from bagpipe.checkpoint.dense_state import combine, load
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.manifest import DATA_COLUMNS, BrokenCheckpoint
from bagpipe.client.agreement import first_difference
from bagpipe.client.remote import RemoteBatches
from bagpipe.config.load import Option, parse_config
from bagpipe.config.sections import CacherConfig, CheckpointConfig, Config, DataConfig
from bagpipe.errors import EXIT_DONE, EXIT_INTERRUPTED, InputError
from bagpipe.oracle.rank_batch import Phase
from bagpipe.training.engine import Engine
from bagpipe.training.evaluation import OnScores
from bagpipe.training.weight_average import WeightAverage
from bagpipe.types.schema import DataSchema, RowSchema
from bagpipe.util.outputs import check_writable, write_json
from bagpipe.util.printing import print_text
from bagpipe.util.program import note
from bagpipe.util.programs import command_of
from trainer.assembly import BuiltModel, build_dense, build_engine, build_training_model
from trainer.groups import GroupColumn, feature_number
from trainer.metrics import METRICS, BinaryMetrics, Quality, by_label, left_out_lines
from trainer.score_file import ScoreFile
from trainer.services import open_cacher
from trainer.settings import check_labelled, with_recorded
from trainer.tasks import Tasks

__all__ = ["evaluate", "predict", "test_metrics"]

_RESULT = Option(flag="--result", help="write the metrics as one JSON object")
_OUT = Option(flag="--out", help="file of the scores: .parquet or .csv")


def evaluate(argv: Sequence[str]) -> int:
    """Run ``python -m trainer eval``. Returns the exit code.

    Raises:
        InputError: a flag is wrong, there is no checkpoint, or the data or the model does not fit it.
    """
    command = parse_config(argv, command_of("eval"), (_RESULT,))
    result = command.options["result"]
    if result:
        check_writable(result, "--result")
    config = command.config
    check_labelled(config)
    step, is_whole, quality = _measure(config, "eval" if config.data.has_evaluation else "train")
    if result:
        write_json(result, _values(step, quality))
    _print(step, quality)
    return EXIT_DONE if is_whole else EXIT_INTERRUPTED


def test_metrics(config: Config, *, best: bool) -> dict[str, Any] | None:
    """Step and metrics of a job's model on the examples of `data.test_path`; None if that was interrupted.

    Args:
        config: of the job, which has ended.
        best: score the best checkpoint, otherwise the last one.

    Raises:
        InputError: the examples cannot be used.
    """
    data = dataclasses.replace(
        config.data, path=config.data.test_path, test_path="", eval_path="", eval_fraction=0.0, limit=0
    )
    checkpoint = CheckpointConfig(dir=config.checkpoint.dir, resume="best" if best else "auto")
    config = dataclasses.replace(config, data=data, checkpoint=checkpoint, cacher=CacherConfig())
    step, is_whole, quality = _measure(config, "train")
    return _values(step, quality) if is_whole else None


def _measure(config: Config, phase: Phase) -> tuple[int, bool, Quality]:
    """Score a phase. Returns the checkpoint's step, whether all examples are scored, and their metrics."""
    found: list[BinaryMetrics] = []

    def open_metrics(tasks: Tasks, groups: GroupColumn | None) -> OnScores:
        found.append(BinaryMetrics(groups, tasks=tasks))
        return found[0].add

    step, is_whole = _score(config, phase, open_metrics)
    return step, is_whole, found[0].quality()


def _values(step: int, quality: Quality) -> dict[str, Any]:
    """JSON-able."""
    return {"step": step, **quality.of_label(), "tasks": dict(quality.tasks)}


def _print(step: int, quality: Quality) -> None:
    """A line of the metrics of each label; on stderr one for each reason why a metric has no value."""
    for label, of_label in by_label(quality.values()).items():
        shown = [f"{METRICS[name].title} {value:.5f}" for name, value in of_label.items()]
        where = f"step {step}, {label}" if label else f"step {step}"
        print_text(f"{where}: {', '.join(shown) or 'no metric has a value'}")
    for label, found in (quality.tasks or {"": {"metrics_left_out": quality.left_out}}).items():
        for line in left_out_lines(found["metrics_left_out"]):
            note(f"{label}: {line}" if label else line)


def predict(argv: Sequence[str]) -> int:
    """Run ``python -m trainer predict``. Returns the exit code.

    Raises:
        InputError: see `evaluate`.
    """
    command = parse_config(argv, command_of("predict"), (_OUT,))
    out = command.options["out"]
    if not out:
        raise InputError("predict needs --out, the file of the scores, got none")
    check_writable(out, "--out")
    data = dataclasses.replace(command.config.data, eval_fraction=0.0, eval_path="", unlabelled=True)
    metrics: list[BinaryMetrics] = []
    with ScoreFile(Path(out)) as file:

        def open_scores(tasks: Tasks, groups: GroupColumn | None) -> OnScores:
            write = file.begin(tasks)
            if groups is None:
                return write
            metrics.append(BinaryMetrics(groups, tasks=tasks))

            def add(logits: Tensor, labels: Tensor) -> None:
                write(logits, labels)
                metrics[0].add(logits, labels)

            return add

        step, is_whole = _score(dataclasses.replace(command.config, data=data), "train", open_scores)
        if is_whole:
            file.publish()
    if not is_whole:
        return EXIT_INTERRUPTED
    print_text(f"step {step}: {file.num_examples} scores in {out}")
    for found in metrics:
        _print(step, found.quality())
    return EXIT_DONE


def _score(
    config: Config, phase: Phase, open_scores: Callable[[Tasks, GroupColumn | None], OnScores]
) -> tuple[int, bool]:
    """Score the examples of a phase in their order.

    Args:
        config: the job.
        phase: the examples.
        open_scores: called with the labels of the data, and with the groups of its examples if `eval.group` names
            them; returns what takes the scores.

    Returns:
        The checkpoint's step, and whether all are scored.
    """
    if config.data.is_topic and phase == "train":
        raise InputError(f"data.path {config.data.path}: a topic is for training: expected the files of the examples")
    checkpoint = _choose(config)
    data = dataclasses.replace(as_it_is(config.data), scored=True)
    config = _as_trained(dataclasses.replace(config, data=data), checkpoint)
    with ExitStack() as stack:
        cacher_url = open_cacher(config, stack)
        source = stack.enter_context(RemoteBatches(cacher_url, config))
        _check_columns(source.schema, checkpoint)
        groups = GroupColumn(feature_number(source.schema, config.eval.group)) if config.eval.group else None
        built = build_training_model(config, source.schema)
        store = CheckpointStore(checkpoint.folder, checkpoint.manifest, RowSchema.from_json(_rows(checkpoint)))
        difference = first_difference(_rows(checkpoint), _as_json(built.rows.to_json()))
        if difference is not None:
            raise InputError(
                f"the checkpoint's rows differ from the model's: {difference.path} is {difference.first} in the "
                f"checkpoint and {difference.second} in the model"
            )
        dense = build_dense(built)
        engine = build_engine(built, store, dense=dense)
        _restore(built, engine, checkpoint)
        tasks = Tasks.of(source.schema)
        on_scores = open_scores(tasks, groups)
        batches = source.batches(phase, built.eval_spec)
        watched = batches if groups is None else groups.watched(batches)
        scored = engine.evaluate(watched, on_scores, loss=tasks.loss)
    if scored.input_error is not None:
        raise scored.input_error
    return checkpoint.manifest.step, not scored.report.stopped


def _choose(config: Config) -> Checkpoint:
    """The checkpoint that `checkpoint.resume` names."""
    settings = config.checkpoint
    if not settings.dir:
        raise InputError("checkpoint.dir must name the folder of a job's checkpoints, got none")
    if settings.resume == "never":
        raise InputError("checkpoint.resume must be auto, best or a step number here, got never")
    found = CheckpointFolder(Path(settings.dir)).chosen(settings.resume, note)
    if found is None or not found.manifest.parts:
        raise InputError(f"checkpoint.dir {settings.dir} has no checkpoint of trained weights")
    return found


def as_it_is(data: DataConfig) -> DataConfig:
    """The data that is there now, in its order."""
    keys = ("follow", "follow_age_s", "stream_wait_s", "stream_idle_s", "until")
    defaults: dict[str, Any] = {key: getattr(DataConfig(), key) for key in keys}
    return dataclasses.replace(data, shuffle=False, epochs=1, **defaults)


def _as_trained(config: Config, checkpoint: Checkpoint) -> Config:
    """The configuration with the model, the number types and the seed that the checkpoint was trained with."""
    recorded = checkpoint.manifest.settings
    changed: dict[str, Any] = {"pipeline": type(config.pipeline)()}
    for section, keys in (("model", None), ("optim", None), ("run", ("dtype", "seed", "autocast"))):
        changed[section] = with_recorded(getattr(config, section), section, recorded, keys)
    changed["data"] = with_recorded(config.data, "data", recorded, ("min_uses", "min_uses_by_table", "default_row"))
    rows = RowSchema.from_json(_rows(checkpoint))
    cache: dict[str, Any] = {
        "dtype": "run" if rows.dtype == changed["run"].dtype else rows.dtype,
        "rounding": rows.rounding,
    }
    changed["cache"] = dataclasses.replace(config.cache, **cache)
    return dataclasses.replace(config, **changed)


def _check_columns(schema: DataSchema, checkpoint: Checkpoint) -> None:
    """Raise InputError unless the data has the columns that the model was trained on."""
    difference = first_difference(checkpoint.manifest.settings[DATA_COLUMNS], _as_json(schema.to_json()))
    if difference is not None:
        raise InputError(
            f"the data differs from that of the checkpoint: {difference.path} is {difference.first} in the checkpoint "
            f"and {difference.second} in the data"
        )


def _as_json(value: Mapping[str, Any]) -> Any:
    """The value as a manifest has it: tuples are lists."""
    return json.loads(json.dumps(value))


def _rows(checkpoint: Checkpoint) -> Mapping[str, Any]:
    return checkpoint.manifest.row_schema


def _restore(built: BuiltModel, engine: Engine, checkpoint: Checkpoint) -> None:
    """Load the weights, their averages, and the decay of the rows.

    Raises:
        InputError: they are of another model, or cannot be read.
    """
    model = built.converted.model
    try:
        state = combine(load(checkpoint.folder, part.dense) for part in checkpoint.manifest.parts)
    except BrokenCheckpoint as error:
        raise InputError(str(error)) from None
    state.restore(model)
    engine.cache.history.load(state.of_part(engine.cache.history.name))
    found = state.of_part(WeightAverage.name)
    for part in engine.parts:
        if part.name == WeightAverage.name and found:
            part.load_tensors(found)  # evaluation swaps them in, if it is asked to
