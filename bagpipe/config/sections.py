"""The configuration of a job: one frozen dataclass per section, one field per key.

A field's type gives the key's type and range (`Literal` or `Annotated`), its ``Attributes:`` line the help text. A
comment or the help text gives the source of a numeric default. `bagpipe.config.load` reads TOML files and flags.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from bagpipe.config.cacher_section import Assignment, CacherConfig
from bagpipe.config.dense_section import DenseConfig
from bagpipe.config.eval_section import EvalConfig, Metric
from bagpipe.config.model_section import Model, ModelConfig
from bagpipe.config.optim_section import DenseOptimizer, OptimConfig
from bagpipe.config.pipeline_section import PipelineConfig
from bagpipe.config.ranges import (
    ABOVE_0,
    ISO_TIME,
    POWER_OF_TWO,
    IntOrAuto,
    Range,
    at_least,
    at_least_or_auto,
    each_of,
    matching,
)
from bagpipe.types.schema import ROW_TYPES, Rounding, RowDtype
from bagpipe.util.redaction import redacted_repr

__all__ = [
    "Assignment",
    "Autocast",
    "CacheConfig",
    "CacherConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataFormat",
    "DenseConfig",
    "DenseOptimizer",
    "Durability",
    "EvalConfig",
    "Metric",
    "Model",
    "ModelConfig",
    "OptimConfig",
    "OracleConfig",
    "PipelineConfig",
    "Policy",
    "RunConfig",
    "StoreConfig",
]

# Names that the code dispatches on, repeated so that a wrong one is refused without importing torch.
DataFormat = Literal[
    "avazu-csv", "criteo-tsv", "csv", "huggingface", "mlperf-npz", "movielens", "parquet", "synthetic", "tfrecord"
]
BadRows = Literal["stop", "skip"]
FileHashes = Literal["sampled", "full"]
Follow = Literal["off", "marker", "age"]
DefaultRow = Literal["trained", "zero"]
UseCounts = Literal["exact", "sketch"]
ExpireUnit = Literal["examples", "steps", "days"]
Policy = Literal["belady-window", "drop-unused"]
Horizon = Literal["window", "log"]
Durability = Literal["memory", "everysec", "always"]
RunDtype = Literal["float32", "float64"]
NonFinite = Literal["stop", "skip"]
Kernels = Literal["auto", "torch", "triton"]
Autocast = Literal["off", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data.

    Attributes:
        path: file or folder, local or a URL such as s3://bucket/days; kafka://HOST:PORT/TOPIC: messages, a line each;
            the synthetic format needs none.
        format: format of the data; if a path is given without one, it is told from the path's content.
        schema: TOML file that names the columns (csv, huggingface, parquet, synthetic, tfrecord) or overrides
            tables (other formats).
        batch_size: examples in a global batch.
        limit: use only the first so many examples (before the evaluation split); 0: all.
        epochs: passes over the training examples.
        eval_fraction: share of the examples, taken from the end, held out for evaluation.
        eval_path: file or folder of examples for evaluation, with the format and schema of path; needs eval_fraction 0.
        test_path: file or folder of examples, with the format and schema of path, for one evaluation after training: of
            the best model, if eval.keep_best keeps it, or else of the last one; needs checkpoint.dir.
        shuffle: visit blocks, and examples inside a block, in an order drawn from (run.seed, epoch).
        shuffle_buffer: with shuffle, mix the examples of consecutive blocks that hold at least so many; memory for them
            is needed twice. 0: examples stay in their block (4 MiB of text, or 65,536 rows).
        bad_rows: stop at a malformed row, or skip and count it.
        workers: parser processes; 0: the program itself parses.
        unlabelled: examples may lack labels and weights, as columns or as values; `trainer predict` sets it, training
            and evaluation need them.
        scored: the examples are scored only, and create no row; `trainer eval` and `trainer predict` set it.
        min_uses: a row is created at its so-many-th use in the training examples, counted from the first batch on;
            earlier uses read default_row. 1: at its first.
        min_uses_by_table: the same of single tables, TABLE=USES.
        default_row: what uses of rows that are not created read: a row of their table that is trained with them
            (trained), or nothing, a zero vector (zero).
        use_counts: counts of uses that are exact, or those of a sketch of fixed size, which can be too large.
        sketch_cells: of use_counts sketch: cells of each of the 4 rows of a table's sketch, 16 B each. With N uses of
            the table so far, a count is too large by more than 2.72 N / sketch_cells with a probability of 2 %.
        expire_after: a row that no training example has used for longer than this is deleted; its id begins anew. In
            units of expire_unit; 0: never.
        expire_after_by_table: the same of single tables, TABLE=NUMBER.
        expire_unit: what expire_after counts: examples, steps, or days of the data's own clock.
        expire_every: steps from one deletion of expired rows to the next. There the prefetch waits for a step.
        identity: what a checkpoint records of the files, so that a resume refuses other data: hashes of small files and
            of sampled blocks of large ones (sampled), or of all bytes (full), which reads all data once more.
        follow: path is a folder that grows: wait for further files, in the order of their names. A file is read once a
            file _DONE.NAME stands beside it (marker), or once nothing has changed it for follow_age_s (age).
        follow_age_s: seconds without a change after which a file counts as complete; 0: files come whole, by a rename.
        stream_wait_s: if no batch of a stream comes for so long, the batches there are planned with a shorter window.
        stream_idle_s: end if nothing new comes for so long; 0: go on waiting.
        kafka_run: consecutive offsets that are read of a topic's partition before those of the next one.
        kafka_config: file of NAME=VALUE lines for the client of a topic (librdkafka's names), for example of TLS and
            SASL.
        until: time (ISO 8601, UTC without a zone) at which a stream ends: nothing that arrives later is read.
    """

    path: str = ""
    format: DataFormat = "synthetic"
    schema: str = ""
    batch_size: Annotated[int, at_least(1)] = 1024
    limit: Annotated[int, at_least(0)] = 0
    epochs: Annotated[int, at_least(1)] = 1
    eval_fraction: Annotated[float, Range("at least 0 and below 1", lambda value: 0 <= value < 1)] = 0.1
    eval_path: str = ""
    test_path: str = ""
    shuffle: bool = False
    shuffle_buffer: Annotated[int, at_least(0)] = 0
    bad_rows: BadRows = "stop"
    workers: Annotated[int, at_least(0)] = 1
    unlabelled: bool = False
    scored: bool = False
    min_uses: Annotated[int, Range("from 1 to 2**31 - 1", lambda value: 1 <= value < 2**31)] = 1
    min_uses_by_table: tuple[str, ...] = ()  # the values are a rule
    default_row: DefaultRow = "trained"
    use_counts: UseCounts = "exact"
    sketch_cells: Annotated[
        int, Range("a power of two up to 2**28", lambda value: value in {2**n for n in range(29)})
    ] = 1 << 20
    expire_after: Annotated[float, at_least(0)] = 0.0
    expire_after_by_table: tuple[str, ...] = ()  # the values are a rule
    expire_unit: ExpireUnit = "examples"
    expire_every: Annotated[int, at_least(1)] = 1000
    identity: FileHashes = "sampled"
    follow: Follow = "off"
    follow_age_s: Annotated[float, at_least(0)] = 30.0
    stream_wait_s: Annotated[float, ABOVE_0] = 1.0
    stream_idle_s: Annotated[float, at_least(0)] = 0.0
    kafka_run: Annotated[int, at_least(1)] = 1024
    kafka_config: str = ""
    until: Annotated[str, ISO_TIME] = ""

    @property
    def is_stream(self) -> bool:
        """The data can grow while it is read."""
        return self.follow != "off" or self.is_topic

    @property
    def expires(self) -> bool:
        """Rows of a table expire."""
        of_tables = (item.partition("=")[2].strip() for item in self.expire_after_by_table)
        return self.expire_after > 0 or not all(_is_zero(limit) for limit in of_tables)

    @property
    def is_topic(self) -> bool:
        """The data are the messages of a topic."""
        return self.path.startswith("kafka:")

    @property
    def has_evaluation(self) -> bool:
        """There are examples to evaluate with: held out, or in files of their own."""
        return bool(self.eval_fraction or self.eval_path)


