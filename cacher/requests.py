"""Validates a trainer's requests: the only place where untrusted bytes become records. Pure.

Hello ──check_hello──> nothing, or InputError naming key and both values
Start ──parse_start──> PhaseRequest that the cacher's own configuration and schema allow
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.client import cacher_pb2 as pb
from bagpipe.client.agreement import MAX_CREDITS, PROTOCOL_VERSION, first_difference
from bagpipe.errors import InputError
from bagpipe.oracle.assign import check_shares
from bagpipe.oracle.plan import FeatureRef, OracleSpec, slots_of
from bagpipe.oracle.rank_batch import Phase
from bagpipe.oracle.sizing import BYTES_PER_SLOT, MAX_SLOT_BYTES
from bagpipe.oracle.spec_check import MAX_SLOTS
from bagpipe.types.schema import DataSchema
from bagpipe.util.documents import parse_json
from cacher.known_rows import check_known_rows

__all__ = [
    "MAX_RANKS",
    "PhaseRequest",
    "check_hello",
    "check_name",
    "check_protocol",
    "check_settings",
    "json_object",
    "parse_start",
]

#: Larger requests are errors or attacks: these bound what the cacher allocates for a job.
MAX_RANKS = 1024
#: Tables that read the same feature, such as those of FinalMLP's gates: each is planned like a feature of its own.
MAX_TABLES_PER_FEATURE = 16
_MAX_NAME_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRequest:
    """A request for a phase. All ranks of a job must send the same one.

    Attributes:
        phase, spec, max_steps, first_batch, reader_state, known_rows: see `cacher.planning.PlannedData.phase`.
    """

    phase: Phase
    spec: OracleSpec
    max_steps: int
    first_batch: int
    reader_state: Mapping[str, Any] | None = None
    known_rows: str = ""

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return value


def check_hello(hello: pb.Hello, settings: Mapping[str, Any], schema: DataSchema) -> None:
    """Compare a trainer's settings with the cacher's; after a reconnect also its schema.

    Raises:
        InputError: another protocol, settings or schema, naming both values; a rank, world size, name or number of
            credits out of range.
    """
    check_protocol(hello.protocol)
    check_name("job id", hello.job_id)
    check_name("instance", hello.instance)
    if not 1 <= hello.world_size <= MAX_RANKS:
        raise InputError(f"world size: expected 1 to {MAX_RANKS}, got {hello.world_size}")
    if hello.rank >= hello.world_size:
        raise InputError(f"rank: expected 0 to {hello.world_size - 1}, got {hello.rank}")
    if not 1 <= hello.credits <= MAX_CREDITS:
        raise InputError(f"credits: expected 1 to {MAX_CREDITS}, got {hello.credits}")
    check_settings(settings, hello.settings, "the cacher", "the trainer")
    if hello.schema:
        found = first_difference(_plain(schema.to_json()), json_object(hello.schema, "schema"))
        if found is not None:
            raise InputError(f"data schema, {found.path}: the cacher has {found.first}, the trainer {found.second}")


def check_settings(ours: Mapping[str, Any], theirs: str, our_name: str, their_name: str) -> None:
    """Raise InputError, naming both values, unless a peer's settings, as JSON, are ours."""
    found = first_difference(ours, json_object(theirs, "settings"))
    if found is not None:
        raise InputError(f"{found.path}: {our_name} has {found.first}, {their_name} {found.second}")


def parse_start(start: pb.Start, *, settings: Mapping[str, Any], schema: DataSchema, world_size: int) -> PhaseRequest:
    """Parse and check a phase request.

    Raises:
        InputError: the configuration does not allow the plan, or the request is malformed.
    """
    if start.phase not in ("train", "eval"):
        raise InputError(f"phase must be train or eval, got {start.phase[:50]!r}")
    if not start.first_batch <= start.next_batch or not start.watermark <= start.next_batch:
        raise InputError(
            f"expected first batch and watermark up to the next batch, "
            f"got {start.first_batch}, {start.watermark} and {start.next_batch}"
        )
    value = json_object(start.spec, "oracle spec")
    rows = _cache_rows(value.get("num_slots"), settings["cache.rows"])
    slot_bytes = slots_of(rows) * world_size * BYTES_PER_SLOT
    if slot_bytes > MAX_SLOT_BYTES:
        key = "cache.max_rows" if settings["cache.rows"] == "auto" else "cache.rows"
        raise InputError(
            f"cache.rows = {rows} on each of {world_size} ranks may take the planner "
            f"{slot_bytes >> 30} GiB, at most {MAX_SLOT_BYTES >> 30} are allowed: lower {key}"
        )
    expected = _expected_spec(value, settings, schema, world_size)
    found = first_difference(expected, value)
    if found is not None:
        raise InputError(f"oracle spec, {found.path}: the cacher has {found.first}, the trainer {found.second}")
    spec = OracleSpec(
        **{
            **expected,
            "table_rows": tuple(expected["table_rows"]),
            "features": tuple(FeatureRef(**ref) for ref in expected["features"]),
            "example_shares": tuple(expected["example_shares"]),
        }
    )
    check_shares(spec)
    check_known_rows(start.known_rows)
    phase: Phase = "train" if start.phase == "train" else "eval"
    reader_state = json_object(start.reader_state, "reader_state") if start.reader_state else None
    return PhaseRequest(
        phase=phase,
        spec=spec,
        max_steps=start.max_steps,
        first_batch=start.first_batch,
        reader_state=reader_state,
        known_rows=start.known_rows,
    )


