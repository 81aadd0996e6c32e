"""`CheckpointFolder`: directory of a job's checkpoints: creation, publication, validation and pruning.

    start ──holder──> does a job still run here?
          ──new_generation──> generation-000007/, locked ──note_start──> its job's token, the checkpoint it resumes from
    save  ──step_folder──> files ──write_part (every rank)──> read_parts (rank 0) ──publish──> manifest.json
    begin ──newest / at──> Checkpoint whose files match length and checksum, and whose rows match their sums
                             broken ones are skipped

A checkpoint exists exactly while its manifest does: one rename publishes it, one rename removes it. Checkpoints are
ordered by (generation, step): those of a job that resumed from an older step are newer than the skipped ones.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bagpipe.checkpoint.best import read_best
from bagpipe.checkpoint.checkpoint_rows import check_row_sums
from bagpipe.checkpoint.codec import decode_manifest, decode_part, encode
from bagpipe.checkpoint.files import check, link_or_copy, open_plain, read_small, sync_folder, write_whole
from bagpipe.checkpoint.folder_lock import FolderLock, holder
from bagpipe.checkpoint.manifest import BrokenCheckpoint, Manifest, Part
from bagpipe.errors import FencedError, InputError
from bagpipe.util.failpoints import hit

__all__ = ["Checkpoint", "CheckpointFolder"]

_MANIFEST = "manifest.json"
_UNPUBLISHED = "manifest.removed"
#: File in a generation's folder: the token of its job, then generation and step of the checkpoint it resumes from.
_START = "start"
#: Start of the name of a generation's folder before it has a number.
_STARTING = ".starting-"
_MAX_START_BYTES = 1024
_GENERATION = re.compile(r"generation-(\d{6,12})")
_STEP = re.compile(r"step-(\d{8,12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A valid checkpoint.

    Attributes:
        folder: folder of its files.
        manifest: its manifest.
    """

    folder: Path
    manifest: Manifest

    @property
    def position(self) -> tuple[int, int]:
        """Generation and step: the order of checkpoints."""
        return (self.manifest.generation, self.manifest.step)


