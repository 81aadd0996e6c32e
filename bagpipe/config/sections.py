"""The configuration of a job: typed sections, one dataclass each. `config_cli` reads them from a TOML file and flags.

Every default that is a number says where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bagpipe.types.schema import ROW_TYPES

__all__ = [
    "CacheConfig",
    "CacherConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "OracleConfig",
    "PipelineConfig",
    "RunConfig",
    "StoreConfig",
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on.

    Attributes:
        path: file or folder; not used by the synthetic format.
        format: avazu-csv, criteo-tsv, movielens, parquet or synthetic.
        schema: TOML file that names the columns (parquet, synthetic) or overrides tables (other formats).
        batch_size: examples in a global batch.
        limit: use only the first so many examples (before the evaluation split); 0: all.
        epochs: passes over the training examples.
        eval_fraction: share of the examples, taken from the end, held out for evaluation.
        shuffle: visit blocks, and examples inside a block, in an order drawn from (run.seed, epoch).
        bad_rows: stop at a malformed row, or skip and count it.
        workers: parser processes.
    """

    path: str = ""
    format: str = "synthetic"
    schema: str = ""
    batch_size: int = 1024
    limit: int = 0
    epochs: int = 1
    eval_fraction: float = 0.1
    shuffle: bool = False
    bad_rows: str = "stop"
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class OracleConfig:
    """How far ahead to look, and what to evict.

    Attributes:
        lookahead: batches in the window, the current one included.
        policy: belady-window or drop-unused.
    """

    lookahead: int = 32
    policy: str = "belady-window"


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The trainer's row cache.

    Attributes:
        rows: rows per rank; 0 is direct mode: fetch a batch's rows, train, write all back.
        prefetch_depth: batches fetched from the store ahead of the one being trained.
        dtype: number type of the rows' weights, in the cache and the store; run: the same as run.dtype. float16 and
            bfloat16 halve them, beside optimizer state in float32, and need run.dtype float32.
        rounding: how an updated weight becomes float16 or bfloat16 again; stochastic: up or down, at odds that keep the
            mean; nearest: updates too small to change a weight are lost.
    """

    rows: int = 100_000
    prefetch_depth: int = 4
    dtype: str = "run"
    rounding: str = "stochastic"

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
        namespace: prefix of all keys.
        buckets: bucket hashes in a new namespace, a power of two.
        timeout_s: deadline of one exchange with the store.
        durability: what acknowledged rows must survive: memory (nothing), everysec (the server's death; not the last
            second before a power failure) or always (both). A server that promises less is refused.
    """

    url: str = ""
    namespace: str = "bagpipe"
    buckets: int = 64
    timeout_s: float = 30.0
    durability: str = "memory"


