"""`JobFacts`: properties of a job that its checkpoints record. `compare`: may a job resume a checkpoint?

settings, row schema, batch identity, ranks, arithmetic ──> JobFacts <──compare──> Manifest    InputError or a note
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bagpipe.checkpoint.manifest import Manifest
from bagpipe.client.agreement import first_difference
from bagpipe.errors import InputError
from bagpipe.jobs.arithmetic import first_unlike
from bagpipe.types.batch_identity import BatchIdentity
from bagpipe.types.schema import RowSchema
from bagpipe.util.program import note
from bagpipe.util.redaction import redact

__all__ = ["JobFacts", "change_of_data", "changes", "compare"]

#: The end of a refusal.
_WAY_OUT = "use another checkpoint.dir, or checkpoint.resume=never"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """Properties of a job that its checkpoints record and are compared with.

    Attributes:
        settings: settings that affect results, by name; JSON values.
        defaults: values of settings that a checkpoint does not have, because its program did not know them yet.
        rows: row schema.
        identity: identity of the batches; None: unknown. Compared if the checkpoint has one too.
        changeable: names of settings that may differ from those of the checkpoint.
        world_size: number of ranks.
        arithmetic: by rank, see `bagpipe.jobs.arithmetic`.
    """

    settings: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rows: RowSchema
    changeable: frozenset[str] = frozenset()
    identity: BatchIdentity | None = None
    world_size: int
    arithmetic: tuple[Mapping[str, str], ...] = ()

    @property
    def identity_record(self) -> dict[str, Any]:
        """`identity` as JSON; empty if it is unknown."""
        return {} if self.identity is None else self.identity.to_json()

    @property
    def row_schema(self) -> dict[str, Any]:
        """`rows` as JSON."""
        return _json_round_trip(self.rows.to_json())


def changes(checkpoint: Manifest, facts: JobFacts) -> tuple[Mapping[str, Any], ...]:
    """The settings that this job changes: key, step from which the new value holds, values before and after."""
    theirs = {**facts.defaults, **checkpoint.settings}
    return tuple(
        {"key": key, "step": checkpoint.step, "before": theirs[key], "after": facts.settings[key]}
        for key in sorted(facts.changeable & facts.settings.keys() & theirs.keys())
        if theirs[key] != facts.settings[key]
    )


def compare(checkpoint: Manifest, facts: JobFacts) -> None:
    """Reject a checkpoint of another job. Print a note if results cannot be bit-identical to an uninterrupted run.

    Prints a note for each setting that may change and does.

    Raises:
        InputError: a setting, the row schema or the data differs. Names the first difference and both values.
    """
    changed = changes(checkpoint, facts)
    defaults = {key: value for key, value in facts.defaults.items() if key in facts.settings}
    allowed = {change["key"]: change["after"] for change in changed}
    pairs: tuple[tuple[str, object, object], ...] = (
        ("", {**defaults, **checkpoint.settings, **allowed}, dict(facts.settings)),
        ("rows", _spelled_out(checkpoint.row_schema), _spelled_out(facts.row_schema)),
    )
    for path, theirs, ours in pairs:
        found = first_difference(theirs, ours, path)
        if found is not None:
            first, second = redact(found.first), redact(found.second)
            raise InputError(
                f"the checkpoint at step {checkpoint.step} was made with {found.path} {first}, this job has {second}: "
                f"{_WAY_OUT}"
            )
    if facts.identity is not None and checkpoint.identity:
        clause = change_of_data(checkpoint, facts.identity)
        if clause is not None:
            raise InputError(f"the checkpoint at step {checkpoint.step} was made with other data: {clause}: {_WAY_OUT}")
    for change in changed:
        note(f"{change['key']} changes from {change['before']!r} to {change['after']!r} at step {checkpoint.step}")
    if checkpoint.parts and checkpoint.world_size != facts.world_size:
        note(
            f"the checkpoint at step {checkpoint.step} was made by {checkpoint.world_size} ranks, this job has "
            f"{facts.world_size}: results are no longer bit-identical to those of an uninterrupted run"
        )
    if checkpoint.parts:
        _note_other_arithmetic(checkpoint, facts)


def change_of_data(checkpoint: Manifest, ours: BatchIdentity) -> str | None:
    """First difference of this data from that of a checkpoint, as a clause about it; None if none is known.

    Prints a note if not all could be compared, or other code reads the data.

    Args:
        checkpoint: with an identity.
        ours: identity of the batches.
    """
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
    if change is None and checkpoint.identity.get("code") != ours.code:
        note(
            f"{made} was made with other cacher code: results are bit-identical to those of an uninterrupted run only "
            "if that code makes the same batches"
        )
    return change


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


def _spelled_out(rows: Mapping[str, Any]) -> dict[str, Any]:
    """A row schema's JSON with what it leaves out, so that a difference has two values; tables before rounding."""
    shared = {field: rows.get(field) for field in ("optimizer", "dtype")}
    tables = [{**shared, **table} for table in rows.get("tables", ())]
    others = {key: value for key, value in rows.items() if key not in ("tables", "rounding")}
    return {**others, "tables": tables, "rounding": rows.get("rounding", "nearest")}


def _json_round_trip(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value after a JSON round trip: tuples become lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain
