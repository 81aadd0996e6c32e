"""Where a job begins: at the newest whole checkpoint of its folder, or at nothing. Decided by rank 0, told to all.

    checkpoint.dir ──choose──> checkpoint ──compare──> settings, row schema, data, world size     nothing is changed
    store ──ledger.state──> check_namespace: whose rows are these?                                   so far
    checkpoint.dir ──new generation──> token, lineage ──(from nothing: checkpoint 0)──> Beginning, at every rank

A *lineage* is all that goes back to one beginning; a *generation* is one start of a job on the folder. What may differ
between the job that made a checkpoint and the one that goes on from it: what only says how fast, how long or where.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.manifest import Manifest, Part
from bagpipe.checkpoint.recovery import check_namespace
from bagpipe.client.agreement import first_difference
from bagpipe.config.sections import Config
from bagpipe.errors import InputError
from bagpipe.store.fencing.fence import BucketState
from bagpipe.store.interface import Store
from bagpipe.store.redis.urls import redact
from bagpipe.types.schema import DataSchema, RowSchema
from trainer.ranks import Ranks, common_settings

__all__ = ["Beginning", "JobFacts", "begin", "compare", "note", "place_of", "result_settings"]

#: Sections whose keys results depend on, but for those that say how fast, how long or where.
_SECTIONS = ("data", "model", "optim", "pipeline", "run")
_FREE = frozenset(
    {
        "data.path",
        "data.schema",
        "data.workers",
        "data.epochs",
        "run.steps",
        "run.peer_timeout_s",
        "run.trace",
        "run.nonfinite",  # a job that was stopped by a bad batch may go on without it
    }
)
_BESIDES = ("cacher.assign",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where a job begins, and as whom it writes.

    Attributes:
        token: of its writes.
        generation: of this start; 0 where there is no folder.
        checkpoint: what it goes on from; None where there is no folder.
        folder: where checkpoints are; rank 0's remembers which of them are broken.
    """

    token: str
    generation: int = 0
    checkpoint: Checkpoint | None = None
    folder: CheckpointFolder | None = field(default=None, compare=False)

    @property
    def checkpoint_id(self) -> str:
        """What the store's buckets say once its rows are those of the beginning."""
        return self.checkpoint.manifest.checkpoint_id if self.checkpoint is not None else ""

    @property
    def first_batch(self) -> int:
        return self.checkpoint.manifest.step if self.checkpoint is not None else 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the ranks that made the checkpoint contributed; none where everything is initial."""
        return self.checkpoint.manifest.parts if self.checkpoint is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a checkpoint is made of besides parts, and compared with.

    Attributes:
        settings: see `result_settings`.
        rows: what the rows mean.
        identity: of the data, as the cacher says it.
        world_size: ranks.
    """

    settings: Mapping[str, Any]
    rows: RowSchema
    identity: Mapping[str, str]
    world_size: int

    @property
    def row_schema(self) -> dict[str, Any]:
        """`rows` as JSON."""
        return _plain(self.rows.to_json())


def place_of(config: Config) -> str:
    """What errors call the namespace."""
    return f"store.namespace {config.store.namespace!r}"


def begin(config: Config, ranks: Ranks, facts: JobFacts, store: Store) -> Beginning:
    """Choose and compare, at rank 0, before anything is changed; then take the next generation. The same at every rank.

    Raises:
        InputError: no checkpoint can be used, the store holds another job's rows, or the folder cannot be written, or
            is another one on this rank's host.
        StoreError: the store failed.
    """
    place = place_of(config)
    if not config.checkpoint.dir:
        if ranks.is_first:
            check_namespace(_states(store), place, "")
        return Beginning(token=ranks.share(_token(0)))
    folder = CheckpointFolder(Path(config.checkpoint.dir).absolute())
    first: Beginning | None = None
    if ranks.is_first:
        # A restarted job goes on with what its first attempt began, whatever that one was told.
        resume = config.checkpoint.resume if not _attempt() else "auto"
        found = _choose(folder, resume, facts)
        lineage = found.manifest.lineage if found is not None else secrets.token_hex(16)
        check_namespace(_states(store), place, lineage)
        generation = folder.new_generation()
        token = _token(generation)
        with _writing(folder):
            folder.note_start(generation, token, found)
        while found is not None and found.position not in folder.positions():
            # A job that still runs here has removed it before it could know.
            found = _choose(folder, resume, facts)
            with _writing(folder):
                folder.note_start(generation, token, found)
        first = Beginning(token=token, generation=generation, checkpoint=found, folder=folder)
        first = dataclasses.replace(first, checkpoint=_publish_first(folder, first, lineage, facts))
    said = ranks.share(None if first is None else _said(first))
    if first is not None:
        return first
    return _heard(folder, said)


