"""`Options`: the settings of a `TrainPipeline`, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bagpipe.embedding.table_dtypes import RowDtypes
from bagpipe.errors import InputError
from bagpipe.lookahead.select import PlannerChoice, check_planner
from bagpipe.util.redaction import redacted_repr

__all__ = ["Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a pipeline; `TrainPipeline` documents them.

    Raises:
        InputError: a value is out of range.
    """

    store: str | None
    namespace: str
    existing: Literal["refuse", "rows-only", "reset"]
    lookahead: int
    cache_rows: int | Literal["auto"]
    cache_max_rows: int
    prefetch_depth: int
    planner: PlannerChoice
    uneven: Literal["stop", "join"]
    unbounded: Collection[str]
    seed: int
    row_dtype: RowDtypes | None
    rounding: Literal["stochastic", "nearest"]
    nonfinite: Literal["stop", "skip"]
    accumulate: int
    sparse: Callable[[Any], Any] | None
    checkpoint_dir: str
    checkpoint_every: int
    keep: int
    resume: str
    start_from: str
    start_without: tuple[str, ...]
    take_over: bool
    durability: Literal["memory", "everysec", "always"]
    timeout_s: float
    peer_timeout_s: float

    def __post_init__(self) -> None:
        for name, least in (
            ("lookahead", 1),
            ("cache_rows", 0),
            ("cache_max_rows", 0),
            ("prefetch_depth", 1),
            ("accumulate", 1),
            ("checkpoint_every", 0),
            ("keep", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if name == "cache_rows" and value == "auto":
                continue
            if type(value) is not int or value < least:
                word = ", or auto" if name == "cache_rows" else ""
                raise InputError(f"{name} must be an integer of at least {least}{word}, got {value!r}")
        if self.cache_max_rows and self.cache_rows != "auto":
            raise InputError(f"cache_max_rows {self.cache_max_rows} needs cache_rows auto, got {self.cache_rows}")
        for name in ("timeout_s", "peer_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not value > 0:
                raise InputError(f"{name} must be a number of seconds above 0, got {value!r}")
        for name, known in (
            ("existing", ("refuse", "rows-only", "reset")),
            ("uneven", ("stop", "join")),
            ("rounding", ("stochastic", "nearest")),
            ("nonfinite", ("stop", "skip")),
            ("durability", ("memory", "everysec", "always")),
        ):
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        check_planner(self.planner)
        if self.sparse is not None and not callable(self.sparse):
            raise InputError(f"sparse must be a function of a batch, got {type(self.sparse).__name__}")
        if self.start_from and not self.checkpoint_dir:
            raise InputError(f"start_from {self.start_from} needs checkpoint_dir, the new job's folder")
        if self.start_without and not self.start_from:
            raise InputError(f"start_without {', '.join(self.start_without)} needs start_from, what is taken")
        if self.checkpoint_every and not self.checkpoint_dir:
            raise InputError("checkpoint_every needs checkpoint_dir, the folder of the checkpoints")

    def __repr__(self) -> str:
        return redacted_repr(self)

    def shared(self) -> dict[str, Any]:
        """Values that all ranks must have alike, JSON-able, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        own = ("store", "sparse", "planner", "checkpoint_dir", "start_from")  # one can have several names
        common = {name: value for name, value in values.items() if name not in own}
        is_given = {"has store": self.store is not None, "has checkpoint_dir": bool(self.checkpoint_dir)}
        alike = {
            "unbounded": sorted(self.unbounded),
            "start_without": list(self.start_without),
            "row_dtype": dict(self.row_dtype) if isinstance(self.row_dtype, Mapping) else self.row_dtype,
        }
        return {**common, **alike, **is_given}

    def in_folder(self, folder: str, *, is_open: bool) -> Options:
        """These options with checkpoints in a folder.

        Raises:
            InputError: there is another folder, or the pipeline is open without one.
        """
        if self.checkpoint_dir:
            if Path(self.checkpoint_dir).absolute() != Path(folder).absolute():
                raise InputError(f"checkpoints of this pipeline are in {self.checkpoint_dir}, got {folder}")
            return self
        if is_open:
            raise InputError(
                f"training has begun without checkpoints: give checkpoint_dir={folder!r} when the pipeline is made"
            )
        return dataclasses.replace(self, checkpoint_dir=folder)

    @property
    def read_ahead(self) -> int:
        """Batches read and not yet trained: those fetched ahead, the one inserted and the one computed."""
        return self.prefetch_depth + 2