def _is_zero(text: str) -> bool:
    try:
        return float(text) == 0
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class OracleConfig:
    """Lookahead and eviction.

    Attributes:
        lookahead: batches in the window, the current one included.
        policy: eviction policy; belady-window evicts the row whose next use is farthest, drop-unused every row without
            a use in the window.
        horizon: what orders rows without a use in the window: window: how often and how lately they were used; log:
            their next use in the whole log, from files of `convert --next-use`. Other files are planned by the window,
            with a message.
    """

    lookahead: Annotated[int, at_least(1)] = 32
    policy: Policy = "belady-window"
    horizon: Horizon = "window"


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The trainer's row cache.

    Attributes:
        rows: rows per rank, in slots of which a sixth more hold rows that are about to leave; 0 is direct mode: fetch a
            batch's rows, train, write all back; auto: as many as the window needs, growing with it up to max_rows.
        max_rows: most rows per rank with rows auto; 0: those of half of the memory that is free at the start, at most
            all rows of the tables.
        prefetch_depth: batches fetched from the store ahead of the one being trained.
        dtype: dtype of the rows' weights in the cache and the store; run: the same as run.dtype, or a table's own by
            its data_type in a model.factory. float16 and bfloat16 halve the weights, keep optimizer state in float32,
            and need run.dtype float32.
        rounding: how an updated weight is rounded to float16 or bfloat16; stochastic: up or down with probabilities
            that keep the mean; nearest: loses updates too small to change a weight.
    """

    rows: Annotated[IntOrAuto, at_least_or_auto(0)] = 100_000
    max_rows: Annotated[int, at_least(0)] = 0
    prefetch_depth: Annotated[int, at_least(1)] = 4
    dtype: Literal["run"] | RowDtype = "run"
    rounding: Rounding = "stochastic"

    @property
    def read_ahead(self) -> int:
        """Batches read and not yet trained: those fetched ahead, the one inserted and the one computed."""
        return self.prefetch_depth + 2


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """The embedding store.

    Attributes:
        url: redis://, rediss:// (TLS), redis+cluster://, unix:// or memory://; several servers separated by commas.
            Empty: a private embedded server.
        password_file: file with the password of the URL's user, for all its servers; other users must not be able to
            read it. Empty: the variable BAGPIPE_STORE_PASSWORD, if it is set.
        namespace: prefix of all keys.
        buckets: bucket hashes in a new namespace.
        timeout_s: deadline of one exchange with the store; a server that refuses it for the time being is asked again.
        durability: what acknowledged rows must survive: memory (nothing), everysec (the server's death and a power
            failure, but for the last second or two) or always (both). A server that promises less is refused.
        existing: rows of a job that this one does not resume: refuse them, train them on with a fresh dense part
            (rows-only), or delete them (reset).
        audit: read all rows before training. A bucket that differs from the checkpoint is loaded from its files; a job
            that goes on from rows without a checkpoint learns what its last check compares with.
        client: rows are sent and received in a thread of the training process, or by a process beside it.
    """

    url: str = ""
    password_file: str = ""
    namespace: Annotated[
        str, matching(r"[A-Za-z0-9_.:/@+=-]{1,200}", "1 to 200 letters, digits or any of _.:/@+=-")
    ] = "bagpipe"  # the rule of bagpipe.store.keys: braces mark the bucket
    buckets: Annotated[int, POWER_OF_TWO] = 64
    timeout_s: Annotated[float, ABOVE_0] = 30.0
    durability: Durability = "memory"
    existing: Literal["refuse", "rows-only", "reset"] = "refuse"
    audit: bool = False
    client: Literal["thread", "process"] = "thread"

    def __repr__(self) -> str:
        return redacted_repr(self)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        dir: folder of the checkpoints, on a file system that all ranks share; empty: none.
        every: steps between checkpoints; 0: only one, at the end, and the store logs all writes until then.
        resume: resume from the newest complete checkpoint (auto), from the one of a step, from that of the best
            evaluation (best), or start anew (never).
        keep: complete checkpoints to keep; older ones are removed.
        mirror: URL such as s3://bucket/jobs/a under which whole checkpoints are copied, as many as are kept. A job
            whose dir has no checkpoint resumes from there. Empty: none.
        full_every: checkpoints between those that hold all rows; the others hold the rows that changed.
        take_over: start although a job still runs on the folder; that job ends at its next checkpoint or write.
        change: keys whose values may differ from those of the checkpoint that is resumed, such as optim.dense_lr.
        start_from: what a new job takes rows and dense weights from: FOLDER, FOLDER@STEP or FOLDER@best of another
            job's checkpoints, a folder of torch.distributed.checkpoint, or a safetensors file (docs/daily.md). A job
            with a checkpoint of its own resumes that instead.
        start_without: what it does not take of it, by the names that it prints; * stands for any text.
    """

    dir: str = ""
    every: Annotated[int, at_least(0)] = 1000
    resume: Annotated[str, matching(r"auto|best|never|\d+", "auto, best, never or a step number")] = "auto"
    keep: Annotated[int, at_least(1)] = 2
    mirror: str = ""
    full_every: Annotated[int, at_least(1)] = 16
    take_over: bool = False
    change: tuple[str, ...] = ()  # its range is a rule
    start_from: str = ""
    start_without: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run.

    Attributes:
        seed: seed of initial values and of the data order.
        device: device of the trainer.
        dtype: dtype of parameters, optimizer state and losses.
        steps: stop after so many batches; 0: all.
        threads: compute threads of torch; fixed, because results depend on it.
        trace: write a Perfetto trace to this file.
        tensorboard: write TensorBoard scalars into this folder.
        log: append what the job reports to this file, as one JSON object a line (rank 0; docs/monitoring.md).
        log_format: lines on stdout: text, or json, one object a line. On a terminal, text is a progress bar.
        log_every_s: seconds between two lines about the progress of training.
        trackers: trackers of experiments that get the progress and the metrics, beside run.tensorboard.
        metrics: address of Prometheus metrics and /healthz, HOST:PORT; rank r of a host listens at PORT + r. Empty:
            none.
        dir: folder of the job's private files; empty: a temporary one.
        peer_timeout_s: deadline of one exchange between ranks; longer than any stall of a healthy rank.
        nonfinite: a batch with a NaN or infinite loss or gradient ends the job (stop), or is skipped on all ranks and
            counted (skip); either way it changes nothing that is stored.
        autocast: dtype of the dense part's matrix products: off (run.dtype), bfloat16 or float16. Parameters, optimizer
            state, rows, losses and evaluation stay float32.
        loss_scale: factor of the loss before the backward; gradients are divided by it. 0: 4096 with float16 (see
            `bagpipe.dense.precision`), else 1.
        loss_scale_growth_interval: double the loss scale after so many finite batches in a row (2000 in torch's
            GradScaler), halve it after a skipped batch; needs nonfinite = skip. 0: the scale is constant.
        kernels: kernels of the row operations: auto (Triton's on a CUDA device that supports them, else torch's), torch
            or triton. All sum in the same order.
        compile: compile the dense part with torch.compile; results differ from the uncompiled ones in rounding.
        cuda_graph: replay CUDA graphs of the dense part's forwards and backwards.
        strict: refuse a configuration file that holds a password and that other users can read, instead of a warning.
        verify: first batches of a pipeline to compute again by a serial reference and compare (docs/exactness.md).
        digest: read all rows of the store at the end, for embedding_digest and to compare the sums of rows
            (docs/store.md). false: the result has no embedding_digest.
    """

    # Stored as a signed 64-bit number.
    seed: Annotated[int, Range("from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63)] = 0
    device: Annotated[str, matching(r"cpu|cuda(:\d+)?", "cpu, cuda or cuda:N")] = "cpu"
    dtype: RunDtype = "float32"
    steps: Annotated[int, at_least(0)] = 0
    threads: Annotated[int, at_least(1)] = 1
    trace: str = ""
    tensorboard: str = ""
    log: str = ""
    log_format: Literal["text", "json"] = "text"
    log_every_s: Annotated[float, ABOVE_0] = 10.0
    trackers: Annotated[tuple[str, ...], each_of("mlflow", "wandb")] = ()
    metrics: Annotated[str, matching(r"|(\[[0-9a-fA-F:.]+\]|[^/\[\]:\s]+):\d{1,5}", "empty or HOST:PORT")] = ""
    dir: str = ""
    peer_timeout_s: Annotated[float, ABOVE_0] = 120.0
    nonfinite: NonFinite = "stop"
    kernels: Kernels = "auto"
    autocast: Autocast = "off"
    # As in bagpipe.dense.loss_scale.
    loss_scale: Annotated[
        int, Range("0 or a power of two up to 2**24", lambda value: value in {0, *(2**n for n in range(25))})
    ] = 0
    loss_scale_growth_interval: Annotated[int, at_least(0)] = 0
    compile: bool = False
    cuda_graph: bool = False
    strict: bool = False
    verify: Annotated[int, at_least(0)] = 0
    digest: bool = True


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections of a job's configuration."""

    data: DataConfig = field(default_factory=DataConfig)
    oracle: OracleConfig = field(default_factory=OracleConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    cacher: CacherConfig = field(default_factory=CacherConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def row_dtype(self) -> RowDtype:
        """`RowSchema.dtype`: dtype of the rows' weights."""
        return self.run.dtype if self.cache.dtype == "run" else self.cache.dtype

    @property
    def row_rounding(self) -> Rounding:
        """`RowSchema.rounding`: the configured one for half rows, nearest for others."""
        return self.cache.rounding if ROW_TYPES[self.row_dtype].is_half else "nearest"
