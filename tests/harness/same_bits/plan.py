"""The plan: one frozen record per job, small enough that all of them take minutes. Pure.

Each value of an enumerated key, each other key that decides a result, and each schedule is in some job; `LEFT` names
the exceptions. `test_plan` compares the plan with the configuration, so that a new kind needs a job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tests.harness.fuzz.draw import Draw, Kill, Twin
from tests.harness.fuzz.log import Column, Log
from tests.harness.fuzz.log_files import FIXED_COLUMNS, SHAPES, tables_of
from tests.system.clicks import NUM_EXAMPLES, SCHEMAS

__all__ = ["JOBS", "LEFT", "LOGS", "Job"]

_CLICKS = Log(
    format="parquet",
    shape="file",
    seed=5,
    num_examples=NUM_EXAMPLES,
    columns=(Column(name="user", table="user"),),
    tables=(),
)


def _log(form: str) -> Log:
    """A small log of a format."""
    names = FIXED_COLUMNS.get(form, ("f0", "f1", "f2"))
    missing = 0.0 if form in ("mlperf-npz", "movielens") else 0.1
    columns = tuple(
        Column(name=name, table=name, missing=missing) for name in (names[:2] if form == "movielens" else names)
    )
    return Log(
        format=form,
        shape=SHAPES[form][-1],
        seed=3,
        num_examples=150,
        num_bad=3 if form == "csv" else 0,
        columns=columns,
        tables=tables_of(columns),
    )


#: Data by name: the click log of `tests.system.clicks` read by one of its schemas, or a small log in each format.
LOGS: Mapping[str, Log] = {**dict.fromkeys(SCHEMAS, _CLICKS), **{form: _log(form) for form in SHAPES}}

_COMMON = (
    "data.batch_size=12 data.eval_fraction=0.2 data.workers=0 oracle.lookahead=4 cache.prefetch_depth=2 "
    "store.buckets=8 model.embedding_dim=4 model.bottom_mlp=6 model.top_mlp=5 optim.rows_lr=0.1 optim.dense_lr=0.05 "
    "optim.eps=1e-6"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job.

    Attributes:
        name: of the job, and of its folder.
        data: a key of `LOGS`.
        flags: values by key, ``key=value`` separated by spaces, beside those of all jobs.
        ranks: processes.
        cache_rows: of each rank.
        kills: ends of its first starts, at failpoints; the same command is started until it ends by itself.
        half: steps after which it also stops at BASE, to resume at HEAD; 0: it does not.
        source: flags of a job that runs before, whose checkpoints this one starts from; empty: none.
    """

    name: str
    data: str = "sum"
    flags: str = ""
    ranks: int = 1
    cache_rows: int = 70
    kills: tuple[Kill, ...] = ()
    half: int = 0
    source: str = ""

    def draw(self, name: str, more: str = "", *, kills: tuple[Kill, ...] = ()) -> Draw:
        """A run of this job, for `tests.harness.fuzz`, with a store, a cacher and checkpoints of its own.

        Args:
            name: of its twin.
            more: flags whose values replace those of the job.
            kills: ends of its first starts.
        """
        pairs = (flag.partition("=") for flag in f"{_COMMON} {self.flags} {more}".split())
        job = tuple({path: value for path, _, value in pairs}.items())
        own = Twin(name=name, store="own", cacher="own", has_checkpoints=True, kills=kills)
        return Draw(seed=0, number=0, world_size=self.ranks, log=LOGS[self.data], job=job, twins=(own,))


def _staged(
    schedule: str,
    stages: int,
    flags: str = "",
    *,
    ranks: int = 1,
    microbatches: int = 4,
    data: str = "mean",
    cache_rows: int = 70,
    half: int = 0,
    name: str = "",
) -> Job:
    model = "" if "model." in flags else "model.name=dcnv2 "
    pipeline = f"pipeline.schedule={schedule} pipeline.stages={stages} pipeline.microbatches={microbatches}"
    flags = f"{model}{pipeline} {flags}"
    return Job(name=name or schedule, data=data, flags=flags, ranks=ranks, cache_rows=cache_rows, half=half)


