"""`TfraPeer`: tensorflow-recommenders-addons as a contestant, in a python of its own.

TfraPeer ──lines──> PYTHON tfra_table.py ──C++ client, TCP──> the server
"""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import JobError

__all__ = ["TfraPeer"]

_PROGRAM = Path(__file__).with_name("tfra_table.py")


class TfraPeer:
    """Writes and reads one batch. Context manager.

    Args:
        python: interpreter with tensorflow-recommenders-addons.
        url: redis:// URL of the server.
        tables: table number of each row, uint32 ``[n]``.
        ids: int64 ``[n]``.
        rows: float32 ``[n, dim]``.

    Attributes:
        versions: of tensorflow and the addons.
        seconds: of the last call, as the other process measured it: the pipe between them costs nothing.

    Raises:
        JobError: on entering, if the program does not start.
    """

    def __init__(
        self, python: Path, url: str, *, tables: NDArray[np.uint32], ids: NDArray[np.int64], rows: NDArray[np.float32]
    ) -> None:
        self.versions = ""
        self.seconds = 0.0
        self._python = python
        self._url = urlsplit(url)
        self._arrays: dict[str, NDArray[Any]] = {"tables": tables, "ids": ids, "rows": rows}
        self._stack = ExitStack()
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagpipe-tfra-")))
            for name, array in self._arrays.items():
                np.save(folder / f"{name}.npy", array)
            command = [
                str(self._python),
                str(_PROGRAM),
                str(folder),
                self._url.hostname or "",
                str(self._url.port or 6379),
            ]
            self._process = stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )
            stack.callback(self._process.kill)
            while not (line := self._line()).startswith("ready "):
                if line:  # the addons print to standard output, too
                    continue
                raise JobError(f"{self._python} cannot run RedisTable: `{' '.join(command)}` says why")
            self.versions = line.removeprefix("ready ").strip()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def write(self) -> None:
        """Insert all rows."""
        self._call("write")

    def read(self) -> None:
        """Look all rows up."""
        self._call("read")

    def _call(self, name: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        self.seconds = float(self._line())  # ValueError if it has ended

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()
