"""`ConversionManifest`: the finished parts of a conversion into a folder, in the file `_conversion.jsonl` beside them.

    line 1   what is converted: the version of each input file, the options that the parts depend on
    line 2…  a finished part: rows, skipped rows, bytes, XXH3-64 of its content; in the order of finishing
    last     the number of parts, when all are finished

A killed conversion leaves a torn last line at most, which the next one drops. The file is locked while it is open. At
the end the lines are in the order of the parts, so that equal conversions leave equal folders. Readers of folders leave
out names that begin with an underscore.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import xxhash

from bagpipe.errors import InputError
from bagpipe.util.documents import parse_json
from bagpipe.util.outputs import cannot_write, write_whole
from data.conversion_state import MANIFEST, finished_parts

__all__ = ["MANIFEST", "PLAIN", "ConversionManifest", "PartRecord", "record_of"]

#: Folder of the parts that are not annotated yet, within that of annotated ones.
PLAIN = "_plain"
VERSION = 1

#: Names of parts, and of parts that a killed conversion was writing.
_PART = re.compile(r"part-\d{5,}\.(arrow|parquet)(\.partial)?")

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """A finished part.

    Attributes:
        part: file name.
        rows, skipped: good rows, malformed rows left out.
        num_bytes: of the file.
        xxh3_64: hexadecimal digest of its content.
        is_kept: an earlier conversion has finished it. Not in the manifest.
    """

    part: str
    rows: int
    skipped: int
    num_bytes: int
    xxh3_64: str
    is_kept: bool = field(default=False, compare=False)

    def line(self) -> bytes:
        """The line of the manifest."""
        value = dataclasses.asdict(self)
        del value["is_kept"]
        return json.dumps(value).encode() + b"\n"

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` has this content."""
        try:
            return path.stat().st_size == self.num_bytes and _digest(path) == self.xxh3_64
        except OSError:
            return False


def record_of(path: Path, *, rows: int, skipped: int) -> PartRecord:
    """The record of a part that has been written."""
    return PartRecord(part=path.name, rows=rows, skipped=skipped, num_bytes=path.stat().st_size, xxh3_64=_digest(path))


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


class ConversionManifest:
    """The manifest of a folder. Used with `with`, which locks it.

    Args:
        folder: of the parts; made if it is absent.
        inputs: input file -> its version.
        options: name -> value of what the parts depend on besides.
        redo: if the folder holds another conversion, remove its parts.

    Attributes:
        finished: part -> its record, of earlier conversions and this one.
        num_finished: parts of an earlier conversion that had finished all; None: there was none.

    Raises:
        InputError: the folder holds another conversion or other files, or another process is converting into it.
    """

    def __init__(
        self, folder: Path, *, inputs: Mapping[str, str], options: Mapping[str, Any], redo: bool = False
    ) -> None:
        self._folder = folder
        self._header: dict[str, Any] = {
            "conversion": VERSION,
            "options": dict(options),
            "inputs": [[path, version] for path, version in inputs.items()],
        }
        self._redo = redo
        self._file: BinaryIO | None = None
        self.finished: dict[str, PartRecord] = {}
        self.num_finished: int | None = None

    def __enter__(self) -> Self:
        try:
            self._open()
        except OSError as error:
            raise cannot_write(self._folder, error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def add(self, record: PartRecord) -> None:
        """Note that a part is finished."""
        self.finished[record.part] = record
        self._write(record.line())

    def finish(self, parts: Sequence[str]) -> None:
        """All parts are finished: write them in order, and that they are all.

        Raises:
            JobError: the manifest cannot be written.
        """
        lines = [_line(self._header), *(self.finished[part].line() for part in parts), _line({"finished": len(parts)})]
        write_whole(str(self._folder / MANIFEST), b"".join(lines))

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / MANIFEST
        is_new = not path.exists()
        if is_new and (others := sorted(os.listdir(self._folder))):
            raise InputError(
                f"{self._folder}: expected an empty folder or one of an earlier conversion, got one with {others[0]}"
            )
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise InputError(f"{self._folder}: another process is converting into this folder") from None
        try:
            self._take(self._file)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        assert self._file is not None, "called after it is opened"
        self._file.close()
        self._file = None

    def _take(self, file: BinaryIO) -> None:
        """Read the finished parts of an earlier conversion, or begin."""
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if lines and (problem := self._difference(lines[0])) is not None:
            if not self._redo:
                raise InputError(
                    f"{self._folder}: holds another conversion: {problem}; name another folder, or convert anew "
                    f"with --redo"
                )
            for name in os.listdir(self._folder):
                if _PART.fullmatch(name):
                    (self._folder / name).unlink()
            shutil.rmtree(self._folder / PLAIN, ignore_errors=True)
            lines, whole = [], b""
        if lines and (num_finished := finished_parts(lines[-1])) is not None:  # until it ends again
            self.num_finished = num_finished
            whole = whole[: -len(lines.pop()) - 1]
        file.truncate(len(whole))
        if not lines:
            self._write(_line(self._header))
        for line in lines[1:]:
            with suppress(ValueError, TypeError):  # a damaged line: the part is made again
                record = PartRecord(**parse_json(line))
                self.finished[record.part] = record

    def _difference(self, line: bytes) -> str | None:
        """The first difference between the conversion of a header and this one; None: they are the same."""
        try:
            found = parse_json(line)
            version, options, inputs = found["conversion"], found["options"], dict(found["inputs"])
        except (ValueError, KeyError, TypeError):
            return f"its {MANIFEST} is damaged"
        if version != VERSION:
            return f"its manifest has version {version}, expected {VERSION}"
        ours = dict(self._header["inputs"])
        for path in ours.keys() | inputs.keys():
            if path not in inputs or path not in ours:
                return f"{path} is {'no input of it' if path not in inputs else 'an input of it'}"
            if inputs[path] != ours[path]:
                return f"{path} was {inputs[path]}, and is {ours[path]}"
        if [*ours] != [*inputs]:
            return "its inputs are in another order"
        expected = json.loads(json.dumps(self._header["options"]))
        for name in {**expected, **options}:
            if options.get(name) != expected.get(name):
                return f"its {name} was {options.get(name)!r}, expected {expected.get(name)!r}"
        return None

    def _write(self, line: bytes) -> None:
        assert self._file is not None, "used in its with block"
        try:
            self._file.write(line)
        except OSError as error:
            raise cannot_write(self._folder / MANIFEST, error) from None


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
