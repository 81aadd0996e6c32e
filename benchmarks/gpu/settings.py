"""Sizes of the benchmark, one flag each. `--rehearse` sets tiny sizes and the CPU as device."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self

from bagpipe.errors import InputError
from data.synthetic import BLOCK_ROWS

__all__ = ["PARTS", "REHEARSAL", "Settings", "add_flags"]

PARTS = ("kernels", "steps", "feed", "trace")
ROW_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def _size(default: int | float | str, text: str) -> Any:
    return field(default=default, metadata={"help": text})


def _list(default: tuple[int, ...] | tuple[str, ...], text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes; the help texts describe them."""

    device: str = _size("cuda:0", "as torch names it")
    parts: tuple[str, ...] = _list(PARTS, "what to measure")
    kernel_dims: tuple[int, ...] = _list((16, 32, 48, 64, 128, 256), "weights per row")
    kernel_optimizers: tuple[str, ...] = _list(("sgd", "adagrad"), "row optimizers of the kernels' part")
    kernel_rows: int = _size(1_000_000, "rows of the one table of the kernels' part")
    kernel_ids: int = _size(425_984, "ids a batch there: 26 tables of 16,384 examples")
    kernel_bag: int = _size(8, "ids a bag in its multi-hot batches")
    kernel_zipf: float = _size(1.05, "exponent of its skewed batches")
    kernel_repeats: int = _size(20, "times each is timed")
    copy_mib: int = _size(1024, "buffer whose copying gives the bandwidth")
    batch_size: int = _size(16_384, "examples a batch")
    dim: int = _size(48, "weights per row")
    bottom_mlp: tuple[int, ...] = _list((512, 256, 64), "widths between the dense input and --dim")
    top_mlp: tuple[int, ...] = _list((1024, 1024, 1024, 256, 128), "widths between interaction and logit")
    rows_optimizer: str = _size("sgd", "row optimizer of the steps")
    table_scale: int = _size(1, "Criteo Kaggle's larger tables are divided by this")
    cache_share: float = _size(0.10, "cache rows, as a share of all rows")
    lookahead: int = _size(200, "batches the oracle sees")
    prefetch_depth: int = _size(8, "batches fetched ahead")
    read_ahead: int = _size(12, "batches read and not trained yet, at most")
    warmup_steps: int = _size(250, "steps before anything is timed: until the cache is full and evicts")
    measured_steps: int = _size(60, "steps timed")
    servers: tuple[int, ...] = _list((1, 2, 4), "numbers of store servers on this host")
    seed: int = _size(1, "of data and initial values")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """From the command line. InputError: a size is not positive, or a name is unknown."""
        values: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            value = getattr(options, item.name)
            values[item.name] = tuple(value) if isinstance(value, list) else value
        settings = cls(**values)
        _check(settings)
        return settings

    @property
    def num_steps(self) -> int:
        """Steps of a cached run. The last ones are not timed: lanes that look ahead have no work left."""
        return self.warmup_steps + self.measured_steps + self.read_ahead


REHEARSAL: dict[str, Any] = {
    "device": "cpu",
    "kernel_dims": (16, 48),
    "kernel_optimizers": ("adagrad",),
    "kernel_rows": 2_000,
    "kernel_ids": 4_096,
    "kernel_repeats": 2,
    "copy_mib": 1,
    "batch_size": 256,
    "dim": 16,
    "bottom_mlp": (32,),
    "top_mlp": (32,),
    "table_scale": 1000,
    "lookahead": 8,
    "warmup_steps": 20,
    "measured_steps": 12,
    "servers": (1, 2),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag per size."""
    for item in dataclasses.fields(Settings):
        kind = type(item.default[0]) if isinstance(item.default, tuple) else type(item.default)
        many = {"nargs": "+"} if isinstance(item.default, tuple) else {}
        flag = f"--{item.name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=item.default, help=item.metadata.get("help", ""), **many)  # type: ignore[arg-type]


def _check(settings: Settings) -> None:
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        numbers = value if isinstance(value, tuple) else (value,)
        if item.name != "seed" and any(isinstance(number, (int, float)) and number <= 0 for number in numbers):
            raise InputError(f"--{item.name.replace('_', '-')} must be above 0, got {value}")
    if settings.batch_size > BLOCK_ROWS:
        raise InputError(
            f"--batch-size must be at most {BLOCK_ROWS}, a block of synthetic data, got {settings.batch_size}"
        )
    for names, known, flag in (
        (settings.parts, PARTS, "--parts"),
        (settings.kernel_optimizers, ROW_OPTIMIZERS, "--kernel-optimizers"),
        ((settings.rows_optimizer,), ROW_OPTIMIZERS, "--rows-optimizer"),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise InputError(f"{flag}: expected names among {', '.join(known)}, got {unknown[0]!r}")