_WHOLE = (
    Job(name="dlrm", half=9, flags="checkpoint.every=4 data.shuffle=true data.shuffle_buffer=30 data.epochs=2"),
    Job(
        name="store-process",
        flags="store.client=process checkpoint.every=4",
        kills=(Kill(point="after-write-back", times=9),),
    ),
    Job(
        name="dcnv2",
        data="weighted",
        flags="model.name=dcnv2 model.cross_layers=2 optim.rows=sgd optim.dense=sgd optim.momentum=0.9 "
        "optim.nesterov=true optim.clip_norm=0.1 optim.clip_scope=all",
    ),
    Job(
        name="deepfm",
        data="mean",
        half=9,
        flags="model.name=deepfm optim.rows=adam optim.dense=adam optim.beta1=0.8 optim.beta2=0.9 "
        "optim.schedule=cosine optim.schedule_length=20 optim.schedule_floor=0.05 optim.schedule_power=2 "
        "optim.rows_schedule=polynomial optim.rows_warmup_steps=4 optim.warmup_steps=6 optim.warmup_start=0.3",
    ),
    Job(
        name="wide-deep",
        data="ragged",
        flags="model.name=wide-deep optim.rows=rowwise_adagrad optim.dense=adamw optim.weight_decay=0.01 "
        "optim.weight_decay_exempt=1d optim.schedule=step optim.schedule_every=5 optim.schedule_factor=0.7 "
        "optim.rows_schedule=exponential optim.clip_value=0.01",
    ),
    Job(
        name="towers",
        data="mixed",
        flags="model.name=towers optim.rows=momentum optim.rows_momentum=0.5 optim.dense=lamb "
        "optim.schedule=exponential optim.schedule_every=1 optim.schedule_unit=epoch optim.schedule_factor=0.7 "
        "optim.rows_schedule=step data.epochs=2",
    ),
    Job(
        name="dcnv2-fuxictr",
        data="ragged",
        flags="model.name=dcnv2-fuxictr model.structure=stacked model.dropout=0.1 model.batch_norm=true "
        "optim.rows=adamw optim.rows_weight_decay=0.01 optim.schedule=polynomial optim.schedule_length=20 "
        "optim.rows_schedule=cosine",
    ),
    Job(
        name="deepfm-fuxictr",
        data="mixed",
        flags="model.name=deepfm-fuxictr model.loss=focal model.focal_gamma=1.5 model.focal_alpha=0 "
        "model.label_smoothing=0.1 optim.rows=ftrl optim.ftrl_beta=0.5 optim.ftrl_l1=0.01 optim.ftrl_l2=0.1 "
        "optim.schedule=step optim.schedule_milestones=2,7 optim.rows_schedule=constant",
    ),
    Job(
        name="finalmlp",
        data="mean",
        flags="model.name=finalmlp model.bottom_mlp=6 model.top_mlp=4 model.heads=2 model.gate_mlp=3 "
        "model.loss=weighted_bce model.pos_weight=5 optim.clip_norm=0.01 optim.clip_scope=rows",
    ),
    Job(name="mmoe", data="tasks", flags="model.name=mmoe model.experts=2 model.gate_mlp=3 model.loss_weights=2,0.5"),
    Job(name="ple", data="tasks", flags="model.name=ple model.experts=2 model.task_experts=1 model.levels=1"),
    Job(name="esmm", data="tasks", flags="model.name=esmm optim.clip_norm=0.01 optim.clip_scope=dense"),
    Job(name="factory", data="everything", flags="model.factory=tests.system.factory:build", ranks=2, cache_rows=60),
    Job(name="tables", flags="optim.rows_by_table=topic=frozen,user=sgd optim.rows_lr_by_table=user=0.5 run.steps=15"),
    Job(
        name="plateau",
        flags="optim.schedule=plateau eval.every=2 eval.metric=logloss optim.schedule_patience=0 eval.batches=1 "
        "optim.schedule_threshold=0.01 optim.schedule_cooldown=1",
    ),
    Job(name="rows-plateau", flags="optim.rows_schedule=plateau eval.every=2 optim.schedule_patience=0"),
    Job(name="float64", flags="run.dtype=float64 cache.dtype=float64 run.threads=2 run.kernels=torch run.seed=7"),
    Job(name="float16-rows", flags="cache.dtype=float16 cache.rounding=nearest optim.rows=adam"),
    Job(name="bfloat16-rows", flags="cache.dtype=bfloat16 run.autocast=bfloat16", half=9),
    Job(
        name="loss-scale",
        flags="model.factory=tests.harness.fuzz.models:poisoned run.nonfinite=skip cache.dtype=float32 "
        "run.autocast=float16 run.loss_scale=65536 run.loss_scale_growth_interval=3",
    ),
    Job(name="l2-decay", flags="optim.rows=adam optim.rows_weight_decay=0.01 optim.rows_decay_kind=l2", half=9),
    Job(name="average", flags="optim.ema_decay=0.9 optim.ema_evaluate=true eval.every=5", half=9),
    Job(
        name="evaluation",
        flags="eval.every=1 eval.unit=epoch eval.metric=gauc eval.group=user data.epochs=3 "
        "eval.patience=1 eval.min_delta=0.01",
    ),
    Job(name="keep-best", flags="eval.every=4 eval.keep_best=true checkpoint.every=5"),
    Job(name="min-uses", flags="data.min_uses=3 data.min_uses_by_table=topic=5 eval.every=5", half=9),
    Job(
        name="min-uses-zero",
        flags="data.min_uses=2 data.default_row=zero data.use_counts=sketch data.sketch_cells=16 eval.every=5",
        ranks=2,
    ),
    Job(name="expiry", flags="data.expire_after=60 data.expire_every=20", half=9),
    Job(name="expiry-steps", flags="data.expire_after=4 data.expire_unit=steps data.expire_every=2", ranks=2),
    Job(name="killed", flags="checkpoint.every=4", kills=(Kill(point="after-manifest", times=2),)),
    Job(
        name="interrupted-ranks",
        flags="checkpoint.every=4 optim.rows=adam",
        ranks=2,
        kills=(Kill(point="after-fetch", times=11, signal="SIGINT"),),
    ),
    Job(name="start-from", flags="optim.rows=adam optim.dense=adam", source="run.steps=9"),
    Job(name="start-from-kfac", flags="optim.precondition=kfac optim.kfac_inverse_every=3", source="run.steps=8"),
    Job(name="ranks-2", flags="cacher.assign=locality oracle.policy=drop-unused optim.rows=adam", ranks=2, half=9),
    Job(name="ranks-4", flags="optim.dense=adam eval.every=5", ranks=4),
    Job(name="shard-optimizer", flags="dense.shard=optimizer optim.dense=adam", ranks=2, half=9),
    Job(name="shard-gradients", flags="dense.shard=gradients optim.dense=adamw optim.clip_value=0.01", ranks=4),
    Job(name="shard-parameters", flags="dense.shard=parameters dense.wrap=* optim.dense=adam", ranks=2),
    Job(
        name="shard-parameters-average",
        flags="dense.shard=parameters optim.ema_decay=0.9 optim.ema_evaluate=true eval.every=5",
        ranks=2,
    ),
    Job(name="shard-parameters-lamb", flags="dense.shard=parameters optim.dense=lamb", ranks=2),
    Job(name="budget", flags="dense.budget_bytes=5000 dense.chunk_bytes=1000 optim.dense=adam"),
    Job(name="budget-shard", flags="dense.budget_bytes=5000 dense.shard=gradients optim.dense=adam", ranks=2, half=9),
    Job(name="budget-shard-parameters", flags="dense.state=host dense.shard=parameters optim.dense=adam", ranks=2),
    Job(name="state-on-host", flags="dense.state=host optim.dense=adam", ranks=2),
    Job(
        name="kfac",
        flags="optim.precondition=kfac optim.kfac_decay=0.5 optim.kfac_damping=0.1 optim.kfac_kappa=0.01 "
        "optim.kfac_factor_every=2 optim.kfac_inverse_every=3",
        half=9,
    ),
    Job(name="csv", data="csv", flags="data.bad_rows=skip"),
    Job(name="microbatches", flags="pipeline.microbatches=3"),
)

