"""`ResumePoint`: the newest complete checkpoint of a job's folder, or initial values. Rank 0 decides.

    checkpoint.mirror ──restore──> checkpoint.dir, if that has none
    checkpoint.dir ──choose──> checkpoint ──compare──> settings, row schema, data, world size     read-only
    store ──ledger.state──> decide: rows of another job are refused, or the user chose what to do    so far
    checkpoint.dir ──new generation──> token, lineage ──(fresh start: checkpoint 0)──> ResumePoint, on every rank

A *lineage* is the set of checkpoints that descend from one fresh start. A *generation* is one start of a job on the
folder.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagpipe.checkpoint.existing_rows import Existing, decide
from bagpipe.checkpoint.files import link_or_copy
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.manifest import KNOWN_ROWS, Manifest, Part
from bagpipe.checkpoint.mirror import CheckpointMirror
from bagpipe.config.sections import CheckpointConfig, StoreConfig
from bagpipe.errors import InputError, JobError, PeerError, StoreError
from bagpipe.jobs.job_facts import JobFacts, compare
from bagpipe.jobs.ranks import Ranks
from bagpipe.start_from.first_checkpoint import FirstCheckpoint
from bagpipe.store.interface import Store
from bagpipe.util.program import note

__all__ = ["ResumePoint", "namespace_label", "start_generation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a start of a job resumes, and the fencing token of that start.

    Attributes:
        token: fencing token of its writes.
        generation: number of this start; 0 without a folder.
        checkpoint: the checkpoint it resumes from; None without a folder.
        folder: the checkpoint folder. The object of rank 0 remembers which checkpoints are broken.
        known_rows: file in the folder of the names of the rows that the job began with; empty: it needs none.
    """

    token: str
    generation: int = 0
    checkpoint: Checkpoint | None = None
    folder: CheckpointFolder | None = field(default=None, compare=False)
    known_rows: str = ""

    @property
    def checkpoint_id(self) -> str:
        """Checkpoint id of the store's buckets after recovery; empty without a folder."""
        return self.checkpoint.manifest.checkpoint_id if self.checkpoint is not None else ""

    @property
    def first_batch(self) -> int:
        return self.checkpoint.manifest.step if self.checkpoint is not None else 0

    @property
    def lineage(self) -> str:
        """Lineage of the job's checkpoints; empty without a folder."""
        return self.checkpoint.manifest.lineage if self.checkpoint is not None else ""

    @property
    def is_trained(self) -> bool:
        """Whether the job resumes trained values, not initial ones."""
        return bool(self.parts)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of the checkpoint, one per rank that wrote it; empty for initial values."""
        return self.checkpoint.manifest.parts if self.checkpoint is not None else ()

    @contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """On rank 0: remove this start's generation if the job is refused in the block, or fails by a defect.

        Nothing is trained yet: a corrected command starts as the first one. What passes (a store that is not there, a
        signal) leaves the checkpoint to the next start.
        """
        try:
            yield
        except Exception as error:
            self.undo_if_refused(error)
            raise

    def undo_if_refused(self, error: BaseException | None) -> None:
        """The same after a job's error, before it has written rows."""
        passes = isinstance(error, StoreError | JobError) and not isinstance(error, PeerError)
        if self.folder is not None and isinstance(error, Exception) and not passes:
            self.folder.abandon(self.generation)


def namespace_label(namespace: StoreConfig) -> str:
    """Name of the namespace in errors."""
    return f"store.namespace {namespace.namespace!r}"


def start_generation(
    checkpoint: CheckpointConfig,
    namespace: StoreConfig,
    ranks: Ranks,
    facts: JobFacts,
    store: Store,
    origin: FirstCheckpoint | None = None,
) -> ResumePoint:
    """Choose and compare a checkpoint on rank 0, then start the next generation. Returns the same on every rank.

    Args:
        checkpoint: the folder, and what to resume.
        namespace: the store's namespace, and what to do with rows of another job.
        ranks: the ranks of the job.
        facts: what checkpoints are compared with.
        store: open store.
        origin: makes the first checkpoint of a job that has none from other weights; None: from initial values.

    Raises:
        InputError: a job runs on the folder, no checkpoint can be used, the store holds another job's rows, `origin`
            does not fit, the folder cannot be written, or this rank's folder is not that of rank 0. No error leaves a
            new generation.
        StoreError: the store failed.
    """
    if not checkpoint.dir:
        if ranks.is_first:
            _check_existing(namespace, store)
        return ResumePoint(token=ranks.share(_token(0)))
    folder = CheckpointFolder(Path(checkpoint.dir).absolute())
    first: ResumePoint | None = None
    if ranks.is_first:
        # A job restarted by its launcher resumes its own checkpoints, whatever checkpoint.resume says.
        _check_holder(checkpoint, folder.holder())
        resume = checkpoint.resume if not _restart_count() else "auto"
        mirror = CheckpointMirror(checkpoint.mirror) if checkpoint.mirror else None
        if mirror is not None and resume != "never" and not folder.positions():
            with _mirror_errors_as_input_errors(mirror):
                mirror.restore(folder, resume, note)
        found = _choose(folder, resume, facts)
        lineage = found.manifest.lineage if found is not None else secrets.token_hex(16)
        is_trained = origin is not None if found is None else bool(found.manifest.parts)
        if mirror is not None:
            with _mirror_errors_as_input_errors(mirror):
                mirror.check_lineage(lineage, folder.last_generation())
        _check_existing(namespace, store, lineage, is_trained=is_trained)
        if origin is not None and found is None:
            origin.compare()
        generation = folder.new_generation()
        if running := folder.holder(before=generation):  # it started at the same time
            try:
                _check_holder(checkpoint, running)
            except InputError:
                folder.abandon(generation)
                raise
        token = _token(generation)
        first = ResumePoint(token=token, generation=generation, folder=folder)
        with first.undone_if_refused():
            with _file_errors_as_input_errors(folder):
                folder.note_start(generation, token, found)
            while found is not None and found.position not in folder.positions():
                # A job that still runs on this folder removed the checkpoint before it saw the new generation.
                found = _choose(folder, resume, facts)
                with _file_errors_as_input_errors(folder):
                    folder.note_start(generation, token, found)
            first = dataclasses.replace(first, checkpoint=found)
            begun = _publish_first(folder, first, lineage, facts, origin)
            with _file_errors_as_input_errors(folder):
                first = dataclasses.replace(
                    first, checkpoint=begun, known_rows=_show_known_rows(folder, begun, generation)
                )
    message = ranks.share(None if first is None else _to_message(first))
    if first is not None:
        return first
    return _from_message(folder, message)


def _check_holder(checkpoint: CheckpointConfig, running: str) -> None:
    """Refuse a folder on which a job runs, unless the user says that this one takes over."""
    if running and not checkpoint.take_over:
        raise InputError(
            f"checkpoint.dir {checkpoint.dir} is in use by {running}: wait for that job's end or stop it, or "
            "take over with checkpoint.take_over=true"
        )


def _restart_count() -> int:
    """Number of times the launcher has restarted the job."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _choose(folder: CheckpointFolder, resume: str, facts: JobFacts) -> Checkpoint | None:
    if resume == "never":
        return None
    found = folder.chosen(resume, note)
    if found is not None:
        compare(found.manifest, facts)
    return found


def _publish_first(
    folder: CheckpointFolder, start: ResumePoint, lineage: str, facts: JobFacts, origin: FirstCheckpoint | None
) -> Checkpoint:
    """Make the starting checkpoint the newest one, so that a restart of the job finds it."""
    found = start.checkpoint
    with _file_errors_as_input_errors(folder):
        if found is None:
            manifest = _initial_manifest(start, lineage, facts)
            if origin is not None:
                manifest = origin.write(folder.step_folder(manifest.generation, manifest.step), manifest)
            return folder.publish(manifest)
        # If the newer checkpoints are all broken, a restart skips them again.
        return folder.adopt(found, start.generation) if folder.has_newer(found) else found


def _show_known_rows(folder: CheckpointFolder, checkpoint: Checkpoint, generation: int) -> str:
    """Link the names of the rows that a job began with into its generation's folder, where they stay while it runs.

    Returns:
        The name of the link below the folder of checkpoints; empty: there is no such file.
    """
    known = checkpoint.manifest.known_rows
    if known is None:
        return ""
    target = folder.generation_folder(generation) / KNOWN_ROWS
    link_or_copy(checkpoint.folder / known.name, target)
    return str(target.relative_to(folder.path))


def _initial_manifest(start: ResumePoint, lineage: str, facts: JobFacts) -> Manifest:
    """Manifest of checkpoint 0, before the first batch: no rows. Without them every rank computes initial values."""
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
        identity=facts.identity_record,
        arithmetic=facts.arithmetic,
    )


@contextmanager
def _file_errors_as_input_errors(folder: CheckpointFolder) -> Iterator[None]:
    """Convert OSError to InputError: training has not started."""
    try:
        yield
    except OSError as error:
        raise InputError(f"checkpoint.dir {folder.path} cannot be written: {error.strerror or error}") from None


@contextmanager
def _mirror_errors_as_input_errors(mirror: CheckpointMirror) -> Iterator[None]:
    """Convert OSError to InputError: training has not started."""
    try:
        yield
    except OSError as error:
        raise InputError(f"checkpoint.mirror {mirror.url} cannot be read: {error.strerror or error}") from None


def _to_message(resume_point: ResumePoint) -> dict[str, Any]:
    """The message from rank 0 to the other ranks."""
    checkpoint = resume_point.checkpoint
    assert checkpoint is not None, "there is a folder"
    return {
        "token": resume_point.token,
        "generation": resume_point.generation,
        "position": list(checkpoint.position),
        "known_rows": resume_point.known_rows,
    }


def _from_message(folder: CheckpointFolder, message: Mapping[str, Any]) -> ResumePoint:
    """Rank 0's `ResumePoint`, with the checkpoint read from this rank's folder."""
    if folder.token_of(message["generation"]) != message["token"]:
        raise InputError(
            f"checkpoint.dir {folder.path} on host {socket.gethostname()} is not the folder that rank 0 has: "
            "all ranks need one folder on a shared file system"
        )
    checkpoint = folder.known(*message["position"])
    return ResumePoint(
        token=message["token"],
        generation=message["generation"],
        checkpoint=checkpoint,
        folder=folder,
        known_rows=message["known_rows"],
    )


def _check_existing(namespace: StoreConfig, store: Store, lineage: str = "", *, is_trained: bool = False) -> None:
    """Refuse a namespace with rows of another job, unless `store.existing` says what to do with them. Read-only."""
    with store.ledger() as ledger:
        existing = decide(
            ledger.state(),
            ledger.job(),
            namespace=namespace_label(namespace),
            lineage=lineage,
            existing=namespace.existing,
            is_trained=is_trained,
        )
    if existing is Existing.ROWS_ONLY and not lineage and _restart_count():
        raise InputError(
            f"{namespace_label(namespace)} holds rows that the launcher's previous attempt has trained, and only a "
            "checkpoint can tell which: set checkpoint.dir"
        )


def _token(generation: int) -> str:
    return f"{generation}-{secrets.token_hex(16)}"
