"""`CheckpointFolder`: the directory of a job's checkpoints: who may write where, what is whole, what can go.

    start ──new_generation──> generation-000007/ ──note_start──> whose it is, what it goes on from
    save  ──step_folder──> files ──write_part (every rank)──> read_parts (rank 0) ──publish──> manifest.json
    begin ──newest / at──> Checkpoint whose files all have their length and checksum; a broken one is passed over

A step's folder is nothing until its manifest is in place, and nothing again once the manifest has been renamed away.
Checkpoints are ordered by (generation, step): what a job makes that went back to an older step is newer than what it
went back over.
"""

from __future__ import annotations

import dataclasses
import errno
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bagpipe.checkpoint.codec import decode_manifest, decode_part, encode
from bagpipe.checkpoint.files import check, link_or_copy, read_small, sync_folder, write_whole
from bagpipe.checkpoint.manifest import BrokenCheckpoint, Manifest, Part
from bagpipe.errors import InputError
from bagpipe.util.failpoints import hit

__all__ = ["Checkpoint", "CheckpointFolder"]

_MANIFEST = "manifest.json"
_UNPUBLISHED = "manifest.removed"
#: In a generation's folder: the token of the job that made it, then generation and step of what it goes on from.
_START = "start"
_GENERATION = re.compile(r"generation-(\d{6,12})")
_STEP = re.compile(r"step-(\d{8,12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that is whole.

    Attributes:
        folder: where its files are.
        manifest: what it is.
    """

    folder: Path
    manifest: Manifest

    @property
    def position(self) -> tuple[int, int]:
        """Generation and step: the order of checkpoints."""
        return (self.manifest.generation, self.manifest.step)


class CheckpointFolder:
    """Checkpoints under one path. Any rank may read and write its part; rank 0 alone makes generations and publishes.

    Args:
        path: need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._broken: set[tuple[int, int]] = set()

    def new_generation(self) -> int:
        """Make the folder of the next generation, exclusively: two starts at once get two numbers.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for path in missing:
                sync_folder(path.parent)
            while True:
                number = 1 + max((generation for generation, _ in self._generations()), default=0)
                try:
                    self.generation_folder(number).mkdir()
                except FileExistsError:
                    continue
                sync_folder(self.path)
                return number
        except OSError as error:
            raise InputError(f"checkpoint.dir {self.path} cannot be written: {error.strerror}") from None

    def note_start(self, generation: int, token: str, origin: Checkpoint | None) -> None:
        """Say whose a generation is, and what it goes on from: a job that still runs does not remove that.

        Raises:
            OSError: the folder cannot be written.
        """
        position = () if origin is None else origin.position
        words = " ".join(map(str, (token, *position)))
        write_whole(self.generation_folder(generation) / _START, words.encode())

    def token_of(self, generation: int) -> str:
        """Of the job that made a generation; empty if it has not said so."""
        return (self._start(generation) or [""])[0]

    def _start(self, generation: int) -> list[str]:
        try:
            return (self.generation_folder(generation) / _START).read_text(errors="replace").split()
        except OSError:
            return []

    def generation_folder(self, generation: int) -> Path:
        """Where a start of the job keeps its checkpoints and journals."""
        return self.path / f"generation-{generation:06d}"

    def step_folder(self, generation: int, step: int) -> Path:
        """Make, if need be, the folder for the files of a checkpoint to come; any rank.

        Files that an interrupted save left there are written anew by this one, each under its own name.
        """
        folder = self._step_path(generation, step)
        folder.mkdir(exist_ok=True)
        return folder

    def write_part(self, generation: int, step: int, part: Part) -> None:
        """Put a rank's part in place; its files are durable already."""
        write_whole(self.step_folder(generation, step) / _part_name(part.rank), encode(part))

    def read_parts(self, generation: int, step: int, world_size: int) -> tuple[Part, ...] | None:
        """All ranks' parts; None while one is missing. Raises `BrokenCheckpoint` for one that cannot be read."""
        paths = [self._step_path(generation, step) / _part_name(rank) for rank in range(world_size)]
        if not all(path.exists() for path in paths):
            return None
        return tuple(decode_part(read_small(path), str(path)) for path in paths)

    def publish(self, manifest: Manifest, sources: Iterable[Path] = ()) -> Checkpoint:
        """Make a checkpoint exist: link the files of `manifest.base`, then put the manifest in place by one rename.

        Args:
            manifest: all files but those of `base` are in the step's folder, durable.
            sources: folders where files of `base` are looked for, in this order, if they are not in the step's folder.

        Raises:
            FileNotFoundError: a file that the manifest names is nowhere.
            OSError: the folder cannot be written; the checkpoints before are untouched.
        """
        folder = self.step_folder(manifest.generation, manifest.step)
        folders = tuple(sources)
        for file in manifest.base:
            if not (folder / file.file.name).exists():
                link_or_copy(_find(file.file.name, folders), folder / file.file.name)
        for entry in manifest.files:
            if (folder / entry.name).stat().st_size != entry.num_bytes:
                raise OSError(errno.EIO, "a file has another length than when it was written", str(folder / entry.name))
        sync_folder(folder)
        sync_folder(folder.parent)
        content = encode(manifest)
        # What could not be read back must not be published.
        manifest = decode_manifest(content, str(folder / _MANIFEST))
        hit("before-manifest")
        write_whole(folder / _MANIFEST, content)
        hit("after-manifest")
        return Checkpoint(folder=folder, manifest=manifest)

    def adopt(self, checkpoint: Checkpoint, generation: int) -> Checkpoint:
        """Publish a checkpoint once more, by the same files, as the first of a generation: it becomes the newest.

        Raises:
            OSError: the folder cannot be written; the checkpoints before are untouched.
        """
        manifest = checkpoint.manifest
        folder = self.step_folder(generation, manifest.step)
        for entry in manifest.files:
            link_or_copy(checkpoint.folder / entry.name, folder / entry.name)
        # No parent: a store with its id is loaded from files.
        return self.publish(dataclasses.replace(manifest, generation=generation, parent_checkpoint_id=""))

    def positions(self) -> tuple[tuple[int, int], ...]:
        """(generation, step) of what is published, whole or not; the newest first."""
        found = []
        for generation, folder in self._generations():
            for step, step_folder in _numbered(folder, _STEP):
                if (step_folder / _MANIFEST).exists():
                    found.append((generation, step))
        return tuple(sorted(found, reverse=True))

    def has_newer(self, checkpoint: Checkpoint) -> bool:
        """Whether anything newer is published that was not found broken."""
        return any(position > checkpoint.position for position in self.positions() if position not in self._broken)

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint; None if nothing was ever published here.

        Args:
            warn: told, in one line each, which checkpoint is passed over, which of its files is broken, and how.

        Raises:
            InputError: there are checkpoints, but all are broken; or the newest is of a newer format, or foreign.
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
        """The newest whole checkpoint of a step. Raises `InputError` if there is none, with the steps there are."""
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

    def known(self, generation: int, step: int) -> Checkpoint:
        """One that another rank has found whole: only its manifest is read. Raises `BrokenCheckpoint`."""
        folder = self._step_path(generation, step)
        manifest = decode_manifest(read_small(folder / _MANIFEST), str(folder / _MANIFEST))
        return Checkpoint(folder=folder, manifest=manifest)

    def prune(self, keep: int, newest: Checkpoint) -> None:
        """Remove all but the `keep` newest checkpoints, and what interrupted saves of earlier generations left.

        Args:
            keep: at least 1; checkpoints found broken are not counted.
            newest: known to be whole; neither it, nor anything newer, nor what a later start goes on from is removed.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        older = [position for position in self.positions() if position < newest.position]
        whole = [position for position in older if position not in self._broken]
        last = whole[keep - 2] if 1 < keep <= len(whole) + 1 else newest.position if keep == 1 else (0, 0)
        origins = self._origins_after(newest.manifest.generation)
        for position in older:
            if position < last and position not in origins:
                self._remove(self._step_path(*position))
        for generation, folder in self._generations():
            if generation < newest.manifest.generation:
                self._sweep(folder)

    def _origins_after(self, generation: int) -> set[tuple[int, int]]:
        """What starts after a generation say that they go on from."""
        starts = [self._start(number)[1:] for number, _ in self._generations() if number > generation]
        return {
            (int(words[0]), int(words[1])) for words in starts if len(words) == 2 and all(map(str.isdecimal, words))
        }

    def _sweep(self, generation: Path) -> None:
        """Remove what no manifest stands for; all of it once no checkpoint is left."""
        for _, folder in _numbered(generation, _STEP):
            if not (folder / _MANIFEST).exists():
                self._remove(folder)
        for journal in generation.glob("journal-*"):
            journal.unlink(missing_ok=True)
        if not _numbered(generation, _STEP):
            shutil.rmtree(generation)

    def _remove(self, folder: Path) -> None:
        """Unpublish, then remove: half a checkpoint must not look like one."""
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
                    f"{folder / _MANIFEST}: it is that of generation {manifest.generation}, step {manifest.step}"
                )
            for entry in manifest.files:
                check(folder, entry)
        except BrokenCheckpoint as error:
            self._broken.add(position)
            warn(f"the checkpoint of step {position[1]} is broken and passed over: {error}")
            return None
        return Checkpoint(folder=folder, manifest=manifest)

    def _generations(self) -> list[tuple[int, Path]]:
        return _numbered(self.path, _GENERATION)

    def _step_path(self, generation: int, step: int) -> Path:
        return self.generation_folder(generation) / f"step-{step:08d}"


def _part_name(rank: int) -> str:
    return f"part-{rank:04d}.json"


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    """Sub-folders with such a name, with their numbers; none if the folder is not there."""
    try:
        found = [(pattern.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"checkpoint.dir: {folder} cannot be read: {error.strerror}") from None
    return [(int(match[1]), path) for match, path in found if match]


def _find(name: str, folders: tuple[Path, ...]) -> Path:
    for source in folders:
        if (source / name).exists():
            return source / name
    raise FileNotFoundError(errno.ENOENT, "a row file of an earlier checkpoint is gone", name)
