"""Checks what a job that brings its own batches sends: the only place where such bytes become records. Pure.

START ──parse_spec──> OracleSpec, of a planner that fits the memory allowed
BATCH ──CheckedIntake.batch──> Batch that the planner can index, in order, of a window that fits too
"""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from bagpipe.client.codec import CodecError
from bagpipe.errors import InputError
from bagpipe.lookahead.ids import decode_ids
from bagpipe.lookahead.planning import Planned
from bagpipe.lookahead.protocol import Intake
from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.handles import dense_sizes
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.sizing import BYTES_PER_SLOT
from bagpipe.oracle.spec_check import check_spec
from bagpipe.oracle.window import RankCounts
from bagpipe.types.batch import Batch
from cacher.counters import Counters
from cacher.requests import MAX_RANKS, json_object

__all__ = ["MAX_FEATURES", "CheckedIntake", "batch_bytes", "parse_spec", "planner_bytes"]

#: Features and tables of a job, and batches in a window. More are errors or attacks.
MAX_FEATURES = 1 << 14
_MAX_LOOKAHEAD = 1 << 20
_MAX_SPEC_BYTES = 8 << 20
#: Occurrences are numbered by int32.
_MAX_OCCURRENCES = (1 << 31) - 1

#: Memory of a planner: in all, and for each row of tables that `dense_sizes` numbers.
_BASE_BYTES, _BYTES_PER_ROW = 32 << 20, 16
#: Memory of a batch in the window: in all, for each rank, for each table of each rank, for each occurrence.
_BYTES_PER_BATCH, _BYTES_PER_RANK, _BYTES_PER_TABLE, _BYTES_PER_OCCURRENCE = 4096, 2048, 16, 144


class CheckedIntake(Intake):
    """An intake that trusts nothing.

    Args:
        start: data of a START frame.
        max_bytes: memory that the planner of the run and its window may take.
        counters: totals for the metrics.

    Raises:
        InputError: the spec is none, or needs more memory.
    """

    def __init__(self, start: bytearray, *, max_bytes: int, counters: Counters) -> None:
        self.spec = parse_spec(start, max_bytes=max_bytes)
        self._max_bytes = max_bytes
        self._counters = counters
        self._num_bytes = planner_bytes(self.spec)
        self._of_batches: deque[int] = deque()
        self._next: int | None = None

    def batch(self, data: bytearray) -> Batch:
        """See `Intake`."""
        batch = decode_ids(data)
        num_occurrences = _check(batch, self.spec, self._next)
        self._next = batch.index + 1
        self._of_batches.append(batch_bytes(self.spec, num_occurrences))
        self._num_bytes += self._of_batches[-1]
        if self._num_bytes > self._max_bytes:
            raise InputError(
                f"planning may take {_gib(self._num_bytes)} with the {len(self._of_batches)} batches up to "
                f"{batch.index} in the window, the cacher allows {_gib(self._max_bytes)} (--plan-gib): lower lookahead "
                "or the size of the batches"
            )
        return batch

    def planned(self, plan: Planned) -> None:
        """See `Intake`."""
        self._num_bytes -= self._of_batches.popleft()
        self._counters.add(batches_planned=1, plan_s=(plan.span.plan_end_ns - plan.span.plan_start_ns) / 1e9)