_KFAC = "optim.precondition=kfac optim.kfac_factors=local optim.kfac_inverse_every=1"

_SYNCHRONOUS = (
    _staged("1f1b", 3, "model.name=dlrm pipeline.replicas=2,1,1 optim.dense=adam", ranks=4, data="sum"),
    _staged("1f1b-shifted", 2, "pipeline.recompute_share=0.5", data="criteo-tsv", cache_rows=400),
    _staged("breadth-first", 4, "pipeline.chunks=2", ranks=2, data="mlperf-npz"),
    _staged("chimera", 2, "dense.shard=optimizer optim.dense=adam", ranks=2, half=9),
    _staged("chimera-doubling", 2, ranks=2, data="synthetic"),
    _staged("chimera-halving", 2, ranks=2, microbatches=2),
    _staged("dualpipe-v", 4, "optim.dense=adam", ranks=2),
    _staged("dynamic", 2, "pipeline.in_flight=3", ranks=2),
    _staged("eager-1f1b", 2, f"{_KFAC} optim.kfac_lag=1", ranks=2),
    _staged("gpipe", 4, "pipeline.backward_shares=0.5,1 pipeline.backward_unit=rank", ranks=4, half=9),
    _staged("graph", 2, "model.name=deepfm pipeline.stage_microbatches=2,4", ranks=2, data="mixed"),
    _staged("interleaved", 4, "pipeline.recompute=true", ranks=2, data="tfrecord"),
    _staged("interleaved-zero-bubble", 4, "pipeline.processes=1", ranks=2),
    _staged("v-half", 4, "pipeline.backward_shares=0.5,1"),
    _staged("v-min", 4, "pipeline.activations=host"),
    _staged("zb-auto", 2, "pipeline.costs=F=1,I=1,W=1 pipeline.memory=2", ranks=2, data="huggingface"),
    _staged("zb-h1", 2, f"{_KFAC} optim.kfac_placement=last", ranks=4),
    _staged("zb-h2", 2, "dense.budget_bytes=20000 optim.dense=adam"),
    _staged("zb-v", 4, "optim.rows=adam", ranks=2, half=9),
    _staged("1f1b", 2, "dense.shard=optimizer optim.dense=lamb", ranks=4, name="1f1b-shard-lamb"),
    _staged("1f1b", 2, "dense.shard=parameters optim.ema_decay=0.9 eval.every=5", ranks=4, name="1f1b-shard-average"),
    _staged("1f1b", 2, "dense.shard=parameters pipeline.activations=host", ranks=4, name="1f1b-shard-host"),
    _staged("1f1b", 2, "dense.shard=parameters run.verify=4", ranks=4, name="1f1b-shard-verify"),
)


