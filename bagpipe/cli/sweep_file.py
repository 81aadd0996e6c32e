"""`SweepFile`: the outcomes of a sweep in a file that grows, so that an interrupted sweep goes on where it stopped.

    {"bagpipe_sweep": 1, "inputs": {"version": …, "replay": sha256, …, "--ranks": "1,2", …}}      the grid
    {"point": 17, "forecast": {"step_s": …, …}}                                                   one point a line
    {"point": 18, "error": "expected a cluster with 8 devices, got 4 of 'small'"}

A line counts once its newline is there: what a killed process left of its last line is cut off. Python writes and reads
floating-point numbers exactly, so the points are those of a sweep without interruption.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bagpipe.errors import InputError
from bagpipe.util.documents import parse_json, read_value
from bagpipe.util.outputs import cannot_write

if TYPE_CHECKING:  # it needs numpy, which other commands do without
    from bagpipe.forecast.sweep import Outcome

__all__ = ["SweepFile", "digest"]

_VERSION = 1
_KEY = "bagpipe_sweep"


def digest(text: str) -> str:
    """The SHA-256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


class SweepFile:
    """Outcomes of one grid. Used with `with`; only one process at a time has the file.

    Args:
        flag: names the file in messages.
        path: of the file; created if it is absent or empty.
        inputs: what the forecasts depend on, by name: digests of files, values of flags.

    Attributes:
        known: number of a point -> its outcome in the file.

    Raises:
        InputError: at entry: the file cannot be read or written, is none of a sweep, is used by another process, or is
            of another grid; the line says what differs.
    """

    def __init__(self, flag: str, path: str, inputs: Mapping[str, str]) -> None:
        self.known: dict[int, Outcome] = {}
        self._flag = flag
        self._path = path
        self._inputs = dict(inputs)
        self._file: FileIO | None = None

    def __enter__(self) -> Self:
        try:
            self._file = FileIO(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
        except OSError as error:
            raise cannot_write(self._path, error, key=self._flag) from None
        try:
            self._open(self._file)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._file is not None, "used with `with`"
        self._file.close()

    def add(self, outcomes: Mapping[int, Outcome]) -> None:
        """Append outcomes; they are on the disk when it returns.

        Raises:
            InputError, JobError: they cannot be written; JobError if the disk is full.
        """
        self._append("".join(_line(number, outcome) for number, outcome in outcomes.items()))

    def _open(self, file: FileIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{self._flag}: {self._path} is in use by another sweep") from None
        if not Path(self._path).is_file():
            raise InputError(f"{self._flag}: expected a file, {self._path} is not a regular file")
        content = file.readall()
        header = json.dumps({_KEY: _VERSION, "inputs": self._inputs}) + "\n"
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and not header.encode().startswith(content):
            raise self._foreign(1)
        file.truncate(len(whole))
        file.seek(len(whole))
        if not whole:
            self._append(header)
            return
        first, *lines = whole.splitlines()
        self._check_header(first)
        for number, line in enumerate(lines, 2):
            try:
                point, outcome = _parsed(line)
            except (InputError, KeyError, TypeError, ValueError):
                raise self._foreign(number) from None
            self.known[point] = outcome

    def _check_header(self, line: bytes) -> None:
        try:
            found = parse_json(line)
            version, inputs = found[_KEY], dict(found["inputs"])
        except (KeyError, TypeError, ValueError):
            raise self._foreign(1) from None
        if version != _VERSION:
            raise InputError(f"{self._flag}: expected version {_VERSION} of the file, {self._path} is of {version!r}")
        for name in dict.fromkeys([*self._inputs, *inputs]):
            there, here = (_short(each.get(name, "nothing")) for each in (inputs, self._inputs))
            if there != here:
                raise InputError(
                    f"{self._flag}: {self._path} is of another grid: {name} is {there} there and {here} here; "
                    "name another file"
                )

    def _foreign(self, line: int) -> InputError:
        return InputError(f"{self._flag}: {self._path}:{line}: expected the points of a sweep; name another file")

    def _append(self, text: str) -> None:
        assert self._file is not None, "used with `with`"
        data = text.encode()
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self._path, error, key=self._flag) from None


def _short(value: object) -> str:
    """A value for a message; of a digest the first digits."""
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _line(number: int, outcome: Outcome) -> str:
    what: dict[str, Any] = {"error": outcome} if isinstance(outcome, str) else {"forecast": dataclasses.asdict(outcome)}
    return json.dumps({"point": number, **what}) + "\n"


def _parsed(line: bytes) -> tuple[int, Outcome]:
    """Number and outcome of a line. Raises KeyError, TypeError, ValueError or InputError if it is none."""
    from bagpipe.forecast.forecast import Forecast

    found = parse_json(line)
    number = int(found["point"])
    if "error" in found:
        return number, str(found["error"])
    return number, read_value(Forecast, found["forecast"], "forecast", takes_integers=True)