def parse_spec(data: bytearray, *, max_bytes: int) -> OracleSpec:
    """The spec of a run.

    Raises:
        InputError: it is malformed, cannot be planned for, or its planner needs more than `max_bytes`.
    """
    if len(data) > _MAX_SPEC_BYTES:
        raise InputError(f"oracle spec: expected at most {_MAX_SPEC_BYTES} bytes, got {len(data)}")
    value = json_object(data, "oracle spec")
    names = [field.name for field in dataclasses.fields(OracleSpec)]
    if sorted(value) != sorted(names):
        raise InputError(f"oracle spec: expected {', '.join(names)}, got {', '.join(map(repr, value))[:200]}")
    table_rows = tuple(
        None if rows is None else _number("rows of a table", rows, 1, (1 << 63) - 1)
        for rows in _list("table_rows", value["table_rows"], 1, MAX_FEATURES)
    )
    features = []
    for ref in _list("features", value["features"], 1, MAX_FEATURES):
        if not isinstance(ref, dict) or ref.keys() != {"feature", "table"}:
            raise InputError(f"oracle spec: expected a feature and a table number, got {str(ref)[:80]}")
        feature = _number("feature", ref["feature"], 0, MAX_FEATURES - 1)
        features.append(FeatureRef(feature=feature, table=_number("table", ref["table"], 0, len(table_rows) - 1)))
    if type(value["grows"]) is not bool:
        raise InputError(f"oracle spec: expected grows to be true or false, got {str(value['grows'])[:80]}")
    for name in ("policy", "assign", "horizon"):
        if not isinstance(value[name], str):
            raise InputError(f"oracle spec: expected {name} to be a text, got {str(value[name])[:80]}")
    world_size = _number("world_size", value["world_size"], 1, MAX_RANKS)
    shares = _list("example_shares", value["example_shares"], 0, world_size)
    spec = OracleSpec(
        table_rows=table_rows,
        features=tuple(features),
        num_slots=_number("num_slots", value["num_slots"], 0, (1 << 31) - 1),
        lookahead=_number("lookahead", value["lookahead"], 1, _MAX_LOOKAHEAD),
        grows=value["grows"],
        policy=value["policy"],
        world_size=world_size,
        assign=value["assign"],
        example_shares=tuple(_number("example_shares", share, 0, (1 << 31) - 1) for share in shares),
        rows_delay=_number("rows_delay", value["rows_delay"], 0, 1),
        horizon=value["horizon"],
    )
    check_spec(spec)
    needed = planner_bytes(spec)
    if needed > max_bytes:
        remedy = ": lower cache.max_rows" if spec.grows else ""
        raise InputError(
            f"cache.rows = {spec.num_slots} on each of {spec.world_size} ranks, and tables of that size, may take the "
            f"planner {_gib(needed)}, the cacher allows {_gib(max_bytes)} (--plan-gib){remedy}"
        )
    return spec


def planner_bytes(spec: OracleSpec) -> int:
    """Memory that a planner may take, without its window."""
    rows = dense_sizes(spec.table_rows)
    return _BASE_BYTES + BYTES_PER_SLOT * spec.slots_per_rank * spec.world_size + _BYTES_PER_ROW * sum(rows or ())


def batch_bytes(spec: OracleSpec, num_occurrences: int) -> int:
    """Memory that a batch in the window may take."""
    words = RankCounts(spec.world_size, largest=spec.lookahead).num_words if spec.world_size > 1 else 0
    per_rank = _BYTES_PER_RANK + _BYTES_PER_TABLE * len(spec.table_rows)
    return _BYTES_PER_BATCH + per_rank * spec.world_size + (_BYTES_PER_OCCURRENCE + 16 * words) * num_occurrences


def _check(batch: Batch, spec: OracleSpec, expected_index: int | None) -> int:
    """The number of occurrences of a batch.

    Raises:
        CodecError: the planner cannot index it, or it does not follow the batch before.
    """
    index = batch.index if expected_index is None else expected_index
    if batch.index != index or index >= NEVER:
        raise CodecError(f"expected batch {index} of at most {NEVER}, got batch {batch.index}")
    largest = max(ref.feature for ref in spec.features)
    if not largest < batch.num_features <= MAX_FEATURES:
        raise CodecError(
            f"batch {index}: expected from {largest + 1} to {MAX_FEATURES} features, got {batch.num_features}"
        )
    if batch.rank_examples and len(batch.rank_examples) != spec.world_size:
        raise CodecError(f"batch {index}: expected the examples of {spec.world_size} ranks")
    per_feature = batch.lengths.sum(axis=1, dtype=np.int64)
    if (batch.lengths.size and int(batch.lengths.min()) < 0) or int(per_feature.sum()) != batch.values.shape[0]:
        raise CodecError(f"batch {index}: expected lengths of {batch.values.shape[0]} ids")
    num_occurrences = sum(int(per_feature[ref.feature]) for ref in spec.features)
    if num_occurrences > _MAX_OCCURRENCES:
        raise CodecError(f"batch {index}: expected at most {_MAX_OCCURRENCES} lookups, got {num_occurrences}")
    return num_occurrences


def _number(name: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InputError(f"oracle spec: expected {name} from {least} to {most}, got {str(value)[:80]}")
    return value


def _list(name: str, value: object, least: int, most: int) -> list[object]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise InputError(f"oracle spec: expected {name} to be a list of {least} to {most}, got {str(value)[:80]}")
    return value


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