def _named(name: str, job: Job) -> Job:
    """A further job of a schedule."""
    return replace(job, name=name)


#: What all stages agree on, K-FAC, replicas and compiled code, beside other ways to hold and run stages.
_TOGETHER = (
    _staged("1f1b", 2, "optim.clip_norm=0.05 optim.clip_scope=all", ranks=2, half=9, name="1f1b-clip"),
    _staged("chimera", 2, "run.nonfinite=skip run.loss_scale_growth_interval=4", ranks=2, name="chimera-skip-growth"),
    _staged(
        "breadth-first",
        4,
        "pipeline.chunks=2 dense.shard=parameters optim.clip_norm=0.05",
        ranks=4,
        name="breadth-first-shard-clip",
    ),
    _staged("1f1b", 2, "optim.rows_weight_decay=0.1", ranks=2, name="1f1b-row-decay"),
    _staged("zb-h1", 2, f"{_KFAC} dense.shard=gradients", ranks=4, half=9, name="zb-h1-kfac-shard"),
    _staged("dynamic", 2, _KFAC, ranks=2, name="dynamic-kfac"),
    _staged("1f1b", 2, f"{_KFAC} run.nonfinite=skip", ranks=2, half=9, name="1f1b-kfac-skip"),
    _staged("pipedream", 2, f"{_KFAC} pipeline.backward_shares=0.5,1", ranks=2, name="pipedream-kfac-partial"),
    _staged(
        "pipeoptim",
        3,
        "model.name=dlrm pipeline.replicas=2,1,1 optim.dense=adam",
        ranks=4,
        data="sum",
        name="pipeoptim-replicas",
    ),
    _staged(
        "pipeoptim",
        2,
        "model.name=dlrm pipeline.replicas=2,1 pipeline.rows_delay=1 optim.dense=adam",
        ranks=3,
        cache_rows=140,
        data="sum",
        half=9,
        name="pipeoptim-replicas-delayed",
    ),
    _staged("dynamic", 2, "model.name=dlrm pipeline.replicas=2,1", ranks=3, data="sum", name="dynamic-replicas"),
    _staged("spectrain", 2, "pipeline.activations=host pipeline.rows_delay=1", cache_rows=140, name="spectrain-host"),
    _staged("pipeoptim", 2, "run.compile=true optim.dense=adam", ranks=2, name="pipeoptim-compiled"),
)

