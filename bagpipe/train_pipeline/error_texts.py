"""Texts of errors in the words of `TrainPipeline`: its arguments in place of configuration keys.

    "set store.existing to reset (delete them), or use another store.namespace"
    ──in_arguments──> "set existing to reset (delete them), or use another namespace"

Parts that the training program uses too raise errors in its words. Errors change here, where they leave a pipeline.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from bagpipe.errors import InputError, JobError, StoreError

__all__ = ["ARGUMENTS", "PHRASES", "in_arguments", "speaks_arguments", "text_in_arguments"]

_Class = TypeVar("_Class", bound=type)

#: Configuration key -> argument, or words where there is none.
ARGUMENTS: Mapping[str, str] = {
    "cache.max_rows": "cache_max_rows",
    "cache.rows": "cache_rows",
    "cacher.assign": "the assignment of examples",
    "cacher.secret_file": "secret_file of the cacher",
    "cacher.tls_ca": "tls_ca of the cacher",
    "cacher.tls_cert": "tls_cert of the cacher",
    "cacher.tls_key": "tls_key of the cacher",
    "cacher.url": "planner",
    "checkpoint.dir": "checkpoint_dir",
    "checkpoint.mirror": "the mirror of checkpoints",
    "checkpoint.resume": "resume",
    "checkpoint.start_from": "start_from",
    "checkpoint.start_without": "start_without",
    "checkpoint.take_over": "take_over",
    "data.batch_size": "the size of the batches",
    "data.default_row": "the default row",
    "data.expire_after": "the age at which rows expire",
    "data.expire_after_by_table": "the ages at which rows expire",
    "data.min_uses": "the least uses of a row",
    "data.min_uses_by_table": "the least uses of rows by table",
    "dense.shard": "the division of the dense part",
    "dense.wrap": "the units of that division",
    "eval.patience": "the patience",
    "optim.dense": "the dense optimizer",
    "optim.ema_decay": "the decay of averages",
    "optim.kfac_lag": "the lag of the preconditioner",
    "optim.rows": "rows",
    "optim.rows_schedule": "the schedule of rows",
    "optim.schedule": "the schedule",
    "optim.schedule_unit": "the unit of the schedule",
    "oracle.horizon": "the horizon of the planner",
    "oracle.lookahead": "lookahead",
    "oracle.policy": "the eviction policy",
    "pipeline.backward_shares": "the partial backward",
    "pipeline.microbatches": "the number of micro-batches",
    "pipeline.recompute": "the recomputation",
    "pipeline.recompute_share": "the share of recomputation",
    "pipeline.rows_delay": "the delay of rows",
    "pipeline.schedule": "the schedule of stages",
    "run.autocast": "the dtype of autocast",
    "run.device": "device",
    "run.dir": "folder",
    "run.kernels": "the choice of kernels",
    "run.loss_scale": "a loss scale",
    "run.loss_scale_growth_interval": "the growth of a loss scale",
    "run.nonfinite": "nonfinite",
    "run.peer_timeout_s": "peer_timeout_s",
    "run.seed": "seed",
    "store.buckets": "the number of buckets",
    "store.client": "the client of the store",
    "store.durability": "durability",
    "store.existing": "existing",
    "store.namespace": "namespace",
    "store.timeout_s": "timeout_s",
    "store.url": "store",
}

#: Other words -> words for a program of the user's.
PHRASES: Mapping[str, str] = {
    "(hash them in the data schema, not in the model)": (
        "(make them before the model, or let sparse=function give the KeyedJaggedTensors that the collections get)"
    ),
    ", and the password in store.password_file or BAGPIPE_STORE_PASSWORD": "",
    "store.url, store.password_file or BAGPIPE_STORE_PASSWORD": "store.url",
    "--out": "folder",
    "--max-gib ": "max_gib=",
}

_SPECIAL = ("__init__", "__exit__", "__getitem__", "__iter__", "__len__", "__next__")
_VALUES = {"true": "True", "false": "False"}
_KEY = re.compile(rf"(?<![\w./])({'|'.join(map(re.escape, ARGUMENTS))})(?![\w/]|\.\w)(?: ?= ?([a-z][\w-]*))?")
_PHRASE = re.compile("|".join(map(re.escape, PHRASES)))
_TABLE = re.compile(r"\btable number (\d+)")


def text_in_arguments(text: str, tables: Sequence[str] = ()) -> str:
    """A text with arguments in place of configuration keys, and names in place of table numbers.

    Args:
        text: of an error.
        tables: names of the tables, by number.
    """
    text = _KEY.sub(_argument, _PHRASE.sub(lambda found: PHRASES[found[0]], text))
    return _TABLE.sub(
        lambda found: f"table {tables[int(found[1])]!r}" if int(found[1]) < len(tables) else found[0], text
    )


def in_arguments(error: BaseException | None, tables: Sequence[str] = ()) -> None:
    """Change the text of an error of this library, and of its causes, in place. Others stay as they are."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (InputError, JobError, StoreError)):
            error.args = tuple(text_in_arguments(arg, tables) if isinstance(arg, str) else arg for arg in error.args)
        error = error.__cause__


def speaks_arguments(cls: _Class) -> _Class:
    """Class decorator: errors leave the public methods of a class in the words of its arguments.

    A property ``_table_names`` of the instances gives the names of the tables, if there is one.
    """
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and (not name.startswith("_") or name in _SPECIAL):
            wrap = _generator if inspect.isgeneratorfunction(value) else _function
            setattr(cls, name, wrap(value))
    return cls


def _argument(found: re.Match[str]) -> str:
    argument, value = ARGUMENTS[found[1]], found[2]
    if value is None:
        return argument
    return f"{argument}={_VALUES[value]}" if value in _VALUES else f'{argument}="{value}"'


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        try:
            return method(self, *args, **more)
        except Exception as error:
            in_arguments(error, getattr(self, "_table_names", ()))
            raise

    return call


def _generator(method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **more: Any) -> Iterator[Any]:
        try:
            yield from method(self, *args, **more)
        except Exception as error:
            in_arguments(error, getattr(self, "_table_names", ()))
            raise

    return call