class CheckpointFolder:
    """Checkpoints under one path. Every rank reads and writes its part; only rank 0 creates generations and publishes.

    Args:
        path: the directory; can be absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._broken: set[tuple[int, int]] = set()
        self._lock: FolderLock | None = None

    def holder(self, *, before: int | None = None) -> str:
        """Process of the newest job that still runs on this path, as text; empty if there is none.

        Args:
            before: only jobs of earlier generations.
        """
        for generation, folder in reversed(self._generations()):
            if (before is None or generation < before) and (found := holder(folder)):
                return found
        return ""

    def new_generation(self) -> int:
        """Create and lock the folder of the next generation: concurrent starts get different numbers.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for path in missing:
                sync_folder(path.parent)
            # Locked before it has a number: no other start can find it unlocked.
            folder = self.path / f"{_STARTING}{secrets.token_hex(8)}"
            folder.mkdir()
            self._lock = FolderLock(folder)
            while True:
                number = 1 + self.last_generation()
                try:
                    folder.rename(self.generation_folder(number))
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
                    continue
                sync_folder(self.path)
                return number
        except OSError as error:
            raise InputError(f"checkpoint.dir {self.path} cannot be written: {error.strerror}") from None

    def abandon(self, generation: int) -> None:
        """Remove the folder of a generation that this process created and has not used."""
        self.release()
        shutil.rmtree(self.generation_folder(generation), ignore_errors=True)

    def release(self) -> None:
        """Unlock the generation that this process created, if any."""
        if self._lock is not None:
            self._lock.release()

    def check_newest(self, generation: int) -> None:
        """Check that no job has started on this path after the one of `generation`.

        Raises:
            FencedError: a job has; it may remove files that this one is about to write.
        """
        newest = max((number for number, _ in self._generations() if self._start(number)), default=0)
        if newest > generation:
            raise FencedError(
                f"checkpoint.dir {self.path} was taken over: start {newest} of the job runs on it, this is start "
                f"{generation}"
            )

    def note_start(self, generation: int, token: str, origin: Checkpoint | None) -> None:
        """Record a generation's token and origin. A job that is still running does not prune the origin.

        Raises:
            OSError: the folder cannot be written.
        """
        position = () if origin is None else origin.position
        words = " ".join(map(str, (token, *position)))
        write_whole(self.generation_folder(generation) / _START, words.encode())

    def token_of(self, generation: int) -> str:
        """Token of the job that created a generation; empty if none is recorded."""
        return (self._start(generation) or [""])[0]

    def _start(self, generation: int) -> list[str]:
        try:
            with open_plain(self.generation_folder(generation) / _START) as file:
                return file.read(_MAX_START_BYTES).decode(errors="replace").split()
        except OSError:
            return []

    def generation_folder(self, generation: int) -> Path:
        """Folder of one start's checkpoints and journals."""
        return self.path / f"generation-{generation:06d}"

    def step_folder(self, generation: int, step: int) -> Path:
        """Create the folder of a new checkpoint unless it exists; any rank.

        The new save overwrites files of an interrupted one under the same names.
        """
        folder = self._step_path(generation, step)
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "expected a folder, got a symbolic link", str(folder))
        return folder

    def write_part(self, generation: int, step: int, part: Part) -> None:
        """Write a rank's part. Its files must be durable."""
        write_whole(self.step_folder(generation, step) / _part_name(part.rank), encode(part))

    def read_parts(self, generation: int, step: int, world_size: int) -> tuple[Part, ...] | None:
        """All ranks' parts; None while one is missing. Raises `BrokenCheckpoint` for one that cannot be read."""
        paths = [self._step_path(generation, step) / _part_name(rank) for rank in range(world_size)]
        if not all(path.exists() for path in paths):
            return None
        return tuple(decode_part(read_small(path), str(path)) for path in paths)

    def publish(self, manifest: Manifest, sources: Iterable[Path] = ()) -> Checkpoint:
        """Publish a checkpoint: link the files of `manifest.linked`, then rename the manifest into place.

        Args:
            manifest: all files except those of `linked` are durable in the step's folder.
            sources: folders searched in order for files of `linked` that are missing in the step's folder.

        Raises:
            FileNotFoundError: a file of the manifest is in no folder.
            OSError: the folder cannot be written; earlier checkpoints are intact.
        """
        folder = self.step_folder(manifest.generation, manifest.step)
        folders = tuple(sources)
        for entry in manifest.linked:
            if not (folder / entry.name).exists():
                link_or_copy(_find(entry.name, folders), folder / entry.name)
        for entry in manifest.files:
            if (folder / entry.name).stat().st_size != entry.num_bytes:
                raise OSError(errno.EIO, "a file has another length than when written", str(folder / entry.name))
        sync_folder(folder)
        sync_folder(folder.parent)
        content = encode(manifest)
        # Publish only a manifest that decodes.
        manifest = decode_manifest(content, str(folder / _MANIFEST))
        hit("before-manifest")
        write_whole(folder / _MANIFEST, content)
        hit("after-manifest")
        return Checkpoint(folder=folder, manifest=manifest)

    def adopt(self, checkpoint: Checkpoint, generation: int) -> Checkpoint:
        """Republish a checkpoint with the same files as the first of a generation, which makes it the newest.

        Raises:
            OSError: the folder cannot be written; earlier checkpoints are intact.
        """
        manifest = checkpoint.manifest
        folder = self.step_folder(generation, manifest.step)
        for entry in manifest.files:
            link_or_copy(checkpoint.folder / entry.name, folder / entry.name)
        # No parent: a store with the parent's id is reloaded from files.
        return self.publish(dataclasses.replace(manifest, generation=generation, parent_checkpoint_id=""))

    def positions(self) -> tuple[tuple[int, int], ...]:
        """(generation, step) of all published checkpoints, valid or not; the newest first."""
        found = []
        for generation, folder in self._generations():
            for step, step_folder in _numbered(folder, _STEP):
                if (step_folder / _MANIFEST).exists():
                    found.append((generation, step))
        return tuple(sorted(found, reverse=True))

    def has_newer(self, checkpoint: Checkpoint) -> bool:
        """Whether a newer checkpoint is published that was not found broken."""
        return any(position > checkpoint.position for position in self.positions() if position not in self._broken)

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest valid checkpoint; None if nothing is published.

        Args:
            warn: called with one line per skipped checkpoint: its step, the broken file and the reason.

        Raises:
            InputError: all checkpoints are broken, or the newest has a newer or foreign format.
        """
        positions = self.positions()
        for position in positions:
            checkpoint = self._load(position, warn)
            if checkpoint is not None:
                return checkpoint
        if positions:
            raise InputError(f"checkpoint.dir {self.path}: none of its {len(positions)} checkpoints is whole")
        return None

    def at(self, step: int, warn: Callable[[str], None]) -> Checkpoint:
        """The newest valid checkpoint of a step. Raises `InputError` with the available steps if there is none."""
        positions = self.positions()
        for position in positions:
            if position[1] == step:
                checkpoint = self._load(position, warn)
                if checkpoint is not None:
                    return checkpoint
        steps = sorted({position[1] for position in positions if position not in self._broken})
        raise InputError(
            f"checkpoint.dir {self.path} has no whole checkpoint of step {step}, it has steps "
            f"{', '.join(map(str, steps)) or 'none'}"
        )

    def chosen(self, resume: str, warn: Callable[[str], None]) -> Checkpoint | None:
        """The checkpoint that `checkpoint.resume` names: auto (the newest; None: there is none), best or a step.

        Raises: see `newest`, `best` and `at`.
        """
        if resume == "auto":
            return self.newest(warn)
        return self.best(warn) if resume == "best" else self.at(int(resume), warn)

    def best(self, warn: Callable[[str], None]) -> Checkpoint:
        """The checkpoint of the best evaluation. Raises `InputError` if none is named, or it is not whole."""
        best = read_best(self.path)
        checkpoint = None if best is None else self._load(best.position, warn)
        if checkpoint is None:
            raise InputError(f"checkpoint.dir {self.path} has no whole checkpoint of a best evaluation")
        return checkpoint

    def known(self, generation: int, step: int) -> Checkpoint:
        """A checkpoint that another rank has validated; reads only its manifest. Raises `BrokenCheckpoint`."""
        folder = self._step_path(generation, step)
        manifest = decode_manifest(read_small(folder / _MANIFEST), str(folder / _MANIFEST))
        return Checkpoint(folder=folder, manifest=manifest)

    def prune(self, keep: int, newest: Checkpoint, held: Iterable[tuple[int, int]] = ()) -> None:
        """Remove all but the `keep` newest checkpoints, and leftovers of interrupted saves in earlier generations.

        Args:
            keep: at least 1. Broken checkpoints do not count.
            newest: a valid checkpoint. It, newer ones, origins of later starts, the best one and `held` are kept.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        older = [position for position in self.positions() if position < newest.position]
        whole = [position for position in older if position not in self._broken]
        last = whole[keep - 2] if 1 < keep <= len(whole) + 1 else newest.position if keep == 1 else (0, 0)
        kept = self._origins_after(newest.manifest.generation) | set(held)
        if (best := read_best(self.path)) is not None:
            kept.add(best.position)
        for position in older:
            if position < last and position not in kept:
                self._remove(self._step_path(*position))
        for generation, folder in self._generations():
            if generation < newest.manifest.generation:
                self._sweep(folder)
        for folder in self.path.glob(f"{_STARTING}*"):
            if not holder(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _origins_after(self, generation: int) -> set[tuple[int, int]]:
        """Positions of the checkpoints from which later generations resume."""
        starts = [self._start(number)[1:] for number, _ in self._generations() if number > generation]
        return {
            (int(words[0]), int(words[1])) for words in starts if len(words) == 2 and all(map(str.isdecimal, words))
        }

    def _sweep(self, generation: Path) -> None:
        """Remove unpublished folders and journals; remove the generation if no checkpoint is left."""
        for _, folder in _numbered(generation, _STEP):
            if not (folder / _MANIFEST).exists():
                self._remove(folder)
        for journal in generation.glob("journal-*"):
            journal.unlink(missing_ok=True)
        if not _numbered(generation, _STEP):
            shutil.rmtree(generation)

    def _remove(self, folder: Path) -> None:
        """Unpublish, then remove: a partly removed checkpoint must not look valid."""
        manifest = folder / _MANIFEST
        if manifest.exists():
            manifest.rename(folder / _UNPUBLISHED)
            sync_folder(folder)
        shutil.rmtree(folder)

    def _load(self, position: tuple[int, int], warn: Callable[[str], None]) -> Checkpoint | None:
        folder = self._step_path(*position)
        try:
            manifest = decode_manifest(read_small(folder / _MANIFEST), str(folder / _MANIFEST))
            if (manifest.generation, manifest.step) != position:
                raise BrokenCheckpoint(
                    f"{folder / _MANIFEST}: expected the manifest of generation {position[0]}, step {position[1]}, got "
                    f"that of generation {manifest.generation}, step {manifest.step}"
                )
            for entry in manifest.files:
                check(folder, entry)
            check_row_sums(folder, manifest)
        except BrokenCheckpoint as error:
            self._broken.add(position)
            warn(f"the checkpoint of step {position[1]} is broken and skipped: {error}")
            return None
        return Checkpoint(folder=folder, manifest=manifest)

    def last_generation(self) -> int:
        """Number of the newest start on this path; 0 if there is none."""
        return max((generation for generation, _ in self._generations()), default=0)

    def _generations(self) -> list[tuple[int, Path]]:
        return _numbered(self.path, _GENERATION)

    def _step_path(self, generation: int, step: int) -> Path:
        return self.generation_folder(generation) / f"step-{step:08d}"


def _part_name(rank: int) -> str:
    return f"part-{rank:04d}.json"


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Subfolders that match `pattern`, with their numbers; none if the folder does not exist.

    Raises:
        InputError: the folder cannot be read, or one of them is a symbolic link: to remove it would damage its target.
    """
    try:
        found = [(pattern.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
        links = [path for match, path in found if match and path.is_symlink()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"checkpoint.dir: {folder} cannot be read: {error.strerror}") from None
    if links:
        raise InputError(f"checkpoint.dir: expected a folder, got a symbolic link: {links[0]}")
    return [(int(match[1]), path) for match, path in found if match]


def _find(name: str, folders: tuple[Path, ...]) -> Path:
    for source in folders:
        if (source / name).exists():
            return source / name
    raise FileNotFoundError(errno.ENOENT, "a row file of an earlier checkpoint is gone", name)