def _attempt() -> int:
    """How often the launcher has restarted the job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _choose(folder: CheckpointFolder, resume: str, facts: JobFacts) -> Checkpoint | None:
    if resume == "never":
        return None
    found = folder.newest(note) if resume == "auto" else folder.at(int(resume), note)
    if found is not None:
        compare(found.manifest, facts)
    return found


def _publish_first(folder: CheckpointFolder, start: Beginning, lineage: str, facts: JobFacts) -> Checkpoint:
    """What the job begins with, as the newest checkpoint, so that a restart finds it whatever it was told."""
    found = start.checkpoint
    with _writing(folder):
        if found is None:
            return folder.publish(_nothing(start, lineage, facts))
        # Newer ones that are broken will be passed over again.
        return folder.adopt(found, start.generation) if folder.has_newer(found) else found


def _nothing(start: Beginning, lineage: str, facts: JobFacts) -> Manifest:
    """The checkpoint before the first batch: no rows, and initial values that every rank makes by itself."""
    return Manifest(
        lineage=lineage,
        generation=start.generation,
        step=0,
        parent_checkpoint_id="",
        token=start.token,
        epoch=0,
        world_size=0,
        settings=facts.settings,
        row_schema=facts.row_schema,
        identity=facts.identity,
    )


@contextmanager
def _writing(folder: CheckpointFolder) -> Iterator[None]:
    """Errors of the file system are bad input as long as nothing has begun."""
    try:
        yield
    except OSError as error:
        raise InputError(f"checkpoint.dir {folder.path} cannot be written: {error.strerror or error}") from None


def _said(beginning: Beginning) -> dict[str, Any]:
    checkpoint = beginning.checkpoint
    assert checkpoint is not None, "there is a folder"
    return {
        "token": beginning.token,
        "generation": beginning.generation,
        "position": list(checkpoint.position),
    }


def _heard(folder: CheckpointFolder, said: Mapping[str, Any]) -> Beginning:
    """What rank 0 said, found again in the folder as this rank sees it."""
    if folder.token_of(said["generation"]) != said["token"]:
        raise InputError(
            f"checkpoint.dir {folder.path} on host {socket.gethostname()} is not the folder that rank 0 has: "
            "all ranks need one folder, on a file system that they share"
        )
    checkpoint = folder.known(*said["position"])
    return Beginning(token=said["token"], generation=said["generation"], checkpoint=checkpoint, folder=folder)


def _states(store: Store) -> tuple[BucketState, ...]:
    with store.ledger() as ledger:
        return ledger.state()


def _token(generation: int) -> str:
    return f"{generation}-{secrets.token_hex(16)}"


def note(line: str) -> None:
    """Tell the user something that is no error."""
    sys.stderr.write(f"note: {line}\n")


def result_settings(config: Config, data: DataSchema) -> dict[str, Any]:
    """What results depend on, by configuration key, and the columns of the data; JSON values."""
    everything = common_settings(config)
    keys = [key for key in everything if key.partition(".")[0] in _SECTIONS and key not in _FREE]
    chosen = {key: everything[key] for key in sorted([*keys, *_BESIDES])}
    return _plain({**chosen, "data columns": data.to_json()})


def compare(checkpoint: Manifest, facts: JobFacts) -> None:
    """Refuse a checkpoint of another job; say so if results cannot be bit-identical to its own.

    Raises:
        InputError: the first setting, part of the row schema or of the data that differs: both values.
    """
    # A key that is younger than the checkpoint had the value that is its default now.
    younger = {key: value for key, value in common_settings(Config()).items() if key in facts.settings}
    pairs: tuple[tuple[str, object, object], ...] = (
        ("", {**younger, **checkpoint.settings}, dict(facts.settings)),
        ("rows", dict(checkpoint.row_schema), facts.row_schema),
        ("", {"the data": checkpoint.identity.get("data")}, {"the data": facts.identity.get("data")}),
    )
    for path, theirs, ours in pairs:
        found = first_difference(theirs, ours, path)
        if found is not None:
            first, second = redact(found.first), redact(found.second)
            raise InputError(
                f"the checkpoint at step {checkpoint.step} was made with {found.path} {first}, this job has {second}: "
                "use another checkpoint.dir, or checkpoint.resume=never"
            )
    if checkpoint.parts and checkpoint.world_size != facts.world_size:
        note(
            f"the checkpoint at step {checkpoint.step} was made by {checkpoint.world_size} ranks, this job has "
            f"{facts.world_size}: results are no longer bit-identical to those of an uninterrupted run"
        )
    if checkpoint.identity.get("code") != facts.identity.get("code"):
        note(
            f"the checkpoint at step {checkpoint.step} was made with other code of the cacher: results are "
            "bit-identical to those of an uninterrupted run only if that code makes the same batches"
        )


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it is after a trip through JSON: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain
