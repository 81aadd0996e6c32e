"""`CheckpointMirror`: copies of a job's checkpoints behind a URL, such as `s3://bucket/jobs/a` (`checkpoint.mirror`).

    Publisher ──offer──> thread: files, then manifest.json ──> <mirror>/generation-000007/step-00000400/
                                                      └──prune: best.json; the newest `keep`, and the best stay
    start, nothing in checkpoint.dir ──restore──> files, compared with the manifest's checksums, then manifest.json

The layout is that of the folder. A checkpoint exists in the mirror exactly while its manifest does: the manifest is
uploaded last and removed first. A file that the checkpoint before has too is copied within the store. The thread works
on one checkpoint at a time, and of those that wait on the newest alone, so training never waits for it; the end of the
job does.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from bagpipe.checkpoint.best import BEST_NAME, Best, decode_best, encode_best, read_best, write_best
from bagpipe.checkpoint.codec import decode_manifest, encode
from bagpipe.checkpoint.files import check, sync_folder, write_whole
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.manifest import BrokenCheckpoint, FileEntry, Manifest
from bagpipe.errors import InputError, JobError
from bagpipe.files.access import join
from bagpipe.files.transfer import copy, files_below, get_bytes, get_file, put_bytes, put_file, remove

__all__ = ["CheckpointMirror", "MirrorThread"]

_LOG = logging.getLogger("bagpipe.checkpoint")

_MANIFEST = "manifest.json"
_FILE = re.compile(r"generation-(\d{6,12})/step-(\d{8,12})/([^/]+)")

Position = tuple[int, int]


class CheckpointMirror:
    """Checkpoints behind a URL. One thread's.

    Args:
        url: of the mirror's folder.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._mirrored: Manifest | None = None
        self._best: Best | None = None

    def positions(self) -> tuple[Position, ...]:
        """(generation, step) of all mirrored checkpoints, the newest first.

        Raises:
            InputError: no access, or no client for the URL.
            OSError: the store does not answer.
        """
        return tuple(
            sorted((position for position, names in self._steps().items() if _MANIFEST in names), reverse=True)
        )

    def check_lineage(self, lineage: str, last_generation: int) -> None:
        """Refuse a mirror that holds checkpoints of another job, or of later starts than the job's folder.

        Args:
            lineage: of the job.
            last_generation: number of the newest start on the folder.

        Raises:
            InputError: it does; or no access.
            OSError: the store does not answer.
        """
        for position in self.positions():
            try:
                manifest = self._manifest(position)
            except BrokenCheckpoint:
                continue
            if manifest.lineage != lineage:
                raise InputError(
                    f"checkpoint.mirror {self.url} holds checkpoints of another job: name another mirror, or resume "
                    f"that job in an empty checkpoint.dir"
                )
            if position[0] > last_generation:
                raise InputError(
                    f"checkpoint.mirror {self.url} holds a checkpoint of start {position[0]} (step {position[1]}), "
                    f"checkpoint.dir had {last_generation} starts: resume it in an empty checkpoint.dir"
                )
            return

    def upload(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint, unless it is there; afterwards it exists in the mirror.

        Raises:
            InputError, OSError: it does not.
        """
        target = self._step_url(checkpoint.position)
        if self._mirrored is None and checkpoint.position in self.positions():
            if self._has(checkpoint.manifest):
                self._mirrored = checkpoint.manifest
                return
            remove(join(target, _MANIFEST))
        before = self._mirrored
        known = {} if before is None else {entry.name: entry for entry in before.files}
        for entry in checkpoint.manifest.files:
            url = join(target, entry.name)
            if before is None or known.get(entry.name) != entry or not self._copied(before, entry, url):
                put_file(checkpoint.folder / entry.name, url)
        put_bytes(encode(checkpoint.manifest), join(target, _MANIFEST))
        self._mirrored = checkpoint.manifest

    def _has(self, manifest: Manifest) -> bool:
        """Whether the mirrored manifest of this position is this one."""
        try:
            return self._manifest((manifest.generation, manifest.step)) == manifest
        except BrokenCheckpoint:
            return False

    def _copied(self, before: Manifest, entry: FileEntry, url: str) -> bool:
        """Whether the file could be copied from the checkpoint before, which somebody may have removed."""
        try:
            copy(join(self._step_url((before.generation, before.step)), entry.name), url)
        except FileNotFoundError:
            return False
        return True

    def prune(self, keep: int, newest: Position, folder: Path) -> None:
        """Name the best checkpoint; remove all but it and the `keep` newest ones, and what killed uploads left.

        Args:
            keep: at least 1.
            newest: position of a mirrored checkpoint. Newer ones are kept.
            folder: the job's folder, which names the best one.

        Raises:
            InputError, OSError: not all is removed.
        """
        steps = self._steps()
        whole = sorted((position for position, names in steps.items() if _MANIFEST in names), reverse=True)
        kept = {*whole[:keep], *(position for position in steps if position >= newest)}
        best = read_best(folder)
        kept |= {each.position for each in (best, self._name_best(best, whole)) if each is not None}
        for position, names in steps.items():
            if position not in kept:
                for name in sorted(names, key=lambda name: name != _MANIFEST):
                    remove(join(self._step_url(position), name))

    def name_best(self, folder: Path) -> None:
        """Name the best checkpoint of the job's folder in the mirror too, if it is there.

        Raises:
            InputError, OSError: it is not named.
        """
        best = read_best(folder)
        if best is not None and best != self._best:
            self._name_best(best, self.positions())

    def _name_best(self, best: Best | None, whole: Collection[Position]) -> Best | None:
        """The best checkpoint of the mirror: the job's, if it is among the whole ones, else the one named before."""
        if best is None or best.position not in whole:
            self._best = self._best or self._read_best()
        elif best != self._best:
            put_bytes(encode_best(best), join(self.url, BEST_NAME))
            self._best = best
        return self._best

    def _read_best(self) -> Best | None:
        url = join(self.url, BEST_NAME)
        try:
            content = get_bytes(url)
        except FileNotFoundError:
            return None
        try:
            return decode_best(content, f"checkpoint.mirror: {url}")
        except InputError as error:
            _LOG.warning("%s", error)
            return None

    def restore(self, folder: CheckpointFolder, resume: str, warn: Callable[[str], None]) -> None:
        """Download the checkpoint that `checkpoint.resume` names, and the best one, into a folder that has none.

        Args:
            folder: the job's folder.
            resume: auto, best, or a step.
            warn: takes a line per checkpoint that is not whole.

        Raises:
            InputError: the step is not there, all are broken, no access, or the folder cannot be written.
            OSError: the store does not answer.
        """
        positions = self.positions()
        best = self._read_best()
        wanted = positions if resume == "auto" else [each for each in positions if str(each[1]) == resume]
        if resume == "best" and best is not None:
            wanted = [best.position]
        for position in wanted:
            try:
                self._download(folder, position)
            except BrokenCheckpoint as error:
                warn(f"checkpoint.mirror: skipping the checkpoint at step {position[1]}: {error}")
            else:
                # Starts of this folder are later than all that the mirror has seen.
                folder.generation_folder(positions[0][0]).mkdir(exist_ok=True)
                if best is not None:
                    self._restore_best(folder, best, position, warn)
                warn(f"checkpoint.dir has no checkpoint: took the one at step {position[1]} from {self.url}")
                return
        if wanted:
            raise InputError(f"checkpoint.mirror {self.url}: none of its {len(wanted)} checkpoints is whole")

    def _restore_best(self, folder: CheckpointFolder, best: Best, there: Position, warn: Callable[[str], None]) -> None:
        """Download the best checkpoint, unless it is the one that is there, and name it the best."""
        try:
            if best.position != there:
                self._download(folder, best.position)
        except BrokenCheckpoint as error:
            warn(f"checkpoint.mirror: skipping the best checkpoint, at step {best.step}: {error}")
            return
        try:
            write_best(folder.path, best)
        except OSError as error:
            raise InputError(f"checkpoint.dir {folder.path} cannot be written: {error.strerror}") from None

    def _download(self, folder: CheckpointFolder, position: Position) -> None:
        manifest = self._manifest(position)
        source = self._step_url(position)
        try:
            folder.generation_folder(position[0]).mkdir(parents=True, exist_ok=True)
            target = folder.step_folder(*position)
        except OSError as error:
            raise InputError(f"checkpoint.dir {folder.path} cannot be written: {error.strerror}") from None
        for entry in manifest.files:
            try:
                get_file(join(source, entry.name), target / entry.name)
            except FileNotFoundError:
                raise BrokenCheckpoint(f"{join(source, entry.name)}: there is no such file") from None
            check(target, entry)
            with (target / entry.name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(target)
        write_whole(target / _MANIFEST, encode(manifest))

    def _manifest(self, position: Position) -> Manifest:
        url = join(self._step_url(position), _MANIFEST)
        try:
            return decode_manifest(get_bytes(url), url)
        except FileNotFoundError:
            raise BrokenCheckpoint(f"{url}: there is no such file") from None

    def _step_url(self, position: Position) -> str:
        return f"{self.url}/generation-{position[0]:06d}/step-{position[1]:08d}"

    def _steps(self) -> dict[Position, list[str]]:
        """The names of the files of each step's folder."""
        found: dict[Position, list[str]] = {}
        for path in files_below(self.url):
            if match := _FILE.fullmatch(path):
                found.setdefault((int(match[1]), int(match[2])), []).append(match[3])
        return found


class MirrorThread:
    """Uploads checkpoints one after the other, beside training. Used with `with`, which waits for the last upload.

    A failed upload is a warning: the next checkpoint goes another way. At the end of a job that has not failed, the
    newest checkpoint is in the mirror, or JobError says why not.

    Args:
        mirror: where to.
        keep: see `CheckpointConfig`.
        folder: the job's folder.
    """

    def __init__(self, mirror: CheckpointMirror, *, keep: int, folder: Path) -> None:
        self._mirror = mirror
        self._keep = keep
        self._folder = folder
        self._changed = threading.Condition()
        self._waiting: Checkpoint | None = None
        self._working: Checkpoint | None = None
        self._ends = False
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ends = True
            if error is not None:
                self._waiting = None
            self._changed.notify_all()
        if error is None:
            self._thread.join()
            if self._failed:
                raise JobError(self._failed)

    def offer(self, checkpoint: Checkpoint) -> None:
        """Upload a checkpoint as soon as the one before is done, unless a newer one comes before that."""
        with self._changed:
            self._waiting = checkpoint
            self._changed.notify_all()

    def held(self) -> frozenset[Position]:
        """Positions of the checkpoints whose files are still needed."""
        with self._changed:
            return frozenset(each.position for each in (self._waiting, self._working) if each is not None)

    def _run(self) -> None:
        while (checkpoint := self._next()) is not None:
            try:
                self._mirror.upload(checkpoint)
                self._mirror.prune(self._keep, checkpoint.position, self._folder)
                self._failed = ""
            except Exception as error:
                reason = " ".join(str(error).split()) or type(error).__name__
                step = checkpoint.manifest.step
                self._failed = (
                    f"the checkpoint at step {step} is whole in checkpoint.dir, and could not be copied to "
                    f"checkpoint.mirror {self._mirror.url}: {reason}"
                )
                _LOG.warning("%s", self._failed)
        try:  # an evaluation behind the last upload
            self._mirror.name_best(self._folder)
        except Exception as error:
            _LOG.warning("checkpoint.mirror %s does not name the best checkpoint: %s", self._mirror.url, error)

    def _next(self) -> Checkpoint | None:
        """The next checkpoint; None: the job has ended."""
        with self._changed:
            self._working = None
            while self._waiting is None:
                if self._ends:
                    return None
                self._changed.wait()
            self._working, self._waiting = self._waiting, None
            return self._working