#: Jobs that are compared with the serial reference.
_VERIFIED = (
    _staged("1f1b", 2, "run.verify=5 pipeline.replicas=3,1", ranks=4, name="verify-replicas"),
    _staged("chimera", 2, "run.verify=5", ranks=2, name="verify-two-directions"),
    _staged("pipedream", 2, "run.verify=5 pipeline.backward_shares=0.5,1", ranks=2, name="verify-partial-backward"),
    _staged("zb-h1", 2, f"{_KFAC} run.verify=5", ranks=4, name="verify-kfac"),
    _staged("1f1b", 2, "run.verify=5 optim.clip_norm=0.05 optim.clip_scope=all", ranks=2, name="verify-clip"),
    _staged(
        "1f1b",
        2,
        "model.factory=tests.harness.fuzz.models:poisoned run.nonfinite=skip cache.dtype=float32 run.autocast=float16 "
        "run.loss_scale=65536 run.loss_scale_growth_interval=3 run.verify=5",
        ranks=2,
        data="sum",
        name="verify-skip-growth",
    ),
)

_BUDGET = "dense.budget_bytes=20000 optim.dense=adam"

#: Memory of stages in chunks, beside other ways to hold and run them.
_CHUNKED = (
    _named("budget-partial-backward", _staged("gpipe", 2, f"{_BUDGET} pipeline.backward_shares=0.5,1", ranks=2)),
    _named("budget-pipedream-2bw", _staged("pipedream-2bw", 2, _BUDGET, ranks=2, half=9)),
    _named(
        "budget-spectrain",
        _staged(
            "spectrain",
            2,
            "dense.budget_bytes=20000 optim.dense=adagrad pipeline.rows_delay=1",
            cache_rows=140,
            half=9,
        ),
    ),
    _named("budget-shard-stages", _staged("chimera", 2, f"{_BUDGET} dense.shard=gradients", ranks=2, half=9)),
    _named("budget-activations", _staged("1f1b", 2, f"{_BUDGET} pipeline.activations=host")),
    Job(name="budget-kfac", flags=f"{_BUDGET} {_KFAC}", half=9),
    _named("budget-kfac-shard", _staged("chimera", 2, f"{_BUDGET} {_KFAC} dense.shard=gradients", ranks=2, half=9)),
    _named("budget-verify", _staged("1f1b", 2, f"{_BUDGET} run.verify=3")),
)

_ASYNCHRONOUS = (
    _staged("pipedream", 2, "pipeline.recompute=true", ranks=2, half=9),
    _staged("pipedream-vertical", 4, ranks=4, data="avazu-csv"),
    _staged("pipedream-2bw", 2, "optim.dense=adam", ranks=4),
    _staged("spectrain", 2, "optim.dense=sgd optim.momentum=0.9", ranks=2),
    Job(
        name="recompute-delayed",
        data="mean",
        flags="model.name=dcnv2 pipeline.schedule=spectrain pipeline.stages=2 pipeline.microbatches=4 "
        "pipeline.recompute=true pipeline.rows_delay=1",
        cache_rows=140,
    ),
    _staged("spectrain-v2", 2, "pipeline.rows_delay=1 optim.dense=adam", ranks=2, cache_rows=140),
    _staged("pipedream-2bw", 2, "dense.shard=gradients optim.dense=adam", ranks=4, name="pipedream-2bw-shard"),
    _staged(
        "pipeoptim",
        2,
        "dense.shard=optimizer pipeline.rows_delay=1 optim.dense=adam",
        ranks=4,
        cache_rows=140,
        name="pipeoptim-shard-delayed",
    ),
    _staged(
        "pipeoptim", 2, "model.name=deepfm pipeline.prediction_offset=1 optim.dense=adamw", data="movielens", half=9
    ),
)

#: In the order in which they run.
JOBS = (*_ASYNCHRONOUS, *_SYNCHRONOUS, *_TOGETHER, *_VERIFIED, *_CHUNKED, *_WHOLE)

#: Enumerated keys, or single values of them (``key=value``), without a job, and why.
LEFT: Mapping[str, str] = {
    "data.unlabelled": "refused in training",
    "data.scored": "refused in training",
    "data.expire_unit=days": "needs data with times",
    "data.identity": "what is compared at a resume, not what is trained",
    "data.follow": "a writer and a trainer at the same time",
    "oracle.horizon": "needs files of `convert --next-use`",
    "store.durability": "of the server",
    "store.existing": "of a server that outlives a job",
    "store.audit": "of a server that outlives a job",
    "checkpoint.take_over": "of two jobs at a time",
    "run.log_format": "of lines on stdout",
    "run.kernels=triton": "needs its interpreter or a device",
    "run.cuda_graph": "needs a CUDA device",
    "run.strict": "of a configuration file",
    "run.digest=false": "the digests are compared",
}