@dataclass(frozen=True, kw_only=True)
class CacherConfig:
    """The Oracle Cacher.

    Attributes:
        url: address of a running cacher, unix:PATH, HOST:PORT (also grpc://) or grpcs://HOST:PORT (TLS); empty: the
            job starts one for itself.
        assign: how examples are assigned to ranks: contiguous, or locality (where their rows were used last).
        secret_file: file with the secret shared with a cacher that listens on a network.
        tls_ca: file with the certificate authority that signed a grpcs:// cacher's certificate; empty: the system's.
        tls_cert: file with this side's certificate, where the cacher asks for one.
        tls_key: file with its key.
        timeout_s: deadline for reaching a cacher, and for reaching it again after a lost connection.
    """

    url: str = ""
    assign: str = "contiguous"
    secret_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model.

    Attributes:
        name: dlrm, dcnv2, deepfm, wide-deep or towers.
        embedding_dim: weights per row, where the schema does not say.
        bottom_mlp: widths of the dense (bottom) tower.
        top_mlp: widths of the top tower, before the final logit.
        factory: "module:function" returning a model of the user's own; overrides name.
    """

    name: str = "dlrm"
    embedding_dim: int = 16
    bottom_mlp: tuple[int, ...] = (64, 32)
    top_mlp: tuple[int, ...] = (128, 64)
    factory: str = ""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizers.

    Attributes:
        rows: row optimizer: sgd, adagrad, rowwise_adagrad or adam.
        rows_lr: its learning rate.
        dense: dense optimizer: sgd, adagrad or adam.
        dense_lr: its learning rate.
        eps: epsilon of both (torch's and FBGEMM's defaults differ, so it is always explicit).
    """

    rows: str = "adagrad"
    rows_lr: float = 0.02
    dense: str = "adagrad"
    dense_lr: float = 0.02
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """The dense pipeline. A job of one process runs all its stages; with more, the ranks are replicas of the pipeline.

    Attributes:
        schedule: none (one stage), the name of a schedule (`python -m bagpipe schedule` lists them), or a .csv table of
            torch.distributed.pipelining.
        stages: dense stages.
        microbatches: micro-batches per batch.
        chunks: stages per pipeline rank; 0: the schedule's own number.
        partition: which operators make up which stage: auto, or "module=stage,…" with names of modules of the model.
        recompute: keep only the inputs of a stage's forward, and compute its activations again before its backward.
    """

    schedule: str = "none"
    stages: int = 1
    microbatches: int = 1
    chunks: int = 0
    partition: str = "auto"
    recompute: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        dir: folder of the checkpoints, on a file system that all ranks share; empty: none.
        every: steps between checkpoints; 0: only one, at the end, and the store logs what is written until then.
        resume: go on from the newest whole checkpoint (auto), from the one at a step, or begin anew (never).
        keep: whole checkpoints kept; older ones are removed.
        full_every: checkpoints between those that hold all rows; the others hold the rows that changed.
    """

    dir: str = ""
    every: int = 1000
    resume: str = "auto"
    keep: int = 2
    full_every: int = 16


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run.

    Attributes:
        seed: seed of initial values and of the data order.
        device: cpu, cuda or cuda:N.
        dtype: float32 or float64.
        steps: stop after so many batches; 0: all.
        threads: compute threads of torch; fixed, because results depend on it.
        trace: write a Perfetto-readable trace here.
        tensorboard: write TensorBoard scalars into this folder.
        dir: folder of the job's private files; empty: a temporary one.
        peer_timeout_s: deadline of one exchange between ranks; longer than any honest stall of one of them.
        nonfinite: a batch whose loss or a gradient is NaN or infinite ends the job (stop), or is left out on all ranks
            and counted (skip); either way it changes nothing that is stored.
        autocast: dtype of the dense part's matrix products: off (run.dtype), bfloat16 or float16. Parameters, optimizer
            state, rows and losses stay float32, and evaluation is done in it.
        loss_scale: what the loss is multiplied by before the backward, and gradients are divided by after it; 0: 4096
            with float16 (see `bagpipe.dense.precision`), else 1.
        loss_scale_growth_interval: the scale begins at loss_scale, is doubled after so many finite batches in a row
            (2000 in torch's GradScaler), and halved by one that is left out; needs nonfinite = skip. 0: it stays.
        kernels: what computes on rows: auto (Triton's kernels on a CUDA device that has them, else torch's operations),
            torch or triton. The order of a row's sums is the same.
        compile: compile the dense part with torch.compile; results differ from those without in rounding.
        cuda_graph: replay a CUDA graph of the dense part's forward and backward (not with stages).
    """

    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    steps: int = 0
    threads: int = 1
    trace: str = ""
    tensorboard: str = ""
    dir: str = ""
    peer_timeout_s: float = 120.0
    nonfinite: str = "stop"
    kernels: str = "auto"
    autocast: str = "off"
    loss_scale: int = 0
    loss_scale_growth_interval: int = 0
    compile: bool = False
    cuda_graph: bool = False


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
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def row_dtype(self) -> str:
        """Of the rows' weights: `RowSchema.dtype`."""
        return self.run.dtype if self.cache.dtype == "run" else self.cache.dtype

    @property
    def row_rounding(self) -> str:
        """`RowSchema.rounding`. It is chosen for half rows alone: there is none of others."""
        return self.cache.rounding if ROW_TYPES[self.row_dtype].is_half else "nearest"
