"""`TrainPipeline`: trains a user's model on batches of the user's own loader.

pipeline.progress(iterator)
  lanes of the engine, in threads:  read `lookahead` batches ahead, plan, fetch and insert rows, write rows back
  the caller's thread:              model(batch) ─> loss ─> backward ─> rows' step ─> dense optimizer's step
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from bagpipe.client.access import Cacher
from bagpipe.distributed.membership import Membership
from bagpipe.errors import InputError
from bagpipe.jobs.evaluation import buffers_of_rank_0
from bagpipe.optim import RowOptimizers
from bagpipe.train_pipeline.batch_ids import BatchIds
from bagpipe.train_pipeline.device import checked_device, device_of_rank
from bagpipe.train_pipeline.error_texts import speaks_arguments
from bagpipe.train_pipeline.evaluation import evaluate
from bagpipe.train_pipeline.export import export
from bagpipe.train_pipeline.loading import RowLoading
from bagpipe.train_pipeline.model_checks import check_model
from bagpipe.train_pipeline.model_parts import model_parts
from bagpipe.train_pipeline.model_snapshot import unchanged_on_error
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.outputs import Outputs, iterable, trained
from bagpipe.train_pipeline.rows import TableRows
from bagpipe.train_pipeline.saved_state import SavedState
from bagpipe.train_pipeline.session import Session
from bagpipe.train_pipeline.torchrec_calls import TorchrecCalls, TorchrecKeywords, check_keywords
from bagpipe.train_pipeline.user_batches import UserBatches

__all__ = ["TrainPipeline"]


@speaks_arguments
class TrainPipeline(RowLoading, TorchrecCalls):
    """Trains a model with torchrec embedding collections, whose rows live in a remote store and a cache.

    The class takes the place of torchrec's train pipelines: ``out = pipeline.progress(iterator)`` trains one batch and
    returns what the model returned beside the loss. Results are bit-identical for every cache, lookahead, store and
    planner. Resources are opened by the first call that needs them; `close`, or leaving ``with``, releases them.
    Signals are handled between two calls, so an interrupted pipeline goes on.

    Args:
        model: called as ``model(batch)``, returns ``(loss, outputs)``; the loss is a scalar, or a vector to be summed.
            Its collections (`EmbeddingBagCollection`, `EmbeddingCollection`) are replaced in place. Build them on the
            meta device; the dense parameters may be on any device.
        optimizer: of the dense parameters, or a function that makes it of them. Embedding weights in it are left out.
        device: of the model. With several ranks "cuda" is cuda:LOCAL_RANK.
        rows: row optimizer (`bagpipe.optim`), or one by table name. None: that of `apply_optimizer_in_backward`.
        store: redis:, rediss:, redis+cluster:, unix: or memory: URL. None: a private server that ends with it.
        namespace: prefix of all keys in the store.
        existing: rows of an earlier job in the namespace: refuse, train them on (rows-only), or delete them (reset).
        lookahead: batches that the planner sees; as many are read ahead of the iterator, and held.
        cache_rows: rows in the cache of each rank. 0: no cache; auto: as many as the window needs.
        cache_max_rows: most rows with auto; 0: as many as half of the free memory holds.
        prefetch_depth: batches whose rows are fetched ahead.
        planner: ``process``, of its own; ``inline``, for debugging; or a cacher: its address, or a `bagpipe.Cacher`.
        uneven: if the iterator of a rank ends early, all ranks stop there, or that rank joins with empty batches.
        unbounded: names of tables that take any 64-bit id, whatever their `num_embeddings`; ``"*"``: all.
        seed: of the initial rows.
        row_dtype: of the rows' weights, one or by table name; None: `data_type` of the configs, FP32 as dense weights.
        rounding: of updated weights to float16 or bfloat16.
        nonfinite: a batch whose loss or gradient is not finite raises (stop), or is left out (skip).
        grad_scaler: scales losses by powers of two; hooks and steps see unscaled gradients. `nonfinite` is skip then.
        accumulate: batches of the iterator that make one optimizer step; `lookahead` and `prefetch_depth` count steps.
        sparse: gives the KeyedJaggedTensors of a batch; None: they are searched for in it.
        checkpoint_dir: folder of the checkpoints, on a file system of all ranks; None: none.
        checkpoint_every: steps between checkpoints; 0: only `save` and the end of an iterator make them.
        keep: complete checkpoints to keep.
        resume: resume from the newest checkpoint (auto), from that of a step, or start anew (never).
        start_from: checkpoints of another job (FOLDER[@STEP]) or a model's files: what a new job begins with.
        start_without: what it does not take, by the names in the table on stderr; * stands for any text.
        take_over: start although a job still runs on the folder; that job ends at its next checkpoint or write.
        durability: what acknowledged rows must survive: memory, everysec or always; see docs/store.md.
        timeout_s: deadline of one exchange with the store.
        peer_timeout_s: deadline of one exchange between ranks.
        import_weights: collections on a real device give their weights as initial rows; see `load_rows`.
        torchrec: keywords of torchrec's pipelines, with the values that mean what happens here.

    Attributes:
        model: the model.
        optimizer: of its dense parameters.

    Raises:
        InputError: an argument cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
        device: torch.device | str = "cpu",
        *,
        rows: RowOptimizers | None = None,
        store: str | None = None,
        namespace: str = "bagpipe",
        existing: Literal["refuse", "rows-only", "reset"] = "refuse",
        lookahead: int = 64,
        cache_rows: int | Literal["auto"] = 100_000,
        cache_max_rows: int = 0,
        prefetch_depth: int = 4,
        planner: Literal["process", "inline"] | str | Cacher = "process",
        uneven: Literal["stop", "join"] = "stop",
        unbounded: Collection[str] = (),
        seed: int = 0,
        row_dtype: str | Mapping[str, str] | None = None,
        rounding: Literal["stochastic", "nearest"] = "stochastic",
        nonfinite: Literal["stop", "skip"] = "stop",
        grad_scaler: GradScaler | None = None,
        accumulate: int = 1,
        sparse: Callable[[Any], Any] | None = None,
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int = 0,
        keep: int = 2,
        resume: str = "auto",
        start_from: str | Path | None = None,
        start_without: Collection[str] = (),
        take_over: bool = False,
        durability: Literal["memory", "everysec", "always"] = "memory",
        timeout_s: float = 30.0,
        peer_timeout_s: float = 120.0,
        import_weights: bool = False,
        **torchrec: Unpack[TorchrecKeywords],
    ) -> None:
        check_keywords(torchrec)
        device = checked_device(device)
        if device.type == "cuda":
            device = device_of_rank(device, Membership.from_environment())
        self._options = Options(
            store=store,
            namespace=namespace,
            existing=existing,
            lookahead=lookahead,
            cache_rows=cache_rows,
            cache_max_rows=cache_max_rows,
            prefetch_depth=prefetch_depth,
            planner=planner,
            uneven=uneven,
            unbounded=(unbounded,) if isinstance(unbounded, str) else tuple(unbounded),
            seed=seed,
            row_dtype=row_dtype,
            rounding=rounding,
            nonfinite=nonfinite,
            accumulate=accumulate,
            sparse=sparse,
            checkpoint_dir=str(checkpoint_dir or ""),
            checkpoint_every=checkpoint_every,
            keep=keep,
            resume=resume,
            start_from=str(start_from or ""),
            start_without=tuple(start_without),
            take_over=take_over,
            durability=durability,
            timeout_s=timeout_s,
            peer_timeout_s=peer_timeout_s,
        )
        check_model(model)
        with unchanged_on_error(model, optimizer, device):
            self._parts = model_parts(
                model, optimizer, device, rows, self._options, grad_scaler, import_weights=import_weights
            )
            self._session = Session(self._parts, self._options, owner=self)
        self._table_names = [table.name for table in self._parts.rows.tables]

    # ---- training ------------------------------------------------------------------------------------------------

    def progress(self, iterator: Iterator[Any]) -> Any:
        """Train the next batch.

        Args:
            iterator: of the user's batches; read `lookahead` batches ahead, and more by `prefetch_depth`. Its batches
                must not change once yielded.

        Returns:
            What the model returned beside the loss; None if other ranks have examples of the batch, but not this one.

        Raises:
            StopIteration: the iterator has ended. All its batches are trained, and the store has all rows.
            InputError: a batch cannot be used; or `iterator` is not the one under way.
            Exception: of the model, its optimizer or the iterator, as it was raised. An error of the iterator comes
                after its batches before are trained; the pipeline can go on with another iterator.
            JobError, StoreError, PeerError: training cannot go on.
        """
        if not callable(getattr(iterator, "__next__", None)):
            raise InputError(f"progress needs an iterator, such as iter(loader), got {type(iterator).__name__}")
        outputs, has_ended = self._session.step_on(iterator)
        if has_ended:
            raise StopIteration
        return outputs

    def train(self, loader: Iterable[Any] | None = None) -> Outputs:
        """Train all batches of a loader; yields what the model returns beside the loss, batch by batch.

        A batch is trained when its outputs are asked for: iterate over them. A RuntimeWarning says if nobody does.

        A job of several epochs loops over those that are left: ``for epoch in range(pipeline.epoch, num_epochs): …``.
        After a resume the first loader goes on where the checkpoint was made: a stateful loader (``state_dict``,
        ``load_state_dict``) by its state, another one by leaving out the batches before. Leaving the loop early makes
        room for another loader. Raises as `progress`, but for StopIteration.

        Args:
            loader: any iterable of batches.
        """
        return Outputs(trained(self._session, iterable(loader, "train")), "train", self._table_names, self)

    def reset(self) -> None:
        """Give up the iterator under way. The batches read ahead of it are dropped; updated rows are written."""
        self._session.reset()

    @property
    def loss(self) -> Tensor | None:
        """Loss of the latest batch, a scalar without history; None before the first."""
        return self._parts.executor.loss

    @property
    def step(self) -> int:
        """Steps: batches trained, `accumulate` at a time, over all iterators and starts of the job."""
        return self._session.current_position().step

    @property
    def epoch(self) -> int:
        """Iterators that have ended, over all starts of the job."""
        return self._session.current_position().epoch

    @property
    def position(self) -> int:
        """Batches of the current iterator that are trained. After a resume: those that an iterator must leave out."""
        return self._session.current_position().taken

    # ---- between batches -----------------------------------------------------------------------------------------

    def evaluate(self, loader: Iterable[Any]) -> Outputs:
        """Score the batches of a loader, without gradients; yields what the model returns beside the loss.

        As many outputs as batches. A batch is scored when its outputs are asked for.

        Rows, dense part, random state and cache of the training stay as they are, bit for bit. Rows that were never
        trained have their initial values.

        Args:
            loader: any iterable of batches.

        Raises:
            Exception: of the loader or the model, as it was raised.
        """
        found = iterable(loader, "evaluate")
        batches = UserBatches(BatchIds(self._parts.features, self._options.sparse), self._parts.device)
        outputs = self._session.evaluating(
            lambda opened, check: evaluate(opened, self._parts, self._options, batches, found, check)
        )
        return Outputs(outputs, "evaluate", self._table_names, self)

    def flush(self) -> None:
        """Write all updated rows to the store; they stay in the cache. Training goes on afterwards."""
        self._session.flush()

    def rows(self, table: str) -> TableRows:
        """The rows of a table, as the store has them: ``pipeline.rows("item")[ids]``.

        Raises:
            InputError: the model has no such table.
        """
        if table not in self._table_names:
            raise InputError(f"expected one of the tables {self._table_names}, got {table!r}")
        return TableRows(self._session, self._table_names.index(table), self)

    def dense_state_dict(self) -> dict[str, Tensor]:
        """Copies of the model's weights and buffers by its own names, on its device, without embedding weights.

        With several ranks all of them call it while training is under way, and the buffers are those of rank 0.
        """
        with buffers_of_rank_0(self.model, self._session.replicas):
            return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def export(
        self, folder: str | Path, format: Literal["safetensors", "dcp"] = "safetensors", *, max_gib: float = 16.0
    ) -> None:
        """Write weights and optimizer state for other programs; training goes on. By all ranks alike; rank 0 writes.

        Names are those of the model with plain torchrec collections, ``<collection>.embedding_bags.<table>.weight``
        ``[num_embeddings, dim]``, so that its ``load_state_dict`` takes the weights. Rows never trained have their
        initial values. A table without bound has ``.ids`` int64 ``[n]`` beside ``.weight`` ``[n, dim]``.

        Args:
            folder: new, or empty. ``model.safetensors``, ``optimizer.safetensors`` and ``manifest.json``, or a folder
                of `torch.distributed.checkpoint` with keys ``model.…`` and ``optimizer.…``.
            format: of the files.
            max_gib: limit on a table with its optimizer state in memory; with dcp on all of them.

        Raises:
            InputError: the folder cannot be written, or the tables are larger.
            StoreError: the store failed.
        """
        max_bytes = int(max_gib * 2**30)
        with self._session.resting("export") as job:
            export(job, self._parts, Path(folder), file_format=format, max_bytes=max_bytes, step=self.step)

    # ---- state ---------------------------------------------------------------------------------------------------

    def save(self, folder: str | None = None) -> None:
        """Make a checkpoint of the batches trained so far; training goes on.

        It holds model, optimizer, rows, random state, and the position of the loader. A later pipeline with the same
        `checkpoint_dir` resumes from it, whatever happens to this one and to the store.

        Args:
            folder: of the checkpoints; None: `checkpoint_dir`. Must be named before the first batch.

        Raises:
            InputError: there is no folder, or it is another one than before.
            JobError, StoreError: the checkpoint could not be made.
        """
        if folder is not None:
            self._session.use_folder(folder)
        elif not self._session.has_folder:
            raise InputError("save needs a folder, or checkpoint_dir when the pipeline is made")
        self._session.checkpoint()

    def restore(self, folder: str) -> int:
        """Resume from the newest checkpoint of a folder, and make further ones there. Before the first batch.

        Returns:
            Batches that it has trained.

        Raises:
            InputError: the folder has no checkpoint of a trained batch, or one of another model or rank count.
        """
        self._session.use_folder(folder)
        self._session.opened()
        if not self.step:
            raise InputError(f"{folder} holds no checkpoint of a trained batch")
        return self.step

    def track(self, name: str, tracked: Any) -> None:
        """Keep the state of an object, such as a learning-rate scheduler, in checkpoints. A resume gives it back.

        Args:
            name: its name in checkpoints.
            tracked: has ``state_dict`` and ``load_state_dict``; tensors and plain Python values.
        """
        self._session.track(name, tracked)

    def state_dict(self) -> dict[str, Any]:
        """Dense part, optimizer, random state and position. The rows stay in the store, which is made current.

        For a program that keeps states its own way, with a durable store. `save` makes whole checkpoints.
        """
        self._session.flush("state_dict")
        return {
            "model": self.dense_state_dict(),
            **self._session.optimizer_state(),
            "random": torch.get_rng_state(),
            "step": self.step,
            "session": self._session.state().to_saved(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. The store's rows must be those of that time (``existing="rows-only"``).

        Raises:
            InputError: batches of an iterator are under way, or the state is not of this model.
        """
        self._session.go_to(SavedState.from_saved(state["session"], state["step"]))
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise InputError(f"the state is not one of this model: {' '.join(str(error).split())}") from None
        self._session.load_optimizer(state)
        torch.set_rng_state(state["random"])

    # ---- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Write all updated rows, and release everything. Batches read ahead are dropped. Idempotent."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.close(error)
