"""`JobFacts`: properties of a job that its checkpoints record. `compare`: may a job resume a checkpoint?

    configuration, data schema ──result_settings──┐
    row schema, batch identity, ranks, arithmetic ┴──> JobFacts <──compare──> Manifest    differs: InputError or a note

A job can resume a checkpoint with different values of the settings that only affect speed, duration or paths.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.checkpoint.manifest import Manifest
from bagpipe.client.agreement import first_difference
from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.store.redis.urls import redact
from bagpipe.types.batch_identity import BatchIdentity
from bagpipe.types.schema import DataSchema, RowSchema
from trainer.arithmetic import first_unlike
from trainer.ranks import common_settings

__all__ = ["JobFacts", "compare", "note", "result_settings"]

#: Sections whose keys affect results, except the keys in `_FREE`.
_SECTIONS = ("data", "model", "optim", "pipeline", "run")
#: Keys of these sections that only affect speed, duration or paths.
_FREE = frozenset(
    {
        "data.path",
        "data.schema",
        "data.workers",
        "data.identity",
        "data.epochs",
        "optim.ema_evaluate",
        "run.steps",
        "run.peer_timeout_s",
        "run.trace",
        "run.nonfinite",  # a job that failed on a bad batch can resume and skip it
    }
)
#: The end of a refusal.
_WAY_OUT = "use another checkpoint.dir, or checkpoint.resume=never"
#: Keys of other sections that affect results.
_EXTRA_KEYS = ("cacher.assign",)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Properties of a job that its checkpoints record and are compared with.

    Attributes:
        settings: see `result_settings`.
        rows: row schema.
        identity: identity of the batches, from the cacher.
        world_size: number of ranks.
        arithmetic: by rank, see `trainer.arithmetic`.
    """

    settings: Mapping[str, Any]
    rows: RowSchema
    identity: BatchIdentity
    world_size: int
    arithmetic: tuple[Mapping[str, str], ...] = ()

    @property
    def row_schema(self) -> dict[str, Any]:
        """`rows` as JSON."""
        return _json_round_trip(self.rows.to_json())


def result_settings(config: Config, data: DataSchema) -> dict[str, Any]:
    """Settings that affect results, by configuration key, and the columns of the data; JSON values."""
    everything = common_settings(config)
    keys = [key for key in everything if key.partition(".")[0] in _SECTIONS and key not in _FREE]
    chosen = {key: everything[key] for key in sorted([*keys, *_EXTRA_KEYS])}
    return _json_round_trip({**chosen, "data columns": data.to_json()})


def compare(checkpoint: Manifest, facts: JobFacts) -> None:
    """Reject a checkpoint of another job. Print a note if results cannot be bit-identical to an uninterrupted run.

    Raises:
        InputError: a setting, the row schema or the data differs. Names the first difference and both values.
    """
    # A key added after the checkpoint was written has its default value there.
    defaults = {key: value for key, value in common_settings(Config()).items() if key in facts.settings}
    pairs: tuple[tuple[str, object, object], ...] = (
        ("", {**defaults, **checkpoint.settings}, dict(facts.settings)),
        ("rows", dict(checkpoint.row_schema), facts.row_schema),
    )
    for path, theirs, ours in pairs:
        found = first_difference(theirs, ours, path)
        if found is not None:
            first, second = redact(found.first), redact(found.second)
            raise InputError(
                f"the checkpoint at step {checkpoint.step} was made with {found.path} {first}, this job has {second}: "
                f"{_WAY_OUT}"
            )
    _compare_batches(checkpoint, facts.identity)
    if checkpoint.parts and checkpoint.world_size != facts.world_size:
        note(
            f"the checkpoint at step {checkpoint.step} was made by {checkpoint.world_size} ranks, this job has "
            f"{facts.world_size}: results are no longer bit-identical to those of an uninterrupted run"
        )
    if checkpoint.parts:
        _note_other_arithmetic(checkpoint, facts)


def _compare_batches(checkpoint: Manifest, ours: BatchIdentity) -> None:
    """Reject a checkpoint of other data. Print a note if not all could be compared, or other code reads the data."""
    made = f"the checkpoint at step {checkpoint.step}"
    size = checkpoint.identity.get("data")
    if isinstance(size, str):  # format version 1: number and size of the files, and a digest of their names and times
        change = None if size.startswith(f"{ours.size} (") else f"it has {ours.size}, not {size.partition(' (')[0]}"
        if change is None and ours.files:
            note(f"{made} recorded no content of the data files: only their number and total size were compared")
    else:
        theirs = BatchIdentity.from_json(checkpoint.identity)
        change = theirs.first_change(ours)
        if change is None and theirs.knows_less_than(ours):
            note(f"{made} recorded sampled blocks of the data files: bytes between them were not compared")
    if change is not None:
        raise InputError(f"{made} was made with other data: {change}: {_WAY_OUT}")
    if checkpoint.identity.get("code") != ours.code:
        note(
            f"{made} was made with other cacher code: results are bit-identical to those of an uninterrupted run only "
            "if that code makes the same batches"
        )


def _note_other_arithmetic(checkpoint: Manifest, facts: JobFacts) -> None:
    """Print a note for the first rank that computes with other kernels than in the checkpoint."""
    for rank, (theirs, ours) in enumerate(zip(checkpoint.arithmetic, facts.arithmetic, strict=False)):
        found = first_unlike(theirs, ours)
        if found is not None:
            where = f" on rank {rank}" if facts.world_size > 1 else ""
            note(
                f"the checkpoint at step {checkpoint.step} was made with {found.path} {found.first}{where}, this job "
                f"has {found.second}: results are no longer bit-identical to those of an uninterrupted run"
            )
            return


def _json_round_trip(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value after a JSON round trip: tuples become lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


def note(line: str) -> None:
    """Print a note to stderr."""
    sys.stderr.write(f"note: {line}\n")
