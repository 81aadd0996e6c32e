"""Ranges and names of configuration values: defaults pass, a bad value gives one line."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from bagpipe.config.keys import config_keys
from bagpipe.config.optim_section import RateShape, RowChoice
from bagpipe.config.row_optimizers import ROW_OPTIMIZERS
from bagpipe.config.rules import RULES, check_config
from bagpipe.config.sections import (
    BadRows,
    Config,
    DataFormat,
    DenseOptimizer,
    Metric,
    Model,
    PipelineConfig,
    Policy,
    RunConfig,
)
from bagpipe.errors import InputError
from bagpipe.schedule.registry import TRAINED_SCHEDULES
from bagpipe.types.schema import FROZEN, OPTIMIZER_STATE_WIDTH, ROW_TYPES, RowDtype, RowOptimizer, base_optimizer


def with_value(path: str, value: object) -> Config:
    section, _, name = path.partition(".")
    return dataclasses.replace(Config(), **{section: dataclasses.replace(getattr(Config(), section), **{name: value})})


def test_the_defaults_pass():
    check_config(Config())


@pytest.mark.parametrize("key", config_keys(), ids=lambda key: key.path)
def test_defaults_are_in_range(key):
    assert key.range is None or key.range.contains(key.default)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.path)
def test_rules_name_existing_keys(rule):
    assert rule.path in {key.path for key in config_keys()}


def test_names_are_those_the_code_dispatches_on():
    """The sections repeat names of the code, to refuse a wrong one without importing torch. Both lists must agree."""
    from bagpipe.models import torchrec_models as models
    from bagpipe.oracle import eviction
    from data import formats
    from data.source import BAD_ROWS
    from trainer import optimizers
    from trainer.metrics import METRICS

    assert set(get_args(Policy)) == set(eviction.POLICIES)
    assert set(get_args(DataFormat)) == set(formats.FORMATS)
    assert set(get_args(Model)) == set(models.MODELS)
    assert set(get_args(Metric)) == {name for name, item in METRICS.items() if item.higher_is_better is not None}
    assert set(get_args(DenseOptimizer)) == set(optimizers.DENSE_OPTIMIZERS)
    assert get_args(RateShape) == (*optimizers.RATE_SHAPES, "plateau")
    assert get_args(BadRows) == BAD_ROWS
    rules = dict.fromkeys(base_optimizer(name)[0] for name in OPTIMIZER_STATE_WIDTH)
    assert (*get_args(RowOptimizer), FROZEN) == tuple(rules)
    assert set(get_args(RowChoice)) == {*get_args(RowOptimizer), "adamw"} == {*ROW_OPTIMIZERS} - {FROZEN}
    assert get_args(RowDtype) == tuple(ROW_TYPES)


def test_every_number_has_a_range():
    assert all(key.range for key in config_keys() if key.type in (int, float))


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("data.batch_size", 0, "data.batch_size must be at least 1, got 0"),
        ("data.limit", -1, "data.limit must be at least 0, got -1"),
        ("data.eval_fraction", 1.0, "data.eval_fraction must be at least 0 and below 1, got 1.0"),
        ("data.format", "tsv", f"data.format must be one of {', '.join(get_args(DataFormat))}, got 'tsv'"),
        ("data.test_path", "x", "data.test_path x needs data.path, the training examples, got none"),
        (
            "checkpoint.start_from",
            "x",
            "checkpoint.start_from x needs checkpoint.dir, the new job's folder, got none",
        ),
        (
            "checkpoint.start_without",
            ("rows.a",),
            "checkpoint.start_without rows.a needs checkpoint.start_from, got none",
        ),
        ("data.eval_path", "x", "data.eval_path x needs data.eval_fraction 0, got 0.1: evaluate with one of the two"),
        ("data.shuffle_buffer", 9, "data.shuffle_buffer 9 needs data.shuffle true, got false"),
        ("data.format", "parquet", "data.format parquet needs data.path, a file or folder, got none"),
        ("data.bad_rows", "ignore", "data.bad_rows must be one of stop, skip, got 'ignore'"),
        ("oracle.lookahead", 0, "oracle.lookahead must be at least 1, got 0"),
        ("oracle.policy", "lru", "oracle.policy must be one of belady-window, drop-unused, got 'lru'"),
        ("cache.rows", -1, "cache.rows must be at least 0, or auto, got -1"),
        ("cache.prefetch_depth", 0, "cache.prefetch_depth must be at least 1, got 0"),
        ("cache.dtype", "fp8", "cache.dtype must be one of run, float32, float64, float16, bfloat16, got 'fp8'"),
        ("cache.dtype", "float64", "cache.dtype float64 needs run.dtype float64, got float32"),
        ("cache.rounding", "down", "cache.rounding must be one of nearest, stochastic, got 'down'"),
        ("store.namespace", "a{b}", "store.namespace must be 1 to 200 letters, digits or any of _.:/@+=-, got 'a{b}'"),
        ("store.buckets", 48, "store.buckets must be a power of two from 1 to 65536, got 48"),
        (
            "run.peer_timeout_s",
            30.0,
            "run.peer_timeout_s must be more than store.timeout_s (30), got 30",
        ),
        ("store.durability", "some", "store.durability must be one of memory, everysec, always, got 'some'"),
        (
            "store.durability",
            "always",
            "store.durability always needs run.dir, a folder for the job's own store, or store.url; got neither",
        ),
        ("store.client", "fork", "store.client must be one of thread, process, got 'fork'"),
        ("store.timeout_s", 0.0, "store.timeout_s must be more than 0, got 0.0"),
        (
            "cacher.url",
            "localhost",
            "cacher.url must be empty, unix:PATH, HOST:PORT, grpc://HOST:PORT or grpcs://HOST:PORT, got 'localhost'",
        ),
        ("model.name", "mlp", f"model.name must be one of {', '.join(get_args(Model))}, got 'mlp'"),
        ("model.dropout", 1.0, "model.dropout must be at least 0 and below 1, got 1.0"),
        ("model.top_mlp", (64, 0), "model.top_mlp must be widths of at least 1, got (64, 0)"),
        ("model.factory", "mine", "model.factory must be empty or \"module:function\", got 'mine'"),
        (
            "optim.rows",
            "lamb",
            "optim.rows must be one of sgd, momentum, adagrad, rowwise_adagrad, adam, adamw, ftrl, got 'lamb'",
        ),
        ("optim.dense", "lion", "optim.dense must be one of sgd, adagrad, adam, adamw, lamb, got 'lion'"),
        ("optim.rows_lr", 0.0, "optim.rows_lr must be more than 0, got 0.0"),
        (
            "optim.eps",
            0.0,
            "optim.eps must be at least 1.18e-38, so that no step is 0 / 0 where a gradient is 0, got 0.0",
        ),
        ("pipeline.stages", 2, "pipeline.stages 2 needs pipeline.schedule, the name of a schedule, got none"),
        ("pipeline.microbatches", 0, "pipeline.microbatches must be at least 1, got 0"),
        ("pipeline.chunks", -1, "pipeline.chunks must be at least 0, got -1"),
        (
            "pipeline.partition",
            "a=0;b=1",
            "pipeline.partition must be auto or \"module=stage,…\", got 'a=0;b=1'",
        ),
        ("checkpoint.every", 10, "checkpoint.every 10 needs checkpoint.dir, a folder, got none"),
        ("checkpoint.keep", 0, "checkpoint.keep must be at least 1, got 0"),
        ("checkpoint.full_every", 0, "checkpoint.full_every must be at least 1, got 0"),
        ("checkpoint.mirror", "s3://b/a", "checkpoint.mirror s3://b/a needs checkpoint.dir, a folder, got none"),
        ("checkpoint.mirror", "b/a", "checkpoint.mirror b/a is no URL such as s3://bucket/jobs/a"),
        ("checkpoint.resume", "1200", "checkpoint.resume 1200 needs checkpoint.dir, a folder, got none"),
        (
            "eval.metric",
            "mae",
            "eval.metric must be one of auc, gauc, ne, logloss, or one of them of a label, as auc@buy, got 'mae'",
        ),
        (
            "eval.metric",
            "gauc",
            "eval.metric gauc needs eval.group, the feature whose ids are the groups, got none",
        ),
        ("eval.patience", 2, "eval.patience 2 needs eval.every, the steps or epochs between evaluations, got 0"),
        (
            "eval.keep_best",
            True,
            "eval.keep_best true needs eval.every, the steps or epochs between evaluations, and checkpoint.dir, a "
            "folder",
        ),
        ("checkpoint.resume", "last", "checkpoint.resume must be auto, best, never or a step number, got 'last'"),
        ("run.autocast", "half", "run.autocast must be one of off, bfloat16, float16, got 'half'"),
        ("run.loss_scale", 1000, "run.loss_scale must be 0 or a power of two up to 2**24, got 1000"),
        ("run.loss_scale_growth_interval", -1, "run.loss_scale_growth_interval must be at least 0, got -1"),
        ("run.loss_scale_growth_interval", 9, "run.loss_scale_growth_interval 9 needs run.nonfinite skip, got stop"),
        ("run.cuda_graph", True, "run.cuda_graph needs run.device cuda, got cpu"),
        ("run.device", "gpu", "run.device must be cpu, cuda or cuda:N, got 'gpu'"),
        ("run.seed", -1, "run.seed must be from 0 to 2**63 - 1, got -1"),
        ("run.threads", 0, "run.threads must be at least 1, got 0"),
    ],
)
def test_a_bad_value_gets_one_line(path, value, line):
    with pytest.raises(InputError) as caught:
        check_config(with_value(path, value))
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("run", "pipeline", "line"),
    [
        (
            {"autocast": "bfloat16", "dtype": "float64"},
            {},
            "run.autocast bfloat16 needs run.dtype float32, got float64",
        ),
        (
            {"cuda_graph": True, "device": "cuda"},
            {"microbatches": 2, "activations": "host"},
            "pipeline.activations host is not possible with run.cuda_graph: a captured graph keeps the addresses of "
            "activations",
        ),
        (
            {"loss_scale_growth_interval": 9},
            {"schedule": "1f1b", "stages": 2, "microbatches": 4},
            "run.loss_scale_growth_interval 9 needs run.nonfinite skip, got stop",
        ),
        (
            {"loss_scale_growth_interval": 9, "nonfinite": "skip"},
            {"schedule": "pipedream", "stages": 2, "microbatches": 4, "rows_delay": 1},
            "run.loss_scale_growth_interval 9 is not possible with pipeline.rows_delay 1: a forward begins before it "
            "is known whether the batch before was finite",
        ),
        (
            {},
            {"chunks": 2},
            "pipeline.chunks 2 needs pipeline.schedule, the name of a schedule, got none",
        ),
    ],
)
def test_values_that_do_not_fit_together_get_one_line(run, pipeline, line):
    with pytest.raises(InputError) as caught:
        check_config(Config(run=RunConfig(**run), pipeline=PipelineConfig(**pipeline)))
    assert str(caught.value) == line


@pytest.mark.parametrize("name", TRAINED_SCHEDULES)
def test_a_schedule_says_which_stages_and_microbatches_it_takes(name):
    costs = "F=1,I=1,W=1" if TRAINED_SCHEDULES[name].uses_costs else ""
    good = PipelineConfig(schedule=name, stages=4, microbatches=8, costs=costs)
    check_config(Config(pipeline=good))
    with pytest.raises(InputError) as caught:
        check_config(Config(pipeline=dataclasses.replace(good, chunks=3)))
    line = str(caught.value)
    begin = f"pipeline.schedule {name} does not allow these pipeline.stages, microbatches and chunks: {name}: "
    assert line.startswith(begin)
    assert "\n" not in line


def test_an_unknown_schedule_error_lists_all_schedules():
    with pytest.raises(InputError, match=r"^pipeline\.schedule must be .*, got 'gpie'$") as caught:
        check_config(with_value("pipeline.schedule", "gpie"))
    assert all(name in str(caught.value) for name in ("none", *TRAINED_SCHEDULES))


@pytest.mark.parametrize(
    ("schedule", "values", "line"),
    [
        ("pipeoptim", {"optim": {"dense": "lamb"}}, "predicts weights, which needs optim.dense sgd, .*, got lamb"),
        ("spectrain", {"run": {"autocast": "bfloat16"}}, "is not possible with run.autocast bfloat16: backwards would"),
    ],
)  # fmt: skip
def test_asynchronous_schedules_refuse_what_they_cannot_keep_exact(schedule, values, line):
    config = Config(pipeline=PipelineConfig(schedule=schedule, stages=4, microbatches=4))
    check_config(config)
    for section, fields in values.items():
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})
    with pytest.raises(InputError, match=rf"^pipeline\.schedule {schedule} {line}"):
        check_config(config)
    kept = dataclasses.replace(config, pipeline=PipelineConfig(schedule="pipedream-2bw", stages=2, microbatches=4))
    if not config.run.compile:
        check_config(kept)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"pipeline": {"schedule": "none"}}, "5 needs pipeline.schedule, the name of a schedule, got none"),
        ({"checkpoint": {"start_from": "a", "dir": "b"}}, "5 is not possible with checkpoint.start_from: the refer"),
        ({"pipeline": {"schedule": "pipeoptim", "stages": 2}, "optim": {"warmup_steps": 3}},
         r"5 with predicted weights \(pipeline.schedule pipeoptim\) needs a constant rate: .*, got constant and 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_verified_is_refused(values, line):
    given = {"pipeline": {"schedule": "1f1b", "microbatches": 2}, "run": {"verify": 5}, "optim": {"warmup_steps": 3}}
    check_config(changed(given))
    del given["pipeline"]["microbatches"]
    with pytest.raises(InputError, match=rf"^run\.verify {line}"):
        check_config(changed({section: given.get(section, {}) | values.get(section, {}) for section in given | values}))


def changed(values):
    config = Config()
    for section, fields in values.items():
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **fields)})
    return config


@pytest.mark.parametrize("stages", [3, 5])
def test_two_buffered_weights_need_micro_batches(stages):
    check_config(changed({"pipeline": {"schedule": "pipedream-2bw", "stages": stages, "microbatches": stages - 1}}))
    line = rf"^pipeline\.schedule pipedream-2bw does not allow .* must be at least {stages - 1}, .* got {stages - 2}$"
    with pytest.raises(InputError, match=line):
        check_config(changed({"pipeline": {"schedule": "pipedream-2bw", "stages": stages, "microbatches": stages - 2}}))


def test_errors_show_the_value_as_given():
    with pytest.raises(InputError, match=r"^job.toml:7: oracle\.lookahead must be at least 1, got 0$"):
        check_config(with_value("oracle.lookahead", 0), subjects={"oracle.lookahead": "job.toml:7: oracle.lookahead"})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cacher.url", "unix:/run/cacher.sock"),
        ("cacher.url", "10.0.0.1:7000"),
        ("cacher.url", "[::1]:7000"),
        ("model.factory", "package.module:make_model"),
        ("run.device", "cuda:3"),
        ("cache.rows", 0),
        ("data.workers", 0),
    ],
)
def test_values_at_the_edge_pass(path, value):
    check_config(with_value(path, value))


def test_a_horizon_needs_a_policy_that_keeps_idle_rows():
    oracle = dataclasses.replace(Config().oracle, horizon="log", policy="drop-unused")
    with pytest.raises(InputError, match=r"oracle\.horizon log orders rows .* drop-unused keeps none"):
        check_config(dataclasses.replace(Config(), oracle=oracle))


def test_tables_of_shards_need_shards():
    with pytest.raises(InputError, match=r"cacher\.shard_tables C1,C2 needs cacher\.shards"):
        check_config(with_value("cacher.shard_tables", ("C1", "C2")))