def _expected_spec(
    value: Mapping[str, Any], settings: Mapping[str, Any], schema: DataSchema, world_size: int
) -> dict[str, Any]:
    """The spec for a trainer's features. The cacher decides everything except features, tables and example shares."""
    refs = value.get("features")
    most = MAX_TABLES_PER_FEATURE * len(schema.features)
    if not isinstance(refs, list) or len(refs) > most:
        raise InputError(
            f"oracle spec: expected at most {most} pairs of a feature and a table that reads it, "
            f"{MAX_TABLES_PER_FEATURE} for each of the data's features"
        )
    rows: dict[int, int | None] = {}
    for ref in refs:
        if not isinstance(ref, dict) or ref.keys() != {"feature", "table"}:
            raise InputError(f"oracle spec: expected a feature and a table number, got {str(ref)[:80]}")
        feature, table = ref["feature"], ref["table"]
        if type(feature) is not int or not 0 <= feature < len(schema.features):
            raise InputError(f"oracle spec: expected a feature from 0 to {len(schema.features) - 1}, got {feature!r}")
        if type(table) is not int or not 0 <= table < len(refs):
            raise InputError(f"oracle spec: expected a table from 0 to {len(refs) - 1}, got {table!r}")
        known = schema.table(schema.features[feature].table).num_ids
        so_far = rows.get(table, 0)
        rows[table] = None if known is None or so_far is None else max(known, so_far)
    if set(rows) != set(range(len(rows))):
        raise InputError(f"oracle spec: expected every table from 0 on to have a feature, got {sorted(rows)}")
    return {
        "table_rows": [rows[table] for table in range(len(rows))],
        "features": refs,
        "num_slots": _cache_rows(value.get("num_slots"), settings["cache.rows"]),
        "grows": settings["cache.rows"] == "auto",
        "lookahead": settings["oracle.lookahead"],
        "policy": settings["oracle.policy"],
        "world_size": world_size,
        "assign": settings["cacher.assign"],
        "example_shares": _example_shares(value.get("example_shares"), world_size),
        "rows_delay": _rows_delay(value.get("rows_delay")),
        "horizon": settings.get("oracle.horizon", "window"),
    }


def _cache_rows(value: object, setting: int | str) -> int:
    """The cacher decides the rows of a cache, except the bound of one that grows: it is of the trainer's memory."""
    if setting != "auto":
        return int(setting)
    if type(value) is not int or not 1 <= value <= MAX_SLOTS:
        raise InputError(f"oracle spec: expected num_slots from 1 to {MAX_SLOTS}, got {str(value)[:80]}")
    return value


def _example_shares(value: object, world_size: int) -> list[int]:
    """The trainer decides its example shares. None counts as equal shares."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > world_size or not all(type(share) is int for share in value):
        raise InputError(f"oracle spec: expected up to {world_size} example shares, got {str(value)[:80]}")
    return value


def _rows_delay(value: object) -> int:
    """The trainer decides when its rows are read. None counts as 0."""
    if value is None:
        return 0
    if type(value) is not int or value not in (0, 1):
        raise InputError(f"oracle spec: expected rows_delay 0 or 1, got {str(value)[:80]}")
    return value


def check_name(what: str, name: str) -> None:
    """Raise InputError unless a name has 1 to 200 printable characters."""
    if not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
        raise InputError(f"{what}: expected 1 to {_MAX_NAME_LENGTH} printable characters, got {name[:50]!r}")


def check_protocol(protocol: int) -> None:
    """Raise InputError unless a trainer speaks this cacher's version."""
    if protocol != PROTOCOL_VERSION:
        raise InputError(f"protocol version: the cacher speaks {PROTOCOL_VERSION}, the trainer {protocol}")


def json_object(text: str | bytearray, what: str) -> dict[str, Any]:
    """The JSON object in a text. InputError if there is none."""
    try:
        value = parse_json(text)
    except ValueError:
        raise InputError(f"{what}: expected a JSON object, got {text[:50]!r}") from None
    if not isinstance(value, dict):
        raise InputError(f"{what}: expected a JSON object, got {text[:50]!r}")
    return value


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value after a JSON round trip: tuples become lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain
